"""An engine restores what another one stored, from the disk of a restarted LMCache server.

No shared memory of an engine remains after its end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import harness
import pytest
from equality import require_same
from harness import Engine, Result, make_prompt
from lmcache_site import CHUNK_TOKENS, ENGINE_ARGUMENTS, LMCacheSite, prompt_lengths
from lmcache_witness import Link, LMCacheAudit

from kits.lmcache.segments import segments_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return harness.scratch_directory(tmp_path)


def shared_by_this_process() -> set[Path]:
    """Shared memory segments that engines of this process have created and not removed."""
    return segments_of(os.getpid())


def results_of(engine: Engine, prompts: list[list[int]]) -> list[Result]:
    return [engine.generate([prompt])[0] for prompt in prompts]


@pytest.mark.full
def test_another_engine_restores_from_the_disk_of_another_server(site: LMCacheSite, kind: str, directory: Path) -> None:
    prompts = [make_prompt(length, seed=i) for i, length in enumerate(prompt_lengths(kind))]
    arguments: dict[str, Any] = {"kv_transfer_config": site.transfer(), **ENGINE_ARGUMENTS.get(kind, {})}
    assert not shared_by_this_process()
    with harness.running_engine(kind, directory, **arguments) as engine:
        before = LMCacheAudit(engine)
        before.attach()
        Link(engine, site).require_up()
        cold = results_of(engine, prompts)
        Link(engine, site).settle()
        assert shared_by_this_process()
    assert not shared_by_this_process()
    site.restart()
    with harness.running_engine(kind, directory, **arguments) as engine:
        audit = LMCacheAudit(engine, pages=before.pages)
        audit.attach()
        Link(engine, site).require_up()
        warm = results_of(engine, prompts)
        require_same(audit, cold, warm)
        restorable = [(len(prompt) - 1) // CHUNK_TOKENS[kind] * CHUNK_TOKENS[kind] for prompt in prompts]
        assert [result.num_cached_tokens for result in warm] == restorable
        assert audit.restored_tokens == sum(restorable)
    assert not shared_by_this_process()
    # Control: other weights use another cache and give other answers.
    with harness.running_engine(kind, directory, weights_seed=1, **arguments) as engine:
        others = results_of(engine, prompts)
    assert [result.num_cached_tokens for result in others] == [0, 0, 0]
    assert not any(a.same_output(b) for a, b in zip(cold, others, strict=True))
