"""Local blocks: cached blocks of the engine's own pool are found by content, and pinned until they are freed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test_lookups import BLOCK, make_layout
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.offload.loads.local_blocks import LocalBlocks
from hybridkv.planner import GroupKind, GroupSpec, LocalCopies, plan_load_runs

FULL, LARGE = GroupSpec(GroupKind.FULL, BLOCK), GroupSpec(GroupKind.FULL, 2 * BLOCK)
TOKENS = 6 * BLOCK


def own_hash(value: Any) -> bytes:
    return repr(value).encode()


def new_request(lora: LoRARequest | None = None) -> Request:
    init_none_hash(own_hash)
    hasher = get_request_block_hasher(BLOCK, own_hash)
    tokens, parameters = list(range(TOKENS + 1)), SamplingParams(max_tokens=9)
    return Request("r", tokens, parameters, None, lora_request=lora, block_hasher=hasher)


class Bench:
    """Pool with all blocks of two groups cached by a request, and another request with the same beginning."""

    def __init__(self, layout: CacheLayout | None = None, lora: LoRARequest | None = None) -> None:
        self.layout = layout or make_layout((FULL, LARGE)).layout
        self.pool = BlockPool(32, enable_caching=True, hash_block_size=BLOCK)
        self.left = [self.leave(0, BLOCK), self.leave(1, 2 * BLOCK)]
        self.tracked = TrackedRequest(new_request(lora), None, None)
        self.local = LocalBlocks(self.layout)
        self.local.bind(self.pool)
        tables = [[100 + i for i in range(6)], [200 + i for i in range(3)]]
        self.runs = plan_load_runs(self.layout.spec, TOKENS, 0, tables)

    def leave(self, group_index: int, block_tokens: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = self.pool.get_new_blocks(TOKENS // block_tokens)
        self.pool.cache_full_blocks(new_request(), blocks, 0, len(blocks), block_tokens, group_index)
        self.pool.free_blocks(reversed(blocks))
        return blocks

    def find(self) -> LocalCopies:
        found = self.look()
        assert found is not None
        return found

    def look(self) -> LocalCopies | None:
        return self.local.find(self.tracked, self.runs, 0)

    def evict(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.pool.evict_blocks({block.block_id for block in blocks})


def test_blocks_are_found_by_content_for_any_block_size() -> None:
    bench = Bench()
    small, large = ([block.block_id for block in blocks] for blocks in bench.left)
    assert [(run.group_index, *run.end_tokens(2 * BLOCK)) for run in bench.runs] == [
        (group, *range(2 * BLOCK, TOKENS + 1, 2 * BLOCK)) for group in range(2)
    ]
    pairs = [tuple(small[i : i + 2]) for i in (0, 2, 4)]
    assert bench.find() == LocalCopies((*pairs, *((block_id,) for block_id in large)), TOKENS)


def test_evicted_blocks_are_not_found() -> None:
    bench = Bench()
    bench.evict([bench.left[0][3], bench.left[1][2]])
    assert [bool(ids) for ids in bench.find().block_ids] == [True, False, False, True, True, False]
    assert bench.find().num_tokens == 2 * BLOCK


def test_pinned_blocks_are_not_allocated_until_they_are_freed() -> None:
    bench = Bench()
    free = bench.pool.get_num_free_blocks()
    found = bench.find()
    bench.local.pin("r", found)
    assert bench.pool.get_num_free_blocks() == free - 9 and bench.local.holds_freed_blocks()
    taken = bench.pool.get_new_blocks(bench.pool.get_num_free_blocks())
    assert {block.block_id for block in taken}.isdisjoint(itertools.chain(*found.block_ids))
    assert bench.find() == found
    bench.local.free("r")
    bench.local.free("r")
    assert bench.pool.get_num_free_blocks() == 9 and not bench.local.holds_freed_blocks()


def test_blocks_of_a_running_request_are_found_and_free_nothing() -> None:
    bench = Bench()
    for blocks in bench.left:
        bench.pool.touch(blocks)
    bench.local.pin("r", bench.find())
    assert bench.find().num_tokens == TOKENS and not bench.local.holds_freed_blocks()


def test_close_unpins_all_blocks() -> None:
    bench = Bench()
    free = bench.pool.get_num_free_blocks()
    bench.local.pin("a", bench.find())
    bench.local.pin("b", bench.find())
    bench.local.close()
    assert bench.pool.get_num_free_blocks() == free


def test_a_request_with_an_adapter_finds_no_block() -> None:
    assert Bench(lora=LoRARequest("a", 1, "/nowhere")).look() is None


def test_hashes_that_may_collide_find_no_block() -> None:
    layout = dataclasses.replace(make_layout((FULL, LARGE)).layout, hash_algorithm="xxhash")
    assert Bench(layout).look() is None


@pytest.mark.parametrize("switch", ["by configuration", "later", "without a pool", "without prefix caching"])
def test_local_blocks_switched_off_find_nothing(switch: str) -> None:
    bench = Bench()
    assert bench.find().num_tokens == TOKENS
    if switch == "later":
        bench.local.switch_off()
    else:
        bench.local = LocalBlocks(bench.layout, is_wanted=switch != "by configuration")
        if switch != "without a pool":
            bench.local.bind(
                BlockPool(32, enable_caching=False, hash_block_size=BLOCK) if "caching" in switch else bench.pool
            )
    assert bench.look() is None


def test_tokens_without_a_hash_are_not_found() -> None:
    bench = Bench()
    del bench.tracked.request.block_hashes[3:]
    assert bench.find().num_tokens == 2 * BLOCK


@pytest.mark.parametrize(("policy", "is_early"), [("fcfs", False), ("priority", True)])
def test_only_the_priority_policy_hashes_blocks_before_computing(policy: str, is_early: bool) -> None:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
    assert compat.hashes_before_computing(config) is is_early


@pytest.mark.parametrize(
    ("fields", "is_after"), [({"has_sync_kv_loads": False}, True), ({"has_sync_kv_loads": True}, False), ({}, False)]
)
def test_an_engine_without_the_field_loads_before_the_forward_pass(fields: dict[str, bool], is_after: bool) -> None:
    output: Any = SimpleNamespace(**fields)
    assert compat.loads_after_forward(output) is is_after
