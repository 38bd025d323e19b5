from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import GroupPages, PageRegion
from hybridkv.connectors.vllm.common.copies.lowering import JobLowering, RankMemory, Zeros
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.tiers import Slot
from hybridkv.transfer import CopyRuns, InlineCopyEngine

BLOCKS = 8
ZEROS = np.zeros(24, dtype=np.uint8)
"""Fewer bytes than a long slot has after its chunk."""


class Arena(NamedTuple):
    base_address: int
    capacity_bytes: int


class Memory:
    """KV memory of an engine with padded pages, and memory of a tier, both poisoned. Each page has its own layer."""

    def __init__(self, page_bytes: list[int], slot_bytes: int) -> None:
        self.engine = np.random.default_rng(1).integers(1, 255, len(page_bytes) * BLOCKS * 64, dtype=np.uint8)
        self.tier = np.random.default_rng(2).integers(1, 255, 4 * slot_bytes + 64, dtype=np.uint8)
        self.page_bytes = page_bytes
        base = self.engine.ctypes.data
        regions = [PageRegion(base + i * BLOCKS * 64, 64, n) for i, n in enumerate(page_bytes)]
        self.pages = GroupPages([[region] for region in regions], BLOCKS)

    def page(self, region: int, block: int) -> np.ndarray:
        start = (region * BLOCKS + block) * 64
        return self.engine[start : start + self.page_bytes[region]]

    def stored(self, extents: list[tuple[int, int]]) -> bytes:
        return b"".join(self.tier[offset : offset + size].tobytes() for offset, size in extents)

    def runs(self, copy: ChunkCopy, to_engine: bool) -> CopyRuns:
        """Runs from or to the tier, where the slot of the copy is."""
        zeros = Zeros(ZEROS.ctypes.data, ZEROS.nbytes)
        lowering = JobLowering(RankMemory({0: self.pages}, {}, zeros, Arena(self.tier.ctypes.data, self.tier.nbytes)))
        table = CopyTable.of([copy])
        return lowering.load(table) if to_engine else lowering.store(table).runs

    def copy(self, copy: ChunkCopy, to_engine: bool) -> None:
        base, runs = self.tier.ctypes.data, self.runs(copy, to_engine)
        engine = InlineCopyEngine()
        engine.register(self.engine.ctypes.data, self.engine.nbytes, "engine")
        engine.register(ZEROS.ctypes.data, ZEROS.nbytes, "zeros")
        engine.register(base, self.tier.nbytes, "tier")
        assert engine.submit(1, runs)
        assert [result.failure for result in engine.poll()] == [None]


def chunk_of(memory: Memory, blocks: list[int]) -> bytes:
    """Bytes of a chunk: by block and layer, each page padded to whole words of 16 bytes."""
    pages = [memory.page(layer, block).tobytes() for block in blocks for layer in range(len(memory.page_bytes))]
    return b"".join(page + bytes(-len(page) % 16) for page in pages)


@st.composite
def cut(draw: st.DrawFn, total: int) -> list[tuple[int, int]]:
    """Slot of `total` bytes in up to four pieces, in any memory order, with gaps."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    offsets = [0] * len(sizes)
    end = 0
    for piece in draw(st.permutations(range(len(sizes)))):
        offsets[piece] = end + draw(st.integers(0, 3))
        end = offsets[piece] + sizes[piece]
    return list(zip(offsets, sizes, strict=True))


SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=4)


@given(SIZES, st.integers(1, 5), st.integers(0, 60), st.data())
def test_every_byte_of_a_slot_is_the_chunk_or_zero(
    sizes: list[int], stored: int, spare_bytes: int, data: st.DataObject
) -> None:
    """The tier's memory is poisoned, so that old bytes in the slot would be found."""
    memory = Memory(sizes, (sum(sizes) + 64) * 5 + spare_bytes)
    total = stored * memory.pages.block_bytes + spare_bytes
    extents = data.draw(cut(total))
    blocks = data.draw(st.permutations(range(BLOCKS)))[:stored]
    outside = memory.tier.copy()
    memory.copy(ChunkCopy(0, b"key", Slot(tuple(extents)), 0, stored, tuple(blocks)), to_engine=False)
    assert memory.stored(extents) == chunk_of(memory, blocks) + bytes(spare_bytes)
    for offset, size in extents:
        outside[offset : offset + size] = memory.tier[offset : offset + size]
    assert (memory.tier == outside).all(), "bytes outside of the slot were written"


@given(SIZES, st.integers(1, 5), st.integers(0, 60), st.data())
def test_a_stored_chunk_loads_unchanged_into_other_blocks(
    sizes: list[int], stored: int, spare_bytes: int, data: st.DataObject
) -> None:
    memory = Memory(sizes, (sum(sizes) + 64) * 5 + spare_bytes)
    extents = data.draw(cut(stored * memory.pages.block_bytes + spare_bytes))
    sources = data.draw(st.permutations(range(BLOCKS)))[:stored]
    before = [[memory.page(r, b).copy() for b in sources] for r in range(len(sizes))]
    slot = Slot(tuple(extents))
    memory.copy(ChunkCopy(0, b"key", slot, 0, stored, tuple(sources)), to_engine=False)

    first = data.draw(st.integers(0, stored - 1))
    targets = data.draw(st.permutations(range(BLOCKS)))[: stored - first]
    untouched = memory.engine.copy()
    memory.copy(ChunkCopy(0, b"key", slot, first, stored, tuple(targets)), to_engine=True)
    for region in range(len(sizes)):
        for i, block in enumerate(targets):
            assert (memory.page(region, block) == before[region][first + i]).all()
            start = (region * BLOCKS + block) * 64
            untouched[start : start + sizes[region]] = before[region][first + i]
    assert (memory.engine == untouched).all(), "bytes outside of the pages were written"


def test_runs_of_a_store_are_in_the_order_of_the_slot() -> None:
    """So that a checksum can be computed during the copy."""
    memory = Memory([10, 20], 400)
    runs = memory.runs(ChunkCopy(0, b"key", Slot(((1000, 50), (500, 70))), 0, 2, (3, 1)), to_engine=False)
    base = memory.tier.ctypes.data
    places = [place - base for _, first, num_bytes in runs.triples() for place in range(first, first + num_bytes)]
    assert places == [*range(1000, 1050), *range(500, 570)]


def test_pages_of_whole_words_need_no_run_of_zeros() -> None:
    memory = Memory([32, 48], 400)
    copy = ChunkCopy(0, b"key", Slot(((1000, 160),)), 0, 2, (3, 1))
    runs = memory.runs(copy, to_engine=False)
    assert runs.num_bytes.tolist() == [32, 48, 32, 48]
    assert runs.triples() == memory.runs(copy, to_engine=True).reversed().triples()


@pytest.mark.parametrize(("first", "blocks"), [(1, (1, 2)), (0, (1, 2)), (2, (1,))])
def test_a_partial_chunk_is_not_stored(first: int, blocks: tuple[int, ...]) -> None:
    memory = Memory([16], 100)
    copy = ChunkCopy(0, b"key", Slot(((0, 48),)), first, 3, blocks)
    with pytest.raises(ValueError, match="a store needs all 3 blocks of the chunk"):
        memory.copy(copy, to_engine=False)
    memory.copy(copy, to_engine=True)


@pytest.mark.parametrize("to_engine", [False, True])
def test_a_too_small_slot_is_refused(to_engine: bool) -> None:
    memory = Memory([10, 20], 200)
    with pytest.raises(ValueError, match="a chunk of 144 bytes does not fit a slot of 143"):
        memory.copy(ChunkCopy(0, b"key", Slot(((0, 143),)), 0, 3, (1, 2, 3)), to_engine)


@pytest.mark.parametrize("to_engine", [False, True])
def test_a_block_outside_of_the_pool_is_refused(to_engine: bool) -> None:
    memory = Memory([10], 100)
    with pytest.raises(ValueError, match="block ids"):
        memory.copy(ChunkCopy(0, b"key", Slot(((0, 16),)), 0, 1, (BLOCKS,)), to_engine)
