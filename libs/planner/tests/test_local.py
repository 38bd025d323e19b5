"""Local copies: transfers of a load that the engine can serve from its own blocks, and those it must not."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_caches, boundaries, computed_tokens
from test_plans import table

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    LocalCopies,
    Transfer,
    find_local_copies,
    has_local_copies,
    plan_load,
    plan_load_runs,
)

FULL = GroupSpec(kind=GroupKind.FULL, block_tokens=4)
WINDOW = GroupSpec(kind=GroupKind.WINDOW, block_tokens=4, window_tokens=6)
RECURRENT = GroupSpec(kind=GroupKind.RECURRENT, block_tokens=8)
SPEC = CacheSpec((FULL, WINDOW, RECURRENT), 8)
PLAN = plan_load(SPEC, 16, 0, [[11, 12, 13, 14], [0, 0, 23, 24], [0, 32]])


def everything(group_index: int, place: int) -> int | None:
    return 100 * (group_index + 1) + place


def test_only_the_state_is_read_from_a_tier_when_the_engine_holds_all() -> None:
    found = find_local_copies(SPEC, PLAN, 0, everything)
    assert found == LocalCopies(((100, 101), (102, 103), (202, 203), ()), 16)


def test_a_chunk_that_one_group_lacks_is_not_local() -> None:
    found = find_local_copies(SPEC, PLAN, 0, lambda group, place: None if group == 1 else everything(group, place))
    assert found == LocalCopies(((100, 101), (102, 103), (), ()), 8)


def test_a_transfer_is_copied_whole_and_a_full_group_up_to_its_first_gap() -> None:
    asked = []

    def held(group_index: int, place: int) -> int | None:
        asked.append((group_index, place))
        return None if (group_index, place) == (0, 1) else everything(group_index, place)

    assert find_local_copies(SPEC, PLAN, 0, held) == LocalCopies(((), (), (202, 203), ()), 0)
    assert asked == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_tokens_before_the_resume_point_are_not_counted() -> None:
    spec = CacheSpec((FULL,), 16)
    plan = plan_load(spec, 16, 8, [[11, 12, 13, 14]])
    assert find_local_copies(spec, plan, 8, everything) == LocalCopies(((102, 103),), 8)


@pytest.mark.parametrize(
    ("group", "chunk_tokens", "tail_tokens"),
    [
        (msgspec.structs.replace(FULL, lookahead_tokens=4), 4, None),
        (msgspec.structs.replace(FULL, part_tokens=2), 6, None),
        (FULL, 16, 4),
    ],
    ids=["a drafter's", "parts of blocks", "tails"],
)
def test_some_content_is_never_copied(group: GroupSpec, chunk_tokens: int, tail_tokens: int | None) -> None:
    spec = CacheSpec((group,), chunk_tokens, tail_tokens)
    plan = plan_load(spec, 12, 0, [[11, 12, 13]])
    assert find_local_copies(spec, plan, 0, everything) == LocalCopies(((),) * len(plan), 0)


def by_definition(spec: CacheSpec, plan: tuple[Transfer, ...], computed: int, has: set[tuple[int, int]]) -> LocalCopies:
    """Reference, block by block: the ids of the table give the place of each."""
    found = []
    for number, transfer in enumerate(plan):
        group = spec.groups[transfer.group_index]
        places = [block_id % 1000 for block_id in transfer.block_ids]
        before = [
            block_id % 1000
            for other in plan[:number]
            if other.group_index == transfer.group_index
            for block_id in other.block_ids
        ]
        is_local = all((transfer.group_index, place) in has for place in places)
        if group.kind is GroupKind.FULL:
            is_local = is_local and all((transfer.group_index, place) in has for place in before)
        may = group.kind is not GroupKind.RECURRENT and group.lookahead_tokens == 0
        is_whole = spec.chunk_tokens % group.block_tokens == 0 and transfer.end_token % spec.chunk_tokens == 0
        found.append(tuple(place + 7 for place in places) if is_local and may and is_whole else ())
    num_tokens = 0
    for token in range(computed, max((transfer.end_token for transfer in plan), default=0)):
        end = (token // spec.chunk_tokens + 1) * spec.chunk_tokens
        of_chunk = [
            bool(ids)
            for transfer, ids in zip(plan, found, strict=True)
            if transfer.end_token == end and spec.groups[transfer.group_index].kind is not GroupKind.RECURRENT
        ]
        num_tokens += bool(of_chunk) and all(of_chunk)
    return LocalCopies(tuple(found), num_tokens)


@given(any_caches, st.data())
def test_local_copies_equal_the_definition(spec: CacheSpec, data: st.DataObject) -> None:
    boundary = data.draw(st.sampled_from(boundaries(spec)))
    unit = spec.chunk_tokens
    computed = data.draw(computed_tokens(spec, boundary - 1)) // unit * unit
    tables = [
        [*table(spec, i, boundary, computed), 1000 * (i + 1) + boundary // group.block_tokens]
        for i, group in enumerate(spec.groups)
    ]
    plan = plan_load(spec, boundary, computed, tables)
    has = {
        (i, place) for i in range(len(spec.groups)) for place in range(len(tables[i])) if data.draw(st.integers(0, 5))
    }

    def held(group_index: int, place: int) -> int | None:
        return place + 7 if (group_index, place) in has else None

    found = find_local_copies(spec, plan, computed, held)
    assert found == by_definition(spec, plan, computed, has)
    runs = plan_load_runs(spec, boundary, computed, tables)
    assert has_local_copies(spec, runs, held) or not any(found.block_ids)


def test_few_blocks_are_checked_where_the_engine_holds_nothing() -> None:
    asked = []
    runs = plan_load_runs(SPEC, 16, 0, [[11, 12, 13, 14], [0, 0, 23, 24], [0, 32]])
    assert not has_local_copies(SPEC, runs, lambda group, place: asked.append((group, place)))
    assert asked == [(0, 0), (1, 2)]
    assert has_local_copies(SPEC, runs, everything)
    assert not has_local_copies(SPEC, runs, lambda group, place: place if group == 2 else None), "never a state"
