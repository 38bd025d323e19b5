"""Lowering of a whole job equals the lowering of its chunks one by one (`PlainLowering`, the model)."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.canonical import GroupPages, PageRegion, TokenRange
from hybridkv.connectors.vllm.common.copies.lowering import GroupBlocks, JobLowering, RankMemory, Zeros
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.tiers import Slot
from hybridkv.transfer import CopyRuns
from kits.plain_lowering import PlainLowering

POOL = 40
BLOCK_TOKENS = 8
ARENA_ADDRESS, ARENA_BYTES = 1 << 40, 1 << 20
ZEROS = Zeros(1 << 41, 24)
"""Fewer bytes than a long slot has after its chunk."""


@dataclass(frozen=True)
class Arena:
    """An arena without memory: nothing is copied."""

    base_address: int = ARENA_ADDRESS
    capacity_bytes: int = ARENA_BYTES


@st.composite
def groups(draw: st.DrawFn, number: int) -> tuple[GroupPages, GroupBlocks | None]:
    """Pages of a group, and parts of them if chunks cut its blocks. Each token of a layer has a few bytes."""
    layers = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=3))
    if draw(st.booleans()):  # so that layers lie in equal steps
        layers = [[draw(st.integers(1, 5))] * len(layers[0])] * draw(st.integers(1, 5))
    token_bytes = [num_bytes for layer in layers for num_bytes in layer]
    spare = draw(st.sampled_from([0, 0, 16]))
    sizes = [num_bytes * BLOCK_TOKENS for num_bytes in token_bytes]
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    if draw(st.booleans()):  # all layers of a block are adjacent
        places = [(start, sum(sizes) + spare) for start in starts]
    else:
        places = [(start * 2 * POOL, size + spare) for start, size in zip(starts, sizes, strict=True)]

    def pages(start: int, end: int) -> GroupPages:
        regions = iter(
            PageRegion((number + 1 << 30) + place + start * each, stride, (end - start) * each)
            for (place, stride), each in zip(places, token_bytes, strict=True)
        )
        return GroupPages([[next(regions) for _ in layer] for layer in layers], POOL)

    whole = pages(0, BLOCK_TOKENS)
    if draw(st.booleans()):
        return whole, None

    def part(tokens: TokenRange) -> GroupPages:
        return pages(tokens.start, tokens.end)

    return whole, GroupBlocks(whole, BLOCK_TOKENS, part)


@st.composite
def rank_memories(draw: st.DrawFn) -> RankMemory[Arena]:
    drawn = [draw(groups(number)) for number in range(draw(st.integers(1, 3)))]
    cut = {number: blocks for number, (_, blocks) in enumerate(drawn) if blocks is not None}
    return RankMemory({number: pages for number, (pages, _) in enumerate(drawn)}, cut, ZEROS, Arena())


def chunk_bytes(memory: RankMemory[Arena], group_index: int, stored: int, lead: int, trail: int) -> int:
    cut = memory.cut.get(group_index)
    if cut is None:
        return stored * memory.pages[group_index].block_bytes
    parts = cut.parts(stored, lead, trail)
    return sum(cut.of(part.start, part.end).block_bytes * part.num_blocks for part in parts)


@st.composite
def block_lists(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Often consecutive, so that runs continue from block to block."""
    if draw(st.booleans()):
        first = draw(st.integers(0, POOL - count))
        return tuple(range(first, first + count))
    return tuple(draw(st.permutations(range(POOL)))[:count])


@st.composite
def jobs(draw: st.DrawFn, memory: RankMemory[Arena], is_store: bool) -> list[ChunkCopy]:
    """Copies with slots that follow each other in the arena, in pieces, sometimes with gaps."""
    copies: list[ChunkCopy] = []
    at = 0
    for number in range(draw(st.integers(0, 6))):
        if copies and draw(st.booleans()):  # with the shape of the previous copy
            group_index, stored, lead, trail = (
                copies[-1].group_index,
                copies[-1].stored_blocks,
                copies[-1].lead_tokens,
                copies[-1].trail_tokens,
            )
        else:
            group_index = draw(st.sampled_from(sorted(memory.pages)))
            stored, lead, trail = draw(st.integers(1, 4)), draw(st.sampled_from([0, 2, 5])), 0
            if stored > 1 or lead < 5:
                trail = draw(st.sampled_from([0, 2, 4] if stored > 1 or lead == 0 else [0, 2]))
        first = 0 if is_store else draw(st.integers(0, stored))
        count = stored - first if is_store else draw(st.integers(0, stored - first))
        left = chunk_bytes(memory, group_index, stored, lead, trail) + draw(st.sampled_from([0, 0, 7, 60]))
        extents = []
        while left:
            size = draw(st.sampled_from([left, left, max(1, left // 2), 1]))
            at += draw(st.sampled_from([0, 0, 3]))
            extents.append((at, size))
            at, left = at + size, left - size
        ids = draw(block_lists(count))
        local: tuple[int, ...] = ()
        if not is_store and ids and draw(st.integers(0, 3)) == 0:
            others = [block for block in range(POOL) if block not in ids]
            local = tuple(draw(st.permutations(others))[: len(ids)])
        if draw(st.booleans()):
            extents = extents[::-1] if len({size for _, size in extents}) == 1 else extents
        key = b"k" * draw(st.sampled_from([1, 48])) + bytes([number])
        copies.append(ChunkCopy(group_index, key, Slot(tuple(extents)), first, stored, ids, lead, trail, local))
    return copies


def same(left: CopyRuns, right: CopyRuns) -> bool:
    return left.triples() == right.triples()


@settings(max_examples=examples(100, 5), deadline=None)
@given(st.data())
def test_a_load_lowered_as_a_job_equals_its_chunks_one_by_one(data: st.DataObject) -> None:
    memory = data.draw(rank_memories())
    plain, native = PlainLowering(memory), JobLowering(memory)
    for _ in range(2):
        copies = CopyTable.of(data.draw(jobs(memory, is_store=False)))
        assert native.load(copies).triples() == plain.load(copies).triples()


@settings(max_examples=examples(100, 5), deadline=None)
@given(st.data())
def test_a_store_lowered_as_a_job_equals_its_chunks_one_by_one(data: st.DataObject) -> None:
    memory = data.draw(rank_memories())
    plain, native = PlainLowering(memory), JobLowering(memory)
    for _ in range(2):
        copies = CopyTable.of(data.draw(jobs(memory, is_store=True)))
        got, expected = native.store(copies), plain.store(copies)
        assert got.runs.triples() == expected.runs.triples()
        assert (got.ends.tolist(), got.zero_bytes) == (expected.ends.tolist(), expected.zero_bytes)


def plain_memory(page_bytes: int = 30) -> RankMemory[Arena]:
    """One group of one layer. With `page_bytes` 32 its blocks may be cut."""
    pages = GroupPages([[PageRegion(1 << 30, 64, page_bytes)]], POOL)
    cut = {}
    if page_bytes == 32:

        def part(tokens: TokenRange) -> GroupPages:
            return GroupPages([[PageRegion((1 << 30) + 4 * tokens.start, 64, 4 * (tokens.end - tokens.start))]], POOL)

        cut[0] = GroupBlocks(pages, BLOCK_TOKENS, part)
    return RankMemory({0: pages}, cut, ZEROS, Arena())


GOOD = ChunkCopy(0, b"key", Slot(((0, 64),)), 0, 2, (3, 1))


@pytest.mark.parametrize(
    ("changes", "is_store"),
    [
        ({"block_ids": (3, POOL)}, True),
        ({"block_ids": (3, POOL)}, False),
        ({"block_ids": (-1, 3)}, False),
        ({"block_ids": (3,)}, True),
        ({"first_block": 1, "block_ids": (3,)}, True),
        ({"first_block": 1}, False),
        ({"slot": Slot(((0, 63),))}, True),
        ({"slot": Slot(((0, 63),))}, False),
        ({"slot": Slot(())}, False),
        ({"slot": Slot(((ARENA_BYTES - 63, 64),))}, False),
        ({"slot": Slot(((0, 64), (-1, 5)))}, True),
        ({"slot": Slot(((0, 64), (100, 0)))}, True),
        ({"slot": Slot(((1 << 62, 1 << 62), (1 << 62, 1 << 62)))}, False),
        ({"local_blocks": (5,)}, False),
        ({"local_blocks": (5, 1)}, False),
        ({"local_blocks": (5, POOL)}, False),
    ],
)
@pytest.mark.parametrize("page_bytes", [30, 32])
def test_an_invalid_copy_is_refused(changes: dict[str, Any], is_store: bool, page_bytes: int) -> None:
    copy = msgspec.structs.replace(GOOD, **changes)
    for lowering in (PlainLowering(plain_memory(page_bytes)), JobLowering(plain_memory(page_bytes))):
        lower = lowering.store if is_store else lowering.load
        lower(CopyTable.of([GOOD, GOOD]))
        if page_bytes == 32 and changes == {"first_block": 1}:
            continue  # the model copies no blocks beyond a chunk that cuts blocks
        with pytest.raises((ValueError, OverflowError)):
            lower(CopyTable.of([GOOD, copy]))


@pytest.mark.parametrize("page_bytes", [16, 30])
def test_layers_in_equal_steps_are_one_row_of_each_block(page_bytes: int) -> None:
    """But for stores of pages with zeros between them."""
    layers, num_blocks = 8, 3
    regions = [[PageRegion((1 << 30) + layer * 4096, 64, page_bytes)] for layer in range(layers)]
    lowering = JobLowering(RankMemory({0: GroupPages(regions, POOL)}, {}, ZEROS, Arena()))
    slot = Slot(((0, num_blocks * layers * ((page_bytes + 15) // 16 * 16)),))
    table = CopyTable.of([ChunkCopy(0, b"key", slot, 0, num_blocks, (4, 1, 2))])
    load = lowering.load(table)
    assert load.row_table is not None and len(load.row_table) == num_blocks
    assert len(load) == num_blocks * layers
    if page_bytes == 16:
        assert len(lowering.store(table).runs.rows) == len(load.rows)


def test_a_group_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="group 1 has no pages"):
        JobLowering(plain_memory()).load(CopyTable.of([msgspec.structs.replace(GOOD, group_index=1)]))


def test_arrays_of_inconsistent_length_are_refused() -> None:
    table = CopyTable.of([GOOD, GOOD])
    lowering = JobLowering(plain_memory())._native
    arrays = {"shapes": table.shapes, "block_ids": table.block_ids, "local_ids": b"", "extents": table.extents}
    assert len(lowering.lower(False, **arrays)[0]) > 0
    for name, array in arrays.items():
        for other in (array[:-1], array + bytes(16), array[4:]):
            if other != array:
                with pytest.raises(ValueError, match=name if name != "shapes" else "expected|fewer|more"):
                    lowering.lower(False, **(arrays | {name: other}))


def test_the_comparison_detects_another_block() -> None:
    memory = plain_memory()
    other = msgspec.structs.replace(GOOD, block_ids=(3, 2))
    expected = PlainLowering(memory).load(CopyTable.of([GOOD]))
    assert same(JobLowering(memory).load(CopyTable.of([GOOD])), expected)
    assert not same(JobLowering(memory).load(CopyTable.of([other])), expected)


def test_no_run_spans_tier_memory_and_engine_memory() -> None:
    """The two may be adjacent, each registered by itself."""
    pages = GroupPages([[PageRegion(ARENA_ADDRESS + ARENA_BYTES, 16, 16)]], POOL)
    lowering = JobLowering(RankMemory({0: pages}, {}, ZEROS, Arena()))
    at_the_end = Slot(((ARENA_BYTES - 16, 16),))
    stored = ChunkCopy(0, b"a", at_the_end, 0, 1, (4,))
    local = ChunkCopy(0, b"b", at_the_end, 0, 1, (5,), local_blocks=(0,))
    assert len(lowering.load(CopyTable.of([stored, local]))) == 2
    before = msgspec.structs.replace(stored, slot=Slot(((ARENA_BYTES - 32, 16),)), block_ids=(3,))
    assert len(lowering.load(CopyTable.of([before, stored]))) == 1, "within the tier's memory it is one run"


@given(st.data())
def test_a_table_returns_the_copies_it_was_made_from(data: st.DataObject) -> None:
    copies = data.draw(jobs(data.draw(rank_memories()), is_store=False))
    table = CopyTable.of(copies)
    assert list(table) == copies
    assert len(table) == len(copies) and bool(table) is bool(copies)
    assert [tuple(chunk) for chunk in table.chunks()] == [(c.key, c.slot, bool(c.local_blocks)) for c in copies]
    assert list(table.local_blocks()) == [block for copy in copies for block in copy.local_blocks]
    assert list(table.from_tier()) == [msgspec.structs.replace(copy, local_blocks=()) for copy in copies]
    assert pickle.loads(pickle.dumps(table)) == table
    assert sum(shape.num_copies for shape in table.rows()) == len(copies)


@pytest.mark.parametrize("block_id", [1 << 31, 1.5, None])
def test_an_invalid_block_id_is_refused(block_id: Any) -> None:
    with pytest.raises(struct.error):
        CopyTable.of([msgspec.structs.replace(GOOD, block_ids=(3, block_id))])


def test_common_shapes_of_many_chunks_are_stored_once() -> None:
    copies = [
        ChunkCopy(0, bytes(48), Slot(((64 * number, 64),)), 0, 16, tuple(range(16 * number, 16 * number + 16)))
        for number in range(1000)
    ]
    table = CopyTable.of(copies)
    assert len(list(table.rows())) == 1
    assert sum(map(len, msgspec.structs.astuple(table))) == 40 + 1000 * (48 + 16 * 4 + 16)
