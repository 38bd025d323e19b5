"""A server of LMCache and host memory below one engine: the better one loads, and answers do not change."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import harness
import patience
import pytest
from audit import Audit
from equality import require_same, require_same_output
from harness import SAME_STEPS, Engine, Result, make_prompt
from lmcache_site import CHUNK_TOKENS, ENGINE_ARGUMENTS, LMCacheSite, prompt_lengths
from lmcache_witness import Link, LMCacheAudit

_SEEDS = itertools.count(1000, 1000)
SERVER, MEMORY = 0, 1
FINE = {"gpt-oss": 128, "qwen3-next": 384}
"""Chunk sizes of host memory."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.scratch_directory(tmp_path_factory.mktemp("multi"))


@contextmanager
def running(site: LMCacheSite, kind: str, directory: Path, weights: tuple[float, float]) -> Iterator[Engine]:
    tiers = [{"type": "ram", "capacity": "256MiB"}]
    memory = {"tiers": tiers, "chunk_tokens": FINE[kind], "load_weight": weights[1], **SAME_STEPS}
    children = [
        site.transfer(load_weight=weights[0]),
        {"kv_connector": "HybridOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": memory},
    ]
    config = {
        "kv_connector": "HybridMultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children, "lookup_timeout_seconds": patience.seconds(6.0)},
    }
    arguments = ENGINE_ARGUMENTS.get(kind, {})
    with harness.running_engine(kind, directory, kv_transfer_config=config, **arguments) as engine:
        yield engine


def watching(engine: Engine) -> list[Audit]:
    """A witness for each child."""
    audits = [LMCacheAudit(engine, SERVER), Audit(engine, MEMORY)]
    for audit in audits:
        audit.attach()
    return audits


def one_by_one(link: Link, prompts: Sequence[Sequence[int]]) -> list[Result]:
    return [result for prompt in prompts for result in link.engine.generate([prompt])]


@pytest.mark.parametrize("preferred", [SERVER, MEMORY], ids=["the server", "host memory"])
def test_the_weight_decides_between_two_equal_hits(
    site: LMCacheSite, kind: str, directory: Path, preferred: int
) -> None:
    weights = (10.0, 1.0) if preferred == SERVER else (1.0, 10.0)
    seed = next(_SEEDS)
    prompts = [make_prompt(length, seed=seed + i) for i, length in enumerate(prompt_lengths(kind))]
    with running(site, kind, directory, weights) as engine:
        audits, link = watching(engine), Link(engine, site, SERVER)
        link.require_up()
        cold = one_by_one(link, prompts)
        link.settle()
        engine.reset_prefix_cache()
        warm = one_by_one(link, prompts)
        require_same(audits[preferred], cold, warm)
        chunk = CHUNK_TOKENS[kind]
        restorable = [(len(prompt) - 1) // chunk * chunk for prompt in prompts]
        assert [result.num_cached_tokens for result in warm] == restorable
        assert audits[preferred].restored_tokens == sum(restorable)
        assert audits[1 - preferred].restored_tokens == 0


def test_the_child_with_more_tokens_loads_and_the_other_is_the_fallback(
    site: LMCacheSite, kind: str, directory: Path
) -> None:
    """First host memory is cleared, later the server is killed: the remaining child loads."""
    chunk, fine = CHUNK_TOKENS[kind], FINE[kind]
    prompts = [make_prompt(2 * chunk + fine + 40, seed=next(_SEEDS)) for _ in range(2)]
    with running(site, kind, directory, (1.0, 1.0)) as engine:
        link = Link(engine, site, SERVER)
        link.require_up()
        server, memory = watching(engine)
        cold = one_by_one(link, prompts)
        link.settle()
        engine.reset_prefix_cache()
        warm = one_by_one(link, prompts)
        if fine < chunk:  # otherwise both hold the same number of tokens, and the first one loads
            require_same(memory, cold, warm)
            assert (server.restored_tokens, memory.restored_tokens) == (0, 2 * (2 * chunk + fine))
        engine.reset_prefix_cache()
        engine.connector.sub_connectors[MEMORY].reset_cache()
        for audit in (server, memory):
            audit.forget()
        warm = one_by_one(link, prompts)
        require_same(server, cold, warm)
        at_server = (len(prompts[0]) - 1) // chunk * chunk
        assert (server.restored_tokens, memory.restored_tokens) == (2 * at_server, 0)
        engine.reset_prefix_cache()
        site.kill()
        link.require_down()
        for audit in (server, memory):
            audit.forget()
        warm = one_by_one(link, prompts)
        assert server.loads == []
        require_same(memory, cold, warm)
        engine.reset_prefix_cache()
        engine.connector.sub_connectors[MEMORY].reset_cache()
        require_same_output(cold, one_by_one(link, prompts))
    site.start()
