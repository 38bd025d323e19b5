"""The way down: beginnings first, nothing that is worth nothing without what is missing, and every wait has an end."""

from __future__ import annotations

import itertools

import pytest
from test_stack import CHUNK, A, B, C, Stack

from hybridkv.tiers import Extends, Failure, FailureReason, Key, Refusal, Slot
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import BreakerOptions, Direction
from hybridkv.tiers.stack.cascade_queue import STEP_AGAIN_S

D = b"d"


def store_path(it: Stack, *keys: bytes, before: bytes | None = None) -> None:
    """Chunks of one path, each of which needs the one before it."""
    for key in keys:
        extends = () if before is None else (before,)
        assert isinstance(it.stack.reserve(key, CHUNK, extends), Slot)
        assert it.stack.commit(key, extends)
        before = key


def test_what_needs_a_chunk_that_is_not_there_is_not_copied() -> None:
    it = Stack()
    store_path(it, B, C, before=A)
    store_path(it, D)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [D]
    assert it.stack.take_counts().moves.cascades == {"dropped_orphan": 2}


def test_what_needs_a_chunk_on_its_way_goes_with_it() -> None:
    it = Stack()
    store_path(it, A, B, C)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A, B, C]


def test_a_chunk_that_failed_takes_those_with_it_that_wait_behind_it() -> None:
    it = Stack(max_cascading=1)
    store_path(it, A, B, C)
    it.end(it.moves(Direction.CASCADE), Failure(FailureReason.IO))
    assert it.stack.take_moves() == []
    assert it.stack.take_counts().moves.cascades == {"failed": 1, "dropped_orphan": 2}


def test_what_leaves_the_fast_tier_before_its_turn_is_dropped_with_what_needs_it() -> None:
    it = Stack(max_cascading=1)
    store_path(it, A, B, C)
    it.primary.invalidate(B)
    it.end(it.moves(Direction.CASCADE))
    assert it.stack.take_moves() == [] and not it.stack.has_live_moves()
    assert it.stack.take_counts().moves.cascades == {"done": 1, "dropped_evicted": 1, "dropped_orphan": 1}


def test_what_waits_leaves_room_for_stores() -> None:
    it = Stack(near_chunks=3, max_cascading=1)
    store_path(it, A, B, C)
    assert isinstance(it.stack.reserve(D, CHUNK), Slot), "only what moves is pinned"


def test_a_full_queue_drops_what_comes_then_and_keeps_the_beginnings() -> None:
    it = Stack(max_cascading=1, max_waiting=2)
    store_path(it, A, B, C, D, b"e")
    assert it.stack.num_waiting("disk") == 2 and it.stack.take_counts().moves.cascades == {"dropped_busy": 2}
    for _ in range(3):
        it.end(it.moves(Direction.CASCADE))
    assert it.far.leading([A, B, C, D]) == 3


class Slow(RamIndex):
    """A tier that makes room only later."""

    answer: Refusal | None = Refusal.BUSY

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        return super().reserve(key, num_bytes, extends) if self.answer is None else self.answer


def slow(answer: Refusal, **options: object) -> tuple[Stack, Slow]:
    it = Stack(far_type=Slow, **options)
    assert isinstance(it.far, Slow)
    it.far.answer = answer
    return it, it.far


def test_a_tier_that_is_busy_is_asked_again_and_loses_nothing() -> None:
    it, far = slow(Refusal.BUSY)
    store_path(it, A, B)
    it.stack.tick()
    assert it.stack.take_moves() == [] and it.stack.has_live_moves() and it.stack.num_waiting("disk") == 2
    far.answer = None
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A, B]
    assert it.stack.take_counts().moves.cascades == {}


def test_a_tier_that_stays_busy_keeps_nobody_awake_however_much_is_stored() -> None:
    it, far = slow(Refusal.BUSY, load_timeout_s=30.0)
    it.store(A)
    assert it.stack.has_live_moves()
    it.clock.now_s += STEP_AGAIN_S
    it.stack.tick()
    assert it.stack.num_waiting("disk") == 1 and not it.stack.has_live_moves()
    it.store(B)
    assert not it.stack.has_live_moves(), "behind what waits"
    for _ in range(2):
        it.clock.now_s += 30
        it.stack.tick()
    assert it.stack.num_waiting("disk") == 0
    it.store(C)
    assert not it.stack.has_live_moves(), "nothing was taken since"
    far.answer = None
    it.end(it.moves(Direction.CASCADE))
    far.answer = Refusal.BUSY
    it.store(D)
    assert it.stack.has_live_moves(), "it works again, so it is worth a moment"


def test_what_waited_while_nobody_was_awake_goes_when_somebody_comes() -> None:
    it, far = slow(Refusal.BUSY, load_timeout_s=30.0)
    store_path(it, A, B)
    it.clock.now_s += 3600
    assert not it.stack.has_live_moves()
    far.answer = None
    it.stack.tick()
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A, B] and it.stack.has_live_moves()


def test_what_waited_while_nobody_was_awake_is_not_given_up_while_it_goes() -> None:
    it, far = slow(Refusal.BUSY, load_timeout_s=30.0, max_cascading=1)
    store_path(it, A, B, C)
    it.clock.now_s += 3600
    far.answer = None
    it.stack.tick()
    moves = it.moves(Direction.CASCADE)
    it.stack.tick()
    assert it.stack.num_waiting("disk") == 2, "one is on its way"
    it.end(moves)
    it.end(it.moves(Direction.CASCADE))
    far.answer = Refusal.BUSY
    it.stack.tick()
    it.clock.now_s += 60
    for _ in range(2):
        it.stack.tick()
    assert it.stack.num_waiting("disk") == 0 and it.stack.take_counts().moves.cascades == {"done": 2, "dropped_late": 1}


def test_a_medium_that_stays_busy_keeps_nobody_awake() -> None:
    it = Stack()
    it.store(A)
    for _ in range(20):
        it.end(it.moves(Direction.CASCADE), Failure(FailureReason.BUSY))
        if not it.stack.has_live_moves():
            break
        it.clock.now_s += STEP_AGAIN_S / 10
        it.stack.tick()
    assert it.stack.num_waiting("disk") == 1 and not it.stack.has_live_moves()


def test_what_can_never_fit_is_dropped_at_once() -> None:
    it, _ = slow(Refusal.NO_ROOM)
    store_path(it, A, B)
    assert not it.stack.has_live_moves()
    assert it.stack.take_counts().moves.cascades == {"dropped_no_room": 1, "dropped_orphan": 1}


def test_room_that_what_is_on_its_way_holds_is_waited_for() -> None:
    it = Stack(far_chunks=1)
    it.store(A, B)
    first = it.moves(Direction.CASCADE)
    assert [move.key for move in first] == [A] and it.stack.num_waiting("disk") == 1
    it.end(first)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [B]


@pytest.mark.parametrize("ticks", [True, False])
def test_a_wait_ends_where_nothing_comes_to_its_end(ticks: bool) -> None:
    it, _ = slow(Refusal.BUSY, load_timeout_s=30.0)
    store_path(it, A, B)
    for _ in range(3):
        it.clock.now_s += 30
        if ticks:
            it.stack.tick()
        it.stack.has_live_moves()
    assert not it.stack.has_live_moves()
    assert it.stack.take_counts().moves.cascades == {"dropped_late": 2}


def test_a_queue_that_moves_may_take_longer_than_one_move() -> None:
    it = Stack(max_cascading=1, load_timeout_s=30.0)
    store_path(it, A, B, C)
    for _ in range(3):
        it.clock.now_s += 20
        it.stack.tick()
        it.end(it.moves(Direction.CASCADE))
    assert it.stack.take_counts().moves.cascades == {"done": 3}


def test_a_medium_without_room_is_asked_again_before_what_needs_the_chunk() -> None:
    it = Stack(max_cascading=2)
    store_path(it, A, B, C)
    first, second = it.moves(Direction.CASCADE)
    it.end([first], Failure(FailureReason.BUSY))
    assert it.stack.take_moves() == [], "not before it has rested"
    it.end([second])
    it.clock.now_s += 1
    it.stack.tick()
    assert [move.key for move in it.moves(Direction.CASCADE)] == [A, C]


def test_an_open_breaker_drops_what_waits() -> None:
    it = Stack(max_cascading=1, breaker=BreakerOptions(failures=1))
    it.store(A, B, C)
    it.end(it.moves(Direction.CASCADE), Failure(FailureReason.IO))
    assert not it.stack.has_live_moves()
    assert it.stack.take_counts().moves.cascades == {"failed": 1, "dropped_open": 2}


def test_a_path_longer_than_the_tier_is_cut_at_its_end() -> None:
    it = Stack(far_chunks=2)
    before = None
    for key in (A, B, C, D):
        store_path(it, key, before=before)
        it.end(it.moves(Direction.CASCADE))
        before = key
    assert it.far.leading([A, B, C, D]) == 2
    assert it.stack.take_counts().moves.cascades == {"done": 2, "dropped_no_room": 1, "dropped_orphan": 1}


@pytest.mark.parametrize("num_landed", [4, 5])
def test_what_follows_pushes_out_an_older_end_in_whatever_order_chunks_come(num_landed: int) -> None:
    """Two prompts fill the tier, and a last chunk of the younger one waits until chunks of both have come."""
    older, younger = [b"a1", b"a2", b"a3"], [b"b1", b"b2", b"b3"]
    for order in itertools.permutations([*older, *younger[:2]]):
        landed = order[:num_landed]
        if not set(older) <= set(landed):
            continue
        it = Stack(far_chunks=5, max_cascading=5)
        for path in (older, younger):
            store_path(it, *path)
        moving = {move.key: move for move in it.moves(Direction.CASCADE)}
        assert it.stack.num_waiting("disk") == 1
        it.end([moving.pop(key) for key in landed])
        last = it.moves(Direction.CASCADE)
        assert [move.key for move in last] == younger[2:]
        it.end([*moving.values(), *last])
        assert (it.far.leading(older), it.far.leading(younger)) == (2, 3), order
        it.stack.touch(younger[-1:])
        it.put_far(D)
        assert (it.far.leading(older), it.far.leading(younger)) == (1, 3), order


def test_a_reset_forgets_what_waits() -> None:
    it = Stack(max_cascading=1)
    store_path(it, A, B)
    moves = it.moves(Direction.CASCADE)
    it.stack.clear()
    it.end(moves)
    assert not it.stack.has_live_moves() and it.stack.take_moves() == []
    assert it.primary.used_bytes == 0 and it.far.used_bytes == 0
