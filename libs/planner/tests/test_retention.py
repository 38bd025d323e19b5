"""What may go first costs no path a token that it could have resumed at its deepest state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import any_caches, boundaries

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    LookupResult,
    chunk_span,
    deepest_state,
    longest_hit,
    needed_ends,
    path_order,
    retain,
)
from hybridkv.planner.paths import Part

HYBRID = CacheSpec((GroupSpec(GroupKind.RECURRENT, 4), GroupSpec(GroupKind.FULL, 4)), 4)
TWO_STATES = CacheSpec(
    (GroupSpec(GroupKind.RECURRENT, 4), GroupSpec(GroupKind.RECURRENT, 4), GroupSpec(GroupKind.FULL, 4)), 4
)


def full(*chunks: int) -> list[Part]:
    return [(1, 4 * number) for number in chunks]


def states(*chunks: int) -> list[Part]:
    return [(0, 4 * number) for number in chunks]


def resumable(spec: CacheSpec, parts: set[Part]) -> int:
    def lookup(group_index: int, end_token: int) -> LookupResult:
        return LookupResult.HIT if (group_index, end_token) in parts else LookupResult.MISS

    longest = max((end for _, end in parts), default=0)
    answer = longest_hit(spec, longest + 1 + spec.lookahead_tokens, 0, lookup)
    return answer.num_tokens if isinstance(answer, Hit) else 0


def test_superseded_states_go_first_then_what_lies_behind_the_deepest_then_the_rest_from_its_end() -> None:
    parts = [*full(1, 2, 3, 4, 5), *states(1, 2, 3)]
    order = retain(HYBRID, parts, superseded=states(2), own=parts)
    assert order.superseded == tuple(states(2))
    assert order.beyond == tuple(full(5, 4))
    assert order.rest == (*states(3), *full(3, 2), *states(1), *full(1))


def test_what_another_path_has_stays_in_its_turn() -> None:
    parts = [*full(1, 2, 3, 4), *states(2)]
    assert retain(HYBRID, parts, own=full(3)).beyond == tuple(full(3))
    assert retain(HYBRID, parts).beyond == ()


def test_what_lies_before_the_state_that_the_path_was_resumed_from_stays() -> None:
    parts = full(1, 2, 3, 4)
    assert retain(HYBRID, parts, own=parts, resumed_tokens=8).beyond == tuple(full(4, 3))
    # A chunk of which the state reads a part is needed whole.
    assert retain(HYBRID, parts, own=parts, resumed_tokens=9).beyond == tuple(full(4))


def test_a_state_that_some_group_lacks_is_none() -> None:
    parts = [(0, 4), (1, 4), (2, 4), (0, 8), (2, 8)]
    assert deepest_state(TWO_STATES, parts) == 4
    assert retain(TWO_STATES, parts, own=parts).beyond == ((0, 8), (2, 8))


def test_a_superseded_state_stays_in_its_turn_where_no_deeper_one_came() -> None:
    parts = [*full(1, 2), *states(1, 2)]
    order = retain(HYBRID, parts, superseded=states(1, 2), own=parts)
    assert order.superseded == () and (0, 8) in order.rest and order.beyond == ()


def test_where_no_group_needs_a_state_all_go_from_the_end_on() -> None:
    spec = CacheSpec((GroupSpec(GroupKind.WINDOW, 4, window_tokens=8), GroupSpec(GroupKind.FULL, 4)), 4)
    parts = [*full(1, 2, 3), (0, 8), (0, 12)]
    order = retain(spec, parts, superseded=[(0, 8)], own=parts)
    assert order == ((), (), tuple(reversed(path_order(spec, parts))))


@st.composite
def paths(draw: st.DrawFn) -> tuple[CacheSpec, list[Part], list[Part], list[Part], int]:
    spec = draw(any_caches)
    ends = list(boundaries(spec))
    depth = draw(st.integers(0, len(ends)))
    whole = [
        (group, end)
        for group in spec.stored_groups
        for end in ends[:depth]
        if chunk_span(spec, group, end).num_tokens and (end % spec.chunk_tokens == 0 or draw(st.booleans()))
    ]
    recurrent = [part for part in whole if part[0] in spec.recurrent_groups]
    missing = set(draw(st.lists(st.sampled_from(recurrent)))) if recurrent else set()
    parts = [part for part in whole if part not in missing]
    some = st.lists(st.sampled_from(parts), unique=True) if parts else st.just([])
    superseded = [part for part in draw(some) if part[0] in spec.recurrent_groups]
    return spec, parts, superseded, draw(some), draw(st.sampled_from([0, 0, *ends]))


@given(paths())
def test_every_part_goes_once(path: tuple[CacheSpec, list[Part], list[Part], list[Part], int]) -> None:
    order = retain(*path)
    assert sorted((*order.superseded, *order.beyond, *order.rest)) == sorted(path[1])


@given(paths(), st.data())
def test_whatever_goes_first_the_deepest_state_resumes_as_before(
    path: tuple[CacheSpec, list[Part], list[Part], list[Part], int], data: st.DataObject
) -> None:
    spec, parts = path[:2]
    order = retain(*path)
    first = (*order.superseded, *order.beyond)
    gone = set(first[: data.draw(st.integers(0, len(first)))])
    if not spec.recurrent_groups:
        assert not first
        return
    before = resumable(spec, set(parts))
    assert resumable(spec, set(parts) - gone) == before


@given(paths())
def test_what_goes_first_is_what_the_definition_says(
    path: tuple[CacheSpec, list[Part], list[Part], list[Part], int],
) -> None:
    """Word by word, over all boundaries."""
    spec, parts, superseded, own, resumed_tokens = path
    order = retain(*path)
    if not spec.recurrent_groups:
        return
    usable = [
        end
        for end in boundaries(spec)
        if all((group, end) in parts and (group, end) not in superseded for group in spec.recurrent_groups)
    ]
    deepest = max(usable, default=0)
    assert set(order.superseded) == {part for part in superseded if part[1] < deepest}
    held = [end for end in boundaries(spec) if all((group, end) in parts for group in spec.recurrent_groups)]
    useful = max([*held, resumed_tokens])
    read = {
        (group, end)
        for group in spec.stored_groups
        for end in (*needed_ends(spec, group, useful, 0), useful)
        if group not in spec.recurrent_groups
    }
    for part in set(order.beyond):
        assert part in own and part not in superseded and part not in read
        assert part[1] > useful
    for part in set(order.rest) & set(own) - set(superseded):
        chunk_start = (part[1] - 1) // spec.chunk_tokens * spec.chunk_tokens
        assert chunk_start < useful or (part[0] in spec.recurrent_groups and part[1] <= useful)


@pytest.mark.parametrize("lost", ["superseded", "beyond"])
def test_a_wrong_order_would_lose_the_deepest_state(lost: str) -> None:
    """The negative control: giving up the deepest state, or what lies before it, shortens what can be resumed."""
    parts = [*full(1, 2, 3), *states(1, 3)]
    gone = states(3) if lost == "superseded" else full(3)
    assert resumable(HYBRID, set(parts)) == 12
    assert resumable(HYBRID, set(parts) - set(gone)) == 4
