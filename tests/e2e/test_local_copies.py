"""Attention beyond the engine's deepest state is copied from the engine's own blocks, exactly equal to its own hit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from audit import Audit
from equality import require_same
from harness import Engine, Result, exact_prompt_lengths, make_prompt

from hybridkv.connectors.vllm.offload.loads.local_blocks import LocalBlocks
from hybridkv.planner import GroupKind, LocalCopies

LOCAL_TOKENS = "vllm:hybridkv_local_tokens"
LOCAL_BYTES = "vllm:hybridkv_local_bytes"
LOAD_BYTES = "vllm:hybridkv_load_bytes"


@pytest.fixture(scope="module")
def kind() -> str:
    return "qwen3-next"


@pytest.fixture(scope="module")
def engine_arguments() -> dict[str, Any]:
    return {"disable_log_stats": False}


@pytest.fixture
def prompts(kind: str) -> list[list[int]]:
    return [make_prompt(length, seed=i) for i, length in enumerate(exact_prompt_lengths(kind, 2))]


@pytest.fixture
def local(engine: Engine, audit: Audit, prompts: list[list[int]]) -> list[Result]:
    """The engine's own hits. Afterwards the engine has lost all states but no attention."""
    one_by_one(engine, prompts)
    hits = one_by_one(engine, prompts)
    assert audit.restored_tokens == 0 and all(hit.num_cached_tokens for hit in hits)
    lose_states(engine)
    return hits


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Result]:
    return [engine.generate([prompt])[0] for prompt in prompts]


def lose_states(engine: Engine) -> None:
    """As when the engine reuses the blocks of states."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    groups = engine.connector._layout.spec.groups
    lost = {
        block.block_id
        for block in pool.blocks
        if block.block_hash is not None
        and groups[int.from_bytes(block.block_hash[-4:], "big")].kind is GroupKind.RECURRENT
    }
    assert lost and all(pool.blocks[block_id].ref_cnt == 0 for block_id in lost)
    pool.evict_blocks(lost)
    for group in engine.kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            for block_id in lost:
                engine.page(layer, block_id).fill_(0x7B)


def counted(engine: Engine) -> list[float]:
    """Values of counters, summed over labels."""
    found = engine.counters()
    return [
        sum(value for key, value in found.items() if key.startswith(name))
        for name in (LOCAL_TOKENS, LOCAL_BYTES, LOAD_BYTES)
    ]


def test_attention_that_the_engine_holds_is_not_loaded(
    engine: Engine, audit: Audit, prompts: list[list[int]], local: list[Result]
) -> None:
    before = counted(engine)
    warm = one_by_one(engine, prompts)
    require_same(audit, local, warm)
    assert [result.num_cached_tokens for result in warm] == [result.num_cached_tokens for result in local]
    layout, restored = engine.connector._layout, sum(result.num_cached_tokens for result in warm)
    by_kind = {
        kind: sum(layout.content_bytes(i) for i, group in enumerate(layout.spec.groups) if group.kind is kind)
        for kind in (GroupKind.RECURRENT, GroupKind.FULL)
    }
    blocks = restored // layout.spec.chunk_tokens
    assert audit.restored_tokens == restored
    assert [after - then for after, then in zip(counted(engine), before, strict=True)] == [
        restored,
        blocks * by_kind[GroupKind.FULL],
        len(prompts) * by_kind[GroupKind.RECURRENT],
    ]


def test_concurrent_siblings_copy_from_the_same_blocks(
    engine: Engine, audit: Audit, prompts: list[list[int]], local: list[Result]
) -> None:
    before = counted(engine)
    warm = engine.generate([prompts[-1]] * 2)
    assert [result.token_ids for result in warm] == [local[-1].token_ids] * 2
    assert audit.mismatches == [] and audit.compared_pages > 0
    assert counted(engine)[0] - before[0] >= local[-1].num_cached_tokens


def test_a_copy_from_wrong_blocks_is_detected(
    engine: Engine, audit: Audit, prompts: list[list[int]], local: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = LocalBlocks.find

    def turned(*arguments: Any) -> LocalCopies:
        found = find(*arguments)
        ids = [each for each in found.block_ids if each]
        rest = iter([*ids[1:], *ids[:1]])
        return msgspec.structs.replace(found, block_ids=tuple(next(rest) if each else () for each in found.block_ids))

    monkeypatch.setattr(LocalBlocks, "find", turned)
    warm = one_by_one(engine, prompts)
    assert audit.restored_tokens > 0
    with pytest.raises(AssertionError):
        require_same(audit, local, warm)
    assert audit.mismatches
    assert not all(a.same_output(b) for a, b in zip(local, warm, strict=True)), (
        "answers did not change, so they prove nothing"
    )
