"""A path is made recent as a whole, its end first, as often as its growth is worth it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm.common.requests import PrefixChain
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, path_order
from hybridkv.planner.paths import Part

SPEC = CacheSpec((GroupSpec(GroupKind.RECURRENT, 4), GroupSpec(GroupKind.FULL, 4)), 4)


def path_of(num_chunks: int) -> PrefixChain:
    path = PrefixChain()
    grow(path, num_chunks)
    return path


def grow(path: PrefixChain, num_chunks: int) -> None:
    first = len(path.keys) // 2 + 1
    for number in range(first, first + num_chunks):
        path.come([(1, 4 * number), (0, 4 * number)])
        path.add((1, 4 * number), b"full %d" % number, (100,))
        path.add((0, 4 * number), b"state %d" % number, (10,))


def test_the_end_goes_first_and_a_state_before_the_prefix_that_it_needs() -> None:
    order = [b"state 2", b"full 2", b"state 1", b"full 1"]
    assert path_of(2).take_refresh(SPEC, (0,)) == order


def test_a_chunk_that_is_met_again_takes_up_its_room_once() -> None:
    path = path_of(1)
    assert path.num_bytes == (110,)
    assert path.add((1, 4), b"full 1", (100,)) == (110,)
    assert path.add((1, 8), b"full 2", (100,)) == (210,)


def test_a_path_that_grows_by_one_at_a_time_costs_a_bounded_number_of_touches_a_chunk() -> None:
    path, num_touched = PrefixChain(), 0
    for _ in range(2000):
        grow(path, 1)
        num_touched += len(path.take_refresh(SPEC, (0,)) or ())
    assert len(path.keys) == 4000 and 4000 < num_touched < 12 * 4000


def test_the_whole_path_is_renewed_at_its_end_when_its_last_store_is_over() -> None:
    path = path_of(50)
    assert path.take_refresh(SPEC, (0,))
    grow(path, 1)
    path.num_storing, path.is_over = 1, True
    assert path.take_refresh(SPEC, (0,)) is None
    path.num_storing = 0
    assert len(path.take_refresh(SPEC, (0,)) or ()) == 102
    assert path.take_refresh(SPEC, (0,)) is None


def test_a_path_is_overdue_when_others_have_used_a_part_of_the_tier_since() -> None:
    path = path_of(2)
    assert not path.is_overdue((10_000,), (1000,)), "nothing of it is older than what comes now"
    path.take_refresh(SPEC, (500,))
    assert not path.is_overdue((624,), (1000,)) and path.is_overdue((625,), (1000,))
    path.take_refresh(SPEC, (500, 0), is_overdue=True)
    assert not path.is_overdue((500, 124), (10_000, 1000)) and path.is_overdue((500, 125), (10_000, 1000)), (
        "in any tier"
    )
    assert not PrefixChain().is_overdue((), ()), "there is no slower tier"


def test_the_prefix_before_a_part_is_that_of_full_groups() -> None:
    assert path_of(3).prefix(SPEC, 12) == (b"full 1", b"full 2")


def test_a_tail_is_not_of_the_prefix_before_what_follows_it() -> None:
    spec = CacheSpec(SPEC.groups, 4, tail_tokens=2)
    path = path_of(2)
    path.add((1, 10), b"tail", (100,))
    grow(path, 1)
    assert path.prefix(spec, 16) == (b"full 1", b"full 2", b"full 3")
    assert path.prefix(spec, 10) == (b"full 1", b"full 2")


PARTS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12).map(lambda number: 4 * number)), max_size=6)


@given(st.lists(st.tuples(PARTS, st.booleans()), max_size=5), PARTS)
def test_a_path_goes_from_its_end_however_it_came(came: list[tuple[list[Part], bool]], gone: list[Part]) -> None:
    path = PrefixChain()
    for number, (parts, is_whole) in enumerate(came):
        order = path_order(SPEC, set(parts))
        keys = [b"%d %d" % part for part in order]
        if is_whole:
            path.extend(order, keys, (1,))
        else:
            path.come(order)
            for part, key in zip(order, keys, strict=True):
                path.add(part, key, (1,))
        if number == 1:
            path.drop(gone)
    assert path.order(SPEC) == [b"%d %d" % part for part in reversed(path_order(SPEC, path.keys))]


def test_a_path_of_what_others_had_is_put_in_order() -> None:
    path = PrefixChain({(0, 8): b"state", (1, 4): b"full 1", (1, 8): b"full 2"})
    assert path.order(SPEC) == [b"state", b"full 2", b"full 1"]
