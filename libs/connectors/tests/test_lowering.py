import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.canonical import GroupPages, PageRegion
from hybridkv.connectors.vllm.lowering import runs_of
from hybridkv.connectors.vllm.messages import Move
from hybridkv.tiers import Slot
from hybridkv.transfer import InlineCopyEngine

BLOCKS = 8


class Memory:
    """An engine's KV memory with padded pages, and a tier's, both poisoned."""

    def __init__(self, page_bytes: list[int], slot_bytes: int) -> None:
        self.engine = np.random.default_rng(1).integers(0, 255, len(page_bytes) * BLOCKS * 64, dtype=np.uint8)
        self.tier = np.random.default_rng(2).integers(0, 255, 4 * slot_bytes + 64, dtype=np.uint8)
        self.page_bytes = page_bytes
        base = self.engine.ctypes.data
        self.pages = GroupPages([PageRegion(base + i * BLOCKS * 64, 64, n) for i, n in enumerate(page_bytes)], BLOCKS)

    def page(self, region: int, block: int) -> np.ndarray:
        start = (region * BLOCKS + block) * 64
        return self.engine[start : start + self.page_bytes[region]]

    def copy(self, move: Move, extents: list[tuple[int, int]], to_engine: bool) -> None:
        base = self.tier.ctypes.data
        runs = runs_of(move, self.pages, [(base + offset, size) for offset, size in extents], to_engine)
        engine = InlineCopyEngine()
        engine.register(self.engine.ctypes.data, self.engine.nbytes, "engine")
        engine.register(base, self.tier.nbytes, "tier")
        assert engine.submit(1, runs)
        assert [result.failure for result in engine.poll()] == [None]


@st.composite
def cut(draw: st.DrawFn, total: int) -> list[tuple[int, int]]:
    """A slot of `total` bytes in up to four pieces, in any order in memory, with gaps."""
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=3))) if total > 1 else []
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    offsets = [0] * len(sizes)
    end = 0
    for piece in draw(st.permutations(range(len(sizes)))):
        offsets[piece] = end + draw(st.integers(0, 3))
        end = offsets[piece] + sizes[piece]
    return list(zip(offsets, sizes, strict=True))


@given(st.lists(st.integers(1, 64), min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_a_chunk_comes_back_into_other_blocks_as_it_left(sizes: list[int], stored: int, data: st.DataObject) -> None:
    total = sum(sizes) * stored
    memory = Memory(sizes, total)
    extents = data.draw(cut(total))
    sources = data.draw(st.permutations(range(BLOCKS)))[:stored]
    before = [[memory.page(r, b).copy() for b in sources] for r in range(len(sizes))]
    slot = Slot(tuple(extents))
    memory.copy(Move(0, b"key", slot, 0, stored, tuple(sources)), extents, to_engine=False)

    first = data.draw(st.integers(0, stored - 1))
    targets = data.draw(st.permutations(range(BLOCKS)))[: stored - first]
    untouched = memory.engine.copy()
    memory.copy(Move(0, b"key", slot, first, stored, tuple(targets)), extents, to_engine=True)
    for region in range(len(sizes)):
        for i, block in enumerate(targets):
            assert (memory.page(region, block) == before[region][first + i]).all()
            start = (region * BLOCKS + block) * 64
            untouched[start : start + sizes[region]] = before[region][first + i]
    assert (memory.engine == untouched).all(), "bytes outside of the pages were written"


def test_a_slot_that_is_too_small_is_refused() -> None:
    memory = Memory([10, 20], 100)
    with pytest.raises(ValueError, match="a chunk of 90 bytes does not fit a slot of 89"):
        memory.copy(Move(0, b"key", Slot(((0, 89),)), 0, 3, (1, 2, 3)), [(0, 89)], to_engine=False)


def test_a_block_outside_of_the_pool_is_refused() -> None:
    memory = Memory([10], 100)
    with pytest.raises(ValueError, match="block ids"):
        memory.copy(Move(0, b"key", Slot(((0, 10),)), 0, 1, (BLOCKS,)), [(0, 10)], to_engine=True)
