"""Chunks that end inside blocks: which part of a block belongs to which chunk, and which blocks stay whole."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, caches, computed_tokens

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    TokenSpan,
    Transfer,
    chunk_blocks,
    chunk_span,
    chunk_unit,
    needed_ends,
    plan_load,
    plan_store,
    resume_start,
    whole_chunk_unit,
)
from hybridkv.planner.coverage import load_start

FULL = GroupSpec(GroupKind.FULL, 32, part_tokens=4)
WINDOW = GroupSpec(GroupKind.WINDOW, 20, window_tokens=12, part_tokens=4)
STATE = GroupSpec(GroupKind.RECURRENT, 12)
SPEC = CacheSpec((STATE, WINDOW, FULL), 24)


def everything(group_index: int, ends: Sequence[int]) -> Sequence[int]:
    return ends


def test_a_chunk_is_whole_units_and_need_not_be_whole_blocks() -> None:
    assert chunk_unit(SPEC.groups) == 12 and whole_chunk_unit(SPEC.groups) == 480
    assert SPEC.cut_groups == (1, 2) and CacheSpec(SPEC.groups, 480).cut_groups == ()
    assert CacheSpec((STATE,), 24).cut_groups == ()


@pytest.mark.parametrize("chunk", [6, 18, 20, 32])
def test_a_chunk_that_cuts_a_state_is_refused(chunk: int) -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be a multiple of 12 tokens"):
        CacheSpec(SPEC.groups, chunk)


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": GroupKind.RECURRENT, "part_tokens": 4},
        {"kind": GroupKind.CHUNKED, "align_tokens": 16, "part_tokens": 4},
        {"kind": GroupKind.SCRATCH, "part_tokens": 4},
        {"kind": GroupKind.FULL, "part_tokens": 5},
        {"kind": GroupKind.FULL, "part_tokens": 0},
    ],
)
def test_only_attention_blocks_have_parts_and_the_parts_are_equal(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="part_tokens"):
        GroupSpec(block_tokens=32, **facts)


def test_tails_are_allowed_only_in_chunks_of_whole_blocks() -> None:
    with pytest.raises(ValueError, match=r"groups \(1, 2\) are cut"):
        CacheSpec(SPEC.groups, 24, tail_tokens=12)
    assert CacheSpec(SPEC.groups, 480, tail_tokens=12).boundary_tokens == 12


def test_a_block_that_two_chunks_share_is_stored_in_part_with_each() -> None:
    assert [chunk_span(SPEC, 2, end) for end in (24, 48, 72)] == [(0, 24), (24, 48), (48, 72)]
    assert [chunk_blocks(SPEC, 2, end) for end in (24, 48, 72)] == [range(1), range(2), range(1, 3)]
    plan = plan_store(SPEC, 0, 72, [[], [0, 0, 23, 24], [31, 32, 33]], [], everything)
    assert plan.transfers(SPEC.chunk_tokens) == (
        Transfer(1, 72, 0, (24,)),
        Transfer(2, 24, 0, (31,)),
        Transfer(2, 48, 0, (31, 32)),
        Transfer(2, 72, 0, (32, 33)),
    )


def test_a_window_is_loaded_from_the_beginning_of_its_first_block() -> None:
    # The window before 48 begins at 37, in the block that begins at 20, most of which is in the chunk before.
    assert load_start(WINDOW, 48, 0) == 20
    assert list(needed_ends(SPEC, 1, 48, 0)) == [24, 48]
    assert chunk_span(SPEC, 1, 24) == TokenSpan(0, 24) and chunk_span(SPEC, 1, 48) == TokenSpan(24, 48)
    tables = [[0, 0, 0, 14], [0, 22, 23], [31, 32]]
    assert plan_load(SPEC, 48, 0, tables) == (
        Transfer(0, 48, 0, (14,)),
        Transfer(1, 24, 1, (22,)),
        Transfer(1, 48, 0, (22, 23)),
        Transfer(2, 24, 0, (31,)),
        Transfer(2, 48, 0, (31, 32)),
    )


def test_a_load_begins_inside_a_chunk_where_the_engine_holds_blocks() -> None:
    spec = CacheSpec((GroupSpec(GroupKind.FULL, 32, part_tokens=8),), 40)
    assert plan_load(spec, 80, 32, [[31, 32, 33]]) == (Transfer(0, 40, 1, (32,)), Transfer(0, 80, 0, (32, 33)))
    assert plan_load(spec, 80, 64, [[31, 32, 33]]) == (Transfer(0, 80, 1, (33,)),)


def moved_tokens(spec: CacheSpec, transfer: Transfer) -> range:
    """Tokens that a transfer moves: its blocks, as far as they belong to the chunk."""
    span = chunk_span(spec, transfer.group_index, transfer.end_token)
    stored = chunk_blocks(spec, transfer.group_index, transfer.end_token)
    block_tokens = spec.groups[transfer.group_index].block_tokens
    first = stored.start + transfer.first_block
    assert first + len(transfer.block_ids) == stored.stop
    return range(max(span.start, first * block_tokens), span.end)


@given(caches(cuts=True), st.data())
def test_every_block_is_filled_up_to_the_boundary_and_no_token_twice(spec: CacheSpec, data: st.DataObject) -> None:
    """The engine shares whole blocks, so only the last may be read in part."""
    boundary = data.draw(st.integers(1, CHUNKS)) * spec.chunk_tokens
    computed = data.draw(computed_tokens(spec, boundary - 1))
    tables = []
    for index, group in enumerate(spec.groups):
        start, blocks = resume_start(group, boundary), -(-boundary // group.block_tokens)
        first = start // group.block_tokens if start < boundary else blocks
        first = first if group.kind is GroupKind.RECURRENT else max(first, computed // group.block_tokens)
        tables.append([1000 * (index + 1) + i if i >= first else 0 for i in range(blocks)])
    loaded: dict[int, list[int]] = {index: [] for index in range(len(spec.groups))}
    for transfer in plan_load(spec, boundary, computed, tables):
        tokens = moved_tokens(spec, transfer)
        block_tokens = spec.groups[transfer.group_index].block_tokens
        table = tables[transfer.group_index]
        assert list(transfer.block_ids) == table[tokens.start // block_tokens : -(-tokens.stop // block_tokens)]
        loaded[transfer.group_index] += tokens
    for index, group in enumerate(spec.groups):
        blocks = [i for i, block in enumerate(tables[index]) if block]
        filled = [t for i in blocks for t in range(i * group.block_tokens, (i + 1) * group.block_tokens)]
        assert loaded[index] == [token for token in filled if token < boundary]
