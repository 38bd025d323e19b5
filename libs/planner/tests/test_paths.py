"""In path order everything comes behind what it needs, and what was copied or kept so far can be resumed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import CHUNKS, any_caches, boundaries, caches

from hybridkv.planner import (
    CacheSpec,
    GroupKind,
    GroupSpec,
    Hit,
    LookupResult,
    chunk_span,
    longest_hit,
    needed_before,
    path_order,
)

HYBRID = CacheSpec(
    (
        GroupSpec(GroupKind.RECURRENT, 64),
        GroupSpec(GroupKind.WINDOW, 16, window_tokens=33),
        GroupSpec(GroupKind.FULL, 16),
        GroupSpec(GroupKind.FULL, 64),
    ),
    chunk_tokens=64,
)


def whole_path(spec: CacheSpec) -> list[tuple[int, int]]:
    ends = range(spec.chunk_tokens, CHUNKS * spec.chunk_tokens + 1, spec.chunk_tokens)
    return [(group, end) for group in spec.stored_groups for end in ends if chunk_span(spec, group, end).num_tokens]


def resumable(spec: CacheSpec, parts: set[tuple[int, int]]) -> int:
    def lookup(group_index: int, end_token: int) -> LookupResult:
        return LookupResult.HIT if (group_index, end_token) in parts else LookupResult.MISS

    num_tokens = CHUNKS * spec.chunk_tokens + 1 + spec.lookahead_tokens
    answer = longest_hit(spec, num_tokens, 0, lookup)
    return answer.num_tokens if isinstance(answer, Hit) else 0


@given(any_caches, st.data())
def test_every_part_stands_behind_what_it_needs(spec: CacheSpec, data: st.DataObject) -> None:
    ends = data.draw(st.lists(st.sampled_from(list(boundaries(spec))), min_size=1, max_size=6))
    parts = {(group, end) for end in ends for group in spec.stored_groups}
    parts |= {need for part in parts for need in needed_before(spec, *part)}
    order = path_order(spec, parts)
    place = {part: number for number, part in enumerate(order)}
    assert sorted(order) == sorted(parts)
    for part in {(group, end) for end in ends for group in spec.stored_groups}:
        assert all(place[need] < place[part] for need in needed_before(spec, *part))


@given(st.one_of(caches(), caches(cuts=True)), st.data())
def test_the_beginning_of_the_order_can_be_resumed_as_far_as_it_goes(spec: CacheSpec, data: st.DataObject) -> None:
    """Read backwards, this is eviction: whatever number of chunks goes, what is left is not in vain."""
    order = path_order(spec, whole_path(spec))
    kept = order[: data.draw(st.integers(0, len(order)))]
    missing = order[len(kept) :]
    whole_until = missing[0][1] - spec.chunk_tokens if missing else CHUNKS * spec.chunk_tokens
    # Where CHUNKED groups need nothing, there may be more.
    assert resumable(spec, set(kept)) >= whole_until


def test_the_order_of_eviction_of_before_left_nothing_to_resume() -> None:
    """The negative control: states and windows of a whole path first, as it was once, and half of it gone."""
    path = whole_path(HYBRID)
    by_kind = sorted(path, key=lambda part: (HYBRID.groups[part[0]].kind is GroupKind.FULL, -part[1]))
    num_gone = len(path) // 2
    assert resumable(HYBRID, set(by_kind[num_gone:])) == 0
    assert resumable(HYBRID, set(path_order(HYBRID, path)[: len(path) - num_gone])) == CHUNKS // 2 * 64


@pytest.mark.parametrize(
    ("part", "needs"),
    [
        ((2, 64), ()),
        ((2, 128), ((2, 64), (3, 64))),
        ((3, 192), ((2, 128), (3, 128))),
        ((0, 128), ((2, 128), (3, 128))),
        ((1, 64), ((2, 64), (3, 64))),
    ],
)
def test_a_full_part_needs_the_chunk_before_and_others_the_chunk_beside(
    part: tuple[int, int], needs: tuple[tuple[int, int], ...]
) -> None:
    assert needed_before(HYBRID, *part) == needs


def test_what_a_drafter_completes_later_is_not_waited_for() -> None:
    drafted = GroupSpec(GroupKind.FULL, 16, lookahead_tokens=1)
    spec = CacheSpec((GroupSpec(GroupKind.FULL, 16), drafted, GroupSpec(GroupKind.RECURRENT, 64)), chunk_tokens=64)
    assert needed_before(spec, 2, 128) == ((0, 128), (1, 64))
    assert needed_before(spec, 1, 128) == ((0, 64), (1, 64))


def test_without_a_full_group_nothing_is_needed() -> None:
    spec = CacheSpec((GroupSpec(GroupKind.RECURRENT, 64),), chunk_tokens=64)
    assert needed_before(spec, 0, 128) == ()


def test_a_tail_needs_the_tails_beside_it_and_the_chunk_before() -> None:
    spec = CacheSpec(
        (GroupSpec(GroupKind.FULL, 16), GroupSpec(GroupKind.RECURRENT, 64)), chunk_tokens=64, tail_tokens=16
    )
    assert needed_before(spec, 0, 80) == ((0, 64),)
    assert needed_before(spec, 1, 80) == ((0, 80),)


@pytest.mark.parametrize("part", [(4, 64), (-1, 64), (0, 0), (0, 65)])
def test_what_is_no_part_is_refused(part: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        needed_before(HYBRID, *part)
