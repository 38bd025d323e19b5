"""Cascades: predecessors first, no orphaned chunks, and every wait ends."""

from __future__ import annotations

import itertools

import pytest
from test_stack import CHUNK, A, B, C, Stack

from hybridkv.tiers import Extends, Failure, FailureReason, Key, Refusal, Slot
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import BreakerOptions, Direction
from hybridkv.tiers.stack.cascade_queue import STEP_AGAIN_S

D = b"d"


def store_path(setup: Stack, *keys: bytes, before: bytes | None = None) -> None:
    """Store chunks of one prefix, each of which extends the one before it."""
    for key in keys:
        extends = () if before is None else (before,)
        assert isinstance(setup.stack.reserve(key, CHUNK, extends), Slot)
        assert setup.stack.commit(key, extends)
        before = key


def test_a_chunk_with_a_missing_predecessor_is_not_copied() -> None:
    setup = Stack()
    store_path(setup, B, C, before=A)
    store_path(setup, D)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [D]
    assert setup.stack.take_counts().moves.cascades == {"dropped_orphan": 2}


def test_chunks_follow_their_predecessor_in_flight() -> None:
    setup = Stack()
    store_path(setup, A, B, C)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [A, B, C]


def test_a_failed_chunk_drops_the_queued_chunks_that_extend_it() -> None:
    setup = Stack(max_cascading=1)
    store_path(setup, A, B, C)
    setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.IO))
    assert setup.stack.take_moves() == []
    assert setup.stack.take_counts().moves.cascades == {"failed": 1, "dropped_orphan": 2}


def test_a_queued_chunk_evicted_from_the_primary_tier_is_dropped_with_its_extensions() -> None:
    setup = Stack(max_cascading=1)
    store_path(setup, A, B, C)
    setup.primary.invalidate(B)
    setup.end(setup.moves(Direction.CASCADE))
    assert setup.stack.take_moves() == [] and not setup.stack.has_live_moves()
    assert setup.stack.take_counts().moves.cascades == {"done": 1, "dropped_evicted": 1, "dropped_orphan": 1}


def test_queued_chunks_leave_room_for_stores() -> None:
    setup = Stack(primary_chunks=3, max_cascading=1)
    store_path(setup, A, B, C)
    assert isinstance(setup.stack.reserve(D, CHUNK), Slot), "only moving chunks are pinned"


def test_a_full_queue_drops_new_chunks_and_keeps_beginnings() -> None:
    setup = Stack(max_cascading=1, max_waiting=2)
    store_path(setup, A, B, C, D, b"e")
    assert setup.stack.num_waiting("disk") == 2 and setup.stack.take_counts().moves.cascades == {"dropped_busy": 2}
    for _ in range(3):
        setup.end(setup.moves(Direction.CASCADE))
    assert setup.secondary.leading([A, B, C, D]) == 3


class Slow(RamIndex):
    """Tier whose `reserve` refuses until `answer` is None."""

    answer: Refusal | None = Refusal.BUSY

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        return super().reserve(key, num_bytes, extends) if self.answer is None else self.answer


def slow(answer: Refusal, **options: object) -> tuple[Stack, Slow]:
    setup = Stack(secondary_type=Slow, **options)
    assert isinstance(setup.secondary, Slow)
    setup.secondary.answer = answer
    return setup, setup.secondary


def test_a_busy_tier_is_tried_again_and_loses_nothing() -> None:
    setup, secondary = slow(Refusal.BUSY)
    store_path(setup, A, B)
    setup.stack.tick()
    assert setup.stack.take_moves() == [] and setup.stack.has_live_moves() and setup.stack.num_waiting("disk") == 2
    secondary.answer = None
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [A, B]
    assert setup.stack.take_counts().moves.cascades == {}


def test_a_tier_that_stays_busy_keeps_no_live_moves_despite_new_stores() -> None:
    setup, secondary = slow(Refusal.BUSY, load_timeout_s=30.0)
    setup.store(A)
    assert setup.stack.has_live_moves()
    setup.clock.now_s += STEP_AGAIN_S
    setup.stack.tick()
    assert setup.stack.num_waiting("disk") == 1 and not setup.stack.has_live_moves()
    setup.store(B)
    assert not setup.stack.has_live_moves(), "the new chunk is queued after the waiting one"
    for _ in range(2):
        setup.clock.now_s += 30
        setup.stack.tick()
    assert setup.stack.num_waiting("disk") == 0
    setup.store(C)
    assert not setup.stack.has_live_moves(), "the tier has accepted nothing since"
    secondary.answer = None
    setup.end(setup.moves(Direction.CASCADE))
    secondary.answer = Refusal.BUSY
    setup.store(D)
    assert setup.stack.has_live_moves(), "the tier works again, so the stack waits a moment"


def test_a_queue_without_live_moves_goes_on_at_the_next_tick() -> None:
    setup, secondary = slow(Refusal.BUSY, load_timeout_s=30.0)
    store_path(setup, A, B)
    setup.clock.now_s += 3600
    assert not setup.stack.has_live_moves()
    secondary.answer = None
    setup.stack.tick()
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [A, B] and setup.stack.has_live_moves()


def test_a_queue_without_live_moves_does_not_time_out_while_it_moves() -> None:
    setup, secondary = slow(Refusal.BUSY, load_timeout_s=30.0, max_cascading=1)
    store_path(setup, A, B, C)
    setup.clock.now_s += 3600
    secondary.answer = None
    setup.stack.tick()
    moves = setup.moves(Direction.CASCADE)
    setup.stack.tick()
    assert setup.stack.num_waiting("disk") == 2, "one is in flight"
    setup.end(moves)
    setup.end(setup.moves(Direction.CASCADE))
    secondary.answer = Refusal.BUSY
    setup.stack.tick()
    setup.clock.now_s += 60
    for _ in range(2):
        setup.stack.tick()
    assert setup.stack.num_waiting("disk") == 0 and setup.stack.take_counts().moves.cascades == {
        "done": 2,
        "dropped_late": 1,
    }


def test_a_medium_that_stays_busy_keeps_no_live_moves() -> None:
    setup = Stack()
    setup.store(A)
    for _ in range(20):
        setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.BUSY))
        if not setup.stack.has_live_moves():
            break
        setup.clock.now_s += STEP_AGAIN_S / 10
        setup.stack.tick()
    assert setup.stack.num_waiting("disk") == 1 and not setup.stack.has_live_moves()


def test_a_chunk_that_can_never_fit_is_dropped_at_once() -> None:
    setup, _ = slow(Refusal.NO_ROOM)
    store_path(setup, A, B)
    assert not setup.stack.has_live_moves()
    assert setup.stack.take_counts().moves.cascades == {"dropped_no_room": 1, "dropped_orphan": 1}


def test_the_queue_waits_for_room_held_by_chunks_in_flight() -> None:
    setup = Stack(secondary_chunks=1)
    setup.store(A, B)
    first = setup.moves(Direction.CASCADE)
    assert [move.key for move in first] == [A] and setup.stack.num_waiting("disk") == 1
    setup.end(first)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [B]


@pytest.mark.parametrize("ticks", [True, False])
def test_queued_chunks_time_out_when_no_move_ends(ticks: bool) -> None:
    setup, _ = slow(Refusal.BUSY, load_timeout_s=30.0)
    store_path(setup, A, B)
    for _ in range(3):
        setup.clock.now_s += 30
        if ticks:
            setup.stack.tick()
        setup.stack.has_live_moves()
    assert not setup.stack.has_live_moves()
    assert setup.stack.take_counts().moves.cascades == {"dropped_late": 2}


def test_a_moving_queue_may_take_longer_than_one_move() -> None:
    setup = Stack(max_cascading=1, load_timeout_s=30.0)
    store_path(setup, A, B, C)
    for _ in range(3):
        setup.clock.now_s += 20
        setup.stack.tick()
        setup.end(setup.moves(Direction.CASCADE))
    assert setup.stack.take_counts().moves.cascades == {"done": 3}


def test_a_chunk_refused_for_room_is_retried_before_chunks_that_extend_it() -> None:
    setup = Stack(max_cascading=2)
    store_path(setup, A, B, C)
    first, second = setup.moves(Direction.CASCADE)
    setup.end([first], Failure(FailureReason.BUSY))
    assert setup.stack.take_moves() == [], "not before the backoff has ended"
    setup.end([second])
    setup.clock.now_s += 1
    setup.stack.tick()
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [A, C]


def test_an_open_breaker_drops_queued_chunks() -> None:
    setup = Stack(max_cascading=1, breaker=BreakerOptions(failures=1))
    setup.store(A, B, C)
    setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.IO))
    assert not setup.stack.has_live_moves()
    assert setup.stack.take_counts().moves.cascades == {"failed": 1, "dropped_open": 2}


def test_a_prefix_longer_than_the_tier_is_cut_at_its_end() -> None:
    setup = Stack(secondary_chunks=2)
    before = None
    for key in (A, B, C, D):
        store_path(setup, key, before=before)
        setup.end(setup.moves(Direction.CASCADE))
        before = key
    assert setup.secondary.leading([A, B, C, D]) == 2
    assert setup.stack.take_counts().moves.cascades == {"done": 2, "dropped_no_room": 1, "dropped_orphan": 1}


@pytest.mark.parametrize("num_landed", [4, 5])
def test_the_younger_prefix_evicts_the_older_end_in_any_order_of_arrival(num_landed: int) -> None:
    """Two prompts fill the tier; the last chunk of the younger one is queued until chunks of both have arrived."""
    older, younger = [b"a1", b"a2", b"a3"], [b"b1", b"b2", b"b3"]
    for order in itertools.permutations([*older, *younger[:2]]):
        landed = order[:num_landed]
        if not set(older) <= set(landed):
            continue
        setup = Stack(secondary_chunks=5, max_cascading=5)
        for path in (older, younger):
            store_path(setup, *path)
        moving = {move.key: move for move in setup.moves(Direction.CASCADE)}
        assert setup.stack.num_waiting("disk") == 1
        setup.end([moving.pop(key) for key in landed])
        last = setup.moves(Direction.CASCADE)
        assert [move.key for move in last] == younger[2:]
        setup.end([*moving.values(), *last])
        assert (setup.secondary.leading(older), setup.secondary.leading(younger)) == (2, 3), order
        setup.stack.touch(younger[-1:])
        setup.put_secondary(D)
        assert (setup.secondary.leading(older), setup.secondary.leading(younger)) == (1, 3), order


def test_a_reset_clears_the_queue() -> None:
    setup = Stack(max_cascading=1)
    store_path(setup, A, B)
    moves = setup.moves(Direction.CASCADE)
    setup.stack.clear()
    setup.end(moves)
    assert not setup.stack.has_live_moves() and setup.stack.take_moves() == []
    assert setup.primary.used_bytes == 0 and setup.secondary.used_bytes == 0
