"""A path is made recent as a whole, its end first, as often as its growth is worth it."""

from __future__ import annotations

from hybridkv.connectors.vllm.stored_path import StoredPath
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec

SPEC = CacheSpec((GroupSpec(GroupKind.RECURRENT, 4), GroupSpec(GroupKind.FULL, 4)), 4)


def path_of(num_chunks: int) -> StoredPath:
    path = StoredPath()
    grow(path, num_chunks)
    return path


def grow(path: StoredPath, num_chunks: int) -> None:
    first = len(path.keys) // 2 + 1
    for number in range(first, first + num_chunks):
        path.add((1, 4 * number), b"full %d" % number, (100,))
        path.add((0, 4 * number), b"state %d" % number, (10,))


def test_the_end_goes_first_and_a_state_before_the_prefix_that_it_needs() -> None:
    order = [b"state 2", b"full 2", b"state 1", b"full 1"]
    assert path_of(2).take_renewal(SPEC, (0,)) == order


def test_a_chunk_that_is_met_again_takes_up_its_room_once() -> None:
    path = path_of(1)
    assert path.num_bytes == (110,)
    assert path.add((1, 4), b"full 1", (100,)) == (110,)
    assert path.add((1, 8), b"full 2", (100,)) == (210,)


def test_a_path_that_grows_by_one_at_a_time_costs_a_bounded_number_of_touches_a_chunk() -> None:
    path, num_touched = StoredPath(), 0
    for _ in range(2000):
        grow(path, 1)
        num_touched += len(path.take_renewal(SPEC, (0,)) or ())
    assert len(path.keys) == 4000 and 4000 < num_touched < 12 * 4000


def test_the_whole_path_is_renewed_at_its_end_when_its_last_store_is_over() -> None:
    path = path_of(50)
    assert path.take_renewal(SPEC, (0,))
    grow(path, 1)
    path.num_storing, path.is_over = 1, True
    assert path.take_renewal(SPEC, (0,)) is None
    path.num_storing = 0
    assert len(path.take_renewal(SPEC, (0,)) or ()) == 102
    assert path.take_renewal(SPEC, (0,)) is None


def test_a_path_is_overdue_when_others_have_used_a_part_of_the_tier_since() -> None:
    path = path_of(2)
    assert not path.is_overdue((10_000,), (1000,)), "nothing of it is older than what comes now"
    path.take_renewal(SPEC, (500,))
    assert not path.is_overdue((624,), (1000,)) and path.is_overdue((625,), (1000,))
    path.take_renewal(SPEC, (500, 0), is_overdue=True)
    assert not path.is_overdue((500, 124), (10_000, 1000)) and path.is_overdue((500, 125), (10_000, 1000)), (
        "in any tier"
    )
    assert not StoredPath().is_overdue((), ()), "there is no slower tier"


def test_the_prefix_before_a_part_is_that_of_full_groups() -> None:
    assert path_of(3).prefix(SPEC, 12) == (b"full 1", b"full 2")
