"""Chunks that end inside blocks are stored and loaded token by token, in any memory order of the engine."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_copies import bytes_of, copy_of

from hybridkv.canonical import LayerLayout, TokenRange
from hybridkv.canonical.strides import MAX_REGIONS
from hybridkv.canonical.torch_view import canonical_kv_caches, token_pages
from hybridkv.connectors.vllm.common.copies.lowering import GroupBlocks, JobLowering, RankMemory, StoreRuns, Zeros
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import Load, StepPlan, Store
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.worker import OffloadWorker
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Transfer, chunk_blocks, chunk_span
from hybridkv.tiers import Slot
from hybridkv.tiers.ram import RamArena
from hybridkv.transfer import CopyRuns, InlineCopyEngine

BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 12, 2, 24, 3
ORDERS = {"heads first": (0, 1, 2, 3), "tokens first": (0, 2, 1, 3)}


class Engine:
    """Caches of 12 blocks of 24 tokens. Kernels see blocks of `kernel_tokens`. One layer per entry of `contents`, the
    bytes of a head's token.
    """

    def __init__(self, order: str, kernel_tokens: int, seed: int, contents: Sequence[int] = (CONTENT,)) -> None:
        self.kernel_tokens = kernel_tokens
        self.caches: dict[str, torch.Tensor] = {}
        for number, content in enumerate(contents):
            shape = (BLOCKS * BLOCK_TOKENS // kernel_tokens, HEADS, kernel_tokens, content)
            physical = [shape[dim] for dim in ORDERS[order]]
            data = np.random.default_rng(seed + number).integers(-99, 99, physical, dtype=np.int8)
            self.caches[f"layer {number}"] = torch.from_numpy(data).permute(*np.argsort(ORDERS[order]).tolist())
        self.cache = self.caches["layer 0"]
        sizes = [HEADS * BLOCK_TOKENS * content for content in contents]
        self.layers = [LayerLayout(name, size, token_dim=2) for name, size in zip(self.caches, sizes, strict=True)]
        self.blocks = GroupBlocks(
            canonical_kv_caches(self.caches, [self.layers], BLOCKS).pages(0),
            BLOCK_TOKENS,
            lambda tokens: token_pages(self.caches, self.layers, BLOCKS, tokens),
        )

    def token(self, table: list[int], token: int) -> torch.Tensor:
        """Contents of a token: one row per head."""
        slot = table[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS
        return self.cache[slot // self.kernel_tokens, :, slot % self.kernel_tokens]


class Tier:
    """Slot in two pieces, and zeros."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = np.full(num_bytes + 64, 77, dtype=np.uint8)
        self.zero_memory = np.zeros(64, dtype=np.uint8)
        self.base_address, self.capacity_bytes = self.memory.ctypes.data, self.memory.nbytes
        first = num_bytes // 3
        self.slot = Slot(((64, first), (64 + first, num_bytes - first)))
        self.zeros = Zeros(self.zero_memory.ctypes.data, 64)

    def lowering(self, engine: Engine) -> JobLowering:
        blocks = engine.blocks
        return JobLowering(RankMemory({0: blocks.pages}, {0: blocks}, self.zeros, self))

    def store_runs(self, engine: Engine, chunk_copy: ChunkCopy) -> StoreRuns:
        return self.lowering(engine).store(self._table(chunk_copy))

    def load_runs(self, engine: Engine, chunk_copy: ChunkCopy) -> CopyRuns:
        return self.lowering(engine).load(self._table(chunk_copy))

    def _table(self, chunk_copy: ChunkCopy) -> CopyTable:
        return CopyTable.of([msgspec.structs.replace(chunk_copy, slot=self.slot)])


def copy(engine: Engine, tier: Tier, runs: CopyRuns) -> None:
    inline = InlineCopyEngine()
    for cache in engine.caches.values():
        storage = cache.untyped_storage()
        inline.register(storage.data_ptr(), storage.nbytes(), "engine")
    inline.register(tier.memory.ctypes.data, tier.memory.nbytes, "tier")
    inline.register(tier.zero_memory.ctypes.data, tier.zero_memory.nbytes, "zeros")
    assert inline.submit(1, runs)
    assert [result.failure for result in inline.poll()] == [None]


def part_bytes(engine: Engine, chunk_copy: ChunkCopy) -> int:
    blocks = engine.blocks
    parts = blocks.parts(chunk_copy.stored_blocks, chunk_copy.lead_tokens, chunk_copy.trail_tokens)
    return sum(blocks.of(part.start, part.end).block_bytes * part.num_blocks for part in parts)


chunks = st.sampled_from([2, 6, 10, 16, 20, 28, 36, 44, 54])


@settings(max_examples=examples(100, 5), deadline=None)
@given(st.sampled_from(list(ORDERS)), chunks, st.integers(1, 5), st.data())
def test_a_cut_chunk_loads_into_an_engine_with_other_kernel_blocks(
    order: str, chunk: int, number: int, data: st.DataObject
) -> None:
    spec = CacheSpec((GroupSpec(GroupKind.FULL, BLOCK_TOKENS, part_tokens=2),), chunk)
    end_token = number * chunk
    stored, span = chunk_blocks(spec, 0, end_token), chunk_span(spec, 0, end_token)
    kernel_tokens = st.sampled_from([4, 6, 8, 12, 24])
    source_engine, target_engine = (
        Engine(order, data.draw(kernel_tokens), seed=1),
        Engine(order, data.draw(kernel_tokens), seed=2),
    )
    before = target_engine.cache.clone()
    table, other = data.draw(st.permutations(range(BLOCKS))), data.draw(st.permutations(range(BLOCKS)))
    ids = tuple(table[stored.start : stored.stop])
    chunk_copy = copy_of(spec, Transfer(0, end_token, 0, ids), b"key", Slot(()))
    tier = Tier(part_bytes(source_engine, chunk_copy))
    copy(source_engine, tier, tier.store_runs(source_engine, chunk_copy).runs)
    # Blocks that the engine already holds are not loaded: whole blocks, from the chunk's first on.
    held = data.draw(st.integers(0, len(stored) - 1))
    ids = tuple(other[stored.start + held : stored.stop])
    chunk_copy = copy_of(spec, Transfer(0, end_token, held, ids), b"key", Slot(()))
    copy(target_engine, tier, tier.load_runs(target_engine, chunk_copy))
    start = max(span.start, (stored.start + held) * BLOCK_TOKENS)
    for token in range(min(BLOCKS, stored.stop) * BLOCK_TOKENS):
        slot = other[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS
        own = before[slot // target_engine.kernel_tokens, :, slot % target_engine.kernel_tokens]
        expected = source_engine.token(table, token) if start <= token < span.end else own
        assert torch.equal(target_engine.token(other, token), expected), token


OTHER_CONTENT = 5
"""For a second layer: no part of either has a multiple of 16 bytes."""


def expected_chunk(engine: Engine, spec: CacheSpec, end_token: int, ids: Sequence[int]) -> bytes:
    """Bytes of a cut chunk: by block, layer and head, the contents of its tokens."""
    span = chunk_span(spec, 0, end_token)
    table = dict(zip(chunk_blocks(spec, 0, end_token), ids, strict=True))
    chunk = b""
    for block, place in table.items():
        tokens = range(max(span.start, block * BLOCK_TOKENS), min(span.end, (block + 1) * BLOCK_TOKENS))
        for cache in engine.caches.values():
            page = b""
            for head in range(HEADS):
                for token in tokens:
                    slot = place * BLOCK_TOKENS + token % BLOCK_TOKENS
                    page += cache[slot // engine.kernel_tokens, head, slot % engine.kernel_tokens].numpy().tobytes()
            chunk += page + bytes(-len(page) % 16)
    return chunk


@settings(max_examples=examples(100, 5), deadline=None)
@given(chunks, st.sampled_from([None, 9, 40]), st.sampled_from([0, 7, 100]), st.data())
def test_a_slot_contains_only_parts_and_zeros_and_both_halves_agree_on_its_size(
    chunk: int, window: int | None, spare_bytes: int, data: st.DataObject
) -> None:
    """The tier's memory is poisoned, so that stale bytes would be found."""
    kind = GroupKind.FULL if window is None else GroupKind.WINDOW
    spec = CacheSpec((GroupSpec(kind, BLOCK_TOKENS, window_tokens=window, part_tokens=2),), chunk)
    engine = Engine("heads first", data.draw(st.sampled_from([4, 6, 24])), seed=1, contents=(CONTENT, OTHER_CONTENT))
    layout = CacheLayout(spec, (tuple(engine.layers),), (), 2, "sha256", 1)
    end_token = chunk * data.draw(st.integers(1, BLOCKS * BLOCK_TOKENS // chunk))
    stored = chunk_blocks(spec, 0, end_token)
    ids = tuple(data.draw(st.permutations(range(BLOCKS)))[: len(stored)])
    chunk_copy = copy_of(spec, Transfer(0, end_token, 0, ids), b"key", Slot(()))
    expected = expected_chunk(engine, spec, end_token, ids)
    sizes = (layout.chunk_bytes(0, end_token), part_bytes(engine, chunk_copy))
    assert sizes == (len(expected),) * 2 and len(expected) <= layout.largest_chunk_bytes(0)
    tier = Tier(len(expected) + spare_bytes)
    stored_runs = tier.store_runs(engine, chunk_copy)
    copy(engine, tier, stored_runs.runs)
    assert tier.memory.tobytes() == bytes([77]) * 64 + expected + bytes(spare_bytes)
    # For stores and loads, only bytes of the engine are counted.
    assert stored_runs.runs.total_bytes - stored_runs.zero_bytes == bytes_of(layout, chunk_copy)
    held = data.draw(st.integers(0, len(stored) - 1))
    for first, count in ((0, len(stored)), (held, len(stored) - held), (0, held + 1)):
        part = msgspec.structs.replace(chunk_copy, first_block=first, block_ids=ids[first : first + count])
        assert tier.load_runs(engine, part).total_bytes == bytes_of(layout, part)


@pytest.mark.parametrize(("first", "ids"), [(0, (1, 2)), (1, (2, 3)), (0, (1,)), (2, (3,))])
def test_a_cut_chunk_with_a_missing_block_is_not_stored(first: int, ids: tuple[int, ...]) -> None:
    """The slot would keep old bytes in place of that block."""
    spec = CacheSpec((GroupSpec(GroupKind.FULL, BLOCK_TOKENS, part_tokens=2),), 44)
    engine, tier = Engine("heads first", 24, seed=1), Tier(1024)
    chunk_copy = copy_of(spec, Transfer(0, 88, first, ids), b"key", Slot(()))
    with pytest.raises(ValueError, match="a store needs all 3 blocks of the chunk"):
        tier.store_runs(engine, chunk_copy)
    whole = msgspec.structs.replace(chunk_copy, first_block=0, block_ids=(1, 2, 3))
    copy(engine, tier, tier.store_runs(engine, whole).runs)


def test_a_part_of_a_block_has_the_size_of_its_tokens() -> None:
    engine = Engine("heads first", 8, seed=1)
    pages = engine.blocks.of(4, 20)
    assert sum(region.page_bytes for region in pages.regions) == TokenRange(4, 20, 24).share_of(HEADS * 24 * CONTENT)
    # Tokens 4 to 8, 8 to 16 and 16 to 20 of each of two heads.
    assert [region.page_bytes for region in pages.regions] == [12, 24, 12] * 2


@pytest.mark.parametrize("order", ORDERS)
def test_a_worker_cuts_blocks_of_thousands_of_kernel_blocks(order: str) -> None:
    """More kernel blocks than a layer's page may have regions, in pieces larger than those checked at the start."""
    kernel_blocks, num_blocks = MAX_REGIONS + 4, 3
    block_tokens = 2 * kernel_blocks
    shape = (num_blocks * kernel_blocks, HEADS, 2, 1)
    data = np.random.default_rng(1).integers(-99, 99, [shape[dim] for dim in ORDERS[order]], dtype=np.int8)
    cache = torch.from_numpy(data).permute(*np.argsort(ORDERS[order]).tolist())
    spec = CacheSpec((GroupSpec(GroupKind.FULL, block_tokens, part_tokens=2),), block_tokens - 2)
    layer = LayerLayout("layer 0", HEADS * block_tokens)
    layout = CacheLayout(spec, ((layer,),), (), 2, "sha256", 1)
    engine = InlineCopyEngine()
    worker = OffloadWorker(layout, RamArena(1 << 20), CopyPaths(engine, engine, 30.0, lambda: 0.0), ConnectorMetrics())
    worker.register({"layer 0": cache}, num_blocks)
    before, chunk_bytes = cache.clone(), layout.chunk_bytes(0, 2 * spec.chunk_tokens)
    chunk_copy = copy_of(spec, Transfer(0, 2 * spec.chunk_tokens, 0, (1, 2)), b"key", Slot(((0, chunk_bytes),)))
    worker.start_stores(StepPlan(stores=(Store(1, CopyTable.of([chunk_copy])),)))
    worker.results()
    stored = worker.outcome()
    assert stored is not None and stored.stores[1].failure is None
    # The last kernel block of its first block, and all but two tokens of the other's.
    cache[2 * kernel_blocks - 1 : 3 * kernel_blocks - 2] = 0
    assert not torch.equal(cache, before)
    worker.start_loads(StepPlan(loads=(Load("r", CopyTable.of([chunk_copy])),)))
    assert worker.results().failed == set()
    assert torch.equal(cache, before)
    worker.close()
