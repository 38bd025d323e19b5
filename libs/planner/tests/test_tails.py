"""Partial tails: boundaries inside a chunk, where a cache stores them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import boundaries, caches

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    Lookup,
    LookupResult,
    State,
    TokenSpan,
    Transfer,
    chunk_blocks,
    chunk_span,
    last_boundary,
    longest_hit,
    needed_ends,
    plan_load,
    plan_store,
    plan_tail,
    resume_start,
)

FULL = GroupSpec(GroupKind.FULL, 8)
WINDOW = GroupSpec(GroupKind.WINDOW, 4, window_tokens=5)
STATE = GroupSpec(GroupKind.RECURRENT, 16)
SPEC = CacheSpec((FULL, WINDOW, STATE), 16, tail_tokens=2)
TABLES = [[11, 12, 13, 14], [21, 22, 23, 24, 25, 26, 27], [31, 32]]
STATES = [State(2, 39, 26)]


def everything(group_index: int, ends: Sequence[int]) -> Sequence[int]:
    return ends


def lookup_in(stored: set[tuple[int, int]]) -> Lookup:
    return lambda group, end: LookupResult.HIT if (group, end) in stored else LookupResult.MISS


def test_a_cache_stores_no_tails_by_default() -> None:
    spec = CacheSpec((FULL,), 16)
    assert spec.tail_tokens is None and spec.boundary_tokens == 16
    assert last_boundary(spec, 31) == 16 and last_boundary(SPEC, 31) == 30


@pytest.mark.parametrize("tail_tokens", [0, -2, 3, 32])
def test_a_tail_that_does_not_divide_the_chunk_is_refused_by_name(tail_tokens: int) -> None:
    with pytest.raises(ValueError, match="tail_tokens"):
        CacheSpec((FULL,), 16, tail_tokens)


def test_a_tail_spans_from_the_last_chunk_to_the_boundary() -> None:
    assert chunk_span(SPEC, 0, 26) == TokenSpan(16, 26) and chunk_blocks(SPEC, 0, 26) == range(2, 4)
    assert chunk_span(SPEC, 1, 26) == TokenSpan(20, 26) and chunk_blocks(SPEC, 1, 26) == range(5, 7)
    assert chunk_span(SPEC, 2, 26) == TokenSpan(16, 26) and chunk_blocks(SPEC, 2, 26) == range(1, 2)
    assert [list(needed_ends(SPEC, i, 26, 0)) for i in range(3)] == [[16, 26], [26], [26]]
    assert list(needed_ends(SPEC, 1, 18, 0)) == [16, 18]


def test_a_hit_ends_inside_a_chunk_where_every_group_has_its_tail() -> None:
    stored = {(0, 16), (0, 26), (1, 26), (2, 26)}
    assert longest_hit(SPEC, 100, 0, lookup_in(stored)) == Hit(26)
    assert longest_hit(SPEC, 27, 0, lookup_in(stored)) == Hit(26)


@pytest.mark.parametrize("missing", [(0, 26), (1, 26), (2, 26)])
def test_a_tail_that_one_group_lacks_is_no_boundary(missing: tuple[int, int]) -> None:
    stored = {(0, 16), (1, 16), (2, 16), (0, 26), (1, 26), (2, 26)}
    assert longest_hit(SPEC, 100, 0, lookup_in(stored - {missing})) == Hit(16)


def test_a_state_inside_a_chunk_is_stored_with_the_tails_of_the_other_groups() -> None:
    plan = plan_store(SPEC, 16, 26, TABLES, STATES, everything)
    assert plan.transfers(SPEC.chunk_tokens) == (
        Transfer(0, 26, 0, (13, 14)),
        Transfer(1, 26, 0, (26, 27)),
        Transfer(2, 26, 0, (39,)),
    )
    assert plan.unaligned_states == plan.incomplete_tails == 0


def test_a_tail_that_some_group_lacks_is_left_out_and_counted() -> None:
    gone = [TABLES[0], [0] * 7, TABLES[2]]
    assert plan_tail(SPEC, 26, 26, gone, STATES, everything).incomplete_tails == 1
    assert plan_tail(SPEC, 26, 26, TABLES, [], everything).incomplete_tails == 1
    assert plan_tail(SPEC, 26, 25, TABLES, STATES, everything).transfers(SPEC.chunk_tokens) == ()


def test_a_state_off_the_tail_grid_is_counted_and_left_out() -> None:
    plan = plan_store(SPEC, 16, 26, TABLES, [State(2, 39, 25)], everything)
    assert plan.transfers(SPEC.chunk_tokens) == () and plan.unaligned_states == 1


def test_a_drafter_tail_is_stored_once_its_lookahead_tokens_are_known() -> None:
    spec = CacheSpec((GroupSpec(GroupKind.FULL, 8, lookahead_tokens=2),), 16, tail_tokens=2)
    assert plan_tail(spec, 26, 27, TABLES, [], everything).transfers(spec.chunk_tokens) == ()
    assert plan_tail(spec, 26, 28, TABLES, [], everything).transfers(spec.chunk_tokens) == (
        Transfer(0, 26, 0, (13, 14)),
    )


@pytest.mark.parametrize(("spec", "end"), [(SPEC, 16), (SPEC, 25), (SPEC, 0), (CacheSpec((FULL,), 16), 8)])
def test_an_end_that_is_no_tail_is_refused(spec: CacheSpec, end: int) -> None:
    with pytest.raises(ValueError, match="end_token"):
        plan_tail(spec, end, 100, TABLES, [], everything)


def test_a_load_to_a_tail_writes_whole_chunks_then_the_tail() -> None:
    tables = [[1, 2, 3, 4], [0, 0, 0, 0, 0, 26, 27], [0, 32]]
    assert plan_load(SPEC, 26, 0, tables) == (
        Transfer(0, 16, 0, (1, 2)),
        Transfer(0, 26, 0, (3, 4)),
        Transfer(1, 26, 0, (26, 27)),
        Transfer(2, 26, 0, (32,)),
    )


@given(caches(tails=True), st.data())
def test_chunks_and_tail_hold_all_that_a_boundary_needs(spec: CacheSpec, data: st.DataObject) -> None:
    boundary = data.draw(st.sampled_from(boundaries(spec)))
    computed = data.draw(st.integers(0, boundary - 1)) // spec.chunk_tokens * spec.chunk_tokens
    tables: list[list[int]] = []
    loaded: list[set[int]] = [set() for _ in spec.groups]
    for group in spec.groups:
        first = resume_start(group, boundary) // group.block_tokens
        tables.append([1 + i if i >= first else 0 for i in range(-(-boundary // group.block_tokens))])
    for transfer in plan_load(spec, boundary, computed, tables):
        stored = chunk_blocks(spec, transfer.group_index, transfer.end_token)
        span = chunk_span(spec, transfer.group_index, transfer.end_token)
        for i, block_id in enumerate(transfer.block_ids):
            index = stored[transfer.first_block + i]
            assert tables[transfer.group_index][index] == block_id
            size = spec.groups[transfer.group_index].block_tokens
            loaded[transfer.group_index] |= set(range(index * size, min(span.end, (index + 1) * size)))
    for group_index, group in enumerate(spec.groups):
        recurrent, needed = group.kind is GroupKind.RECURRENT, range(resume_start(group, boundary), boundary)
        assert {t for t in needed if t >= computed or recurrent} <= loaded[group_index]
