"""What could not be tried, for want of files, memory or threads, costs no chunk, blames no disk and is not hurried."""

from __future__ import annotations

import pytest
from test_stack import A, B, C, Stack

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Refusal
from hybridkv.tiers.stack import BreakerState, Direction, LeaseFailure, PromotionLease

BUSY = Failure(FailureReason.BUSY, "segment 0: EMFILE")


def short(it: Stack, key: bytes) -> None:
    """One hold that comes to nothing because nothing could be tried."""
    hold = it.hold(key)
    it.end(it.moves(Direction.PROMOTE), BUSY)
    assert hold.failure is LeaseFailure.LOST


def test_a_shortage_costs_no_chunk_however_long_it_lasts() -> None:
    it = Stack()
    it.put_far(A, B, C)
    for _ in range(20):
        short(it, A)
        it.clock.now_s += 10
    assert it.stack.leading([A, B, C]) == 3
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED
    assert it.stack.take_counts().moves.breaker_openings == {}


def test_after_a_shortage_a_hold_is_asked_to_come_back_in_a_moment() -> None:
    it = Stack()
    it.put_far(A)
    short(it, A)
    for _ in range(1000):
        assert it.stack.lookup(A) is LookupResult.HIT
        assert it.stack.acquire("request", [A]) is Refusal.BUSY
    assert it.stack.take_moves() == []
    it.clock.now_s += 0.05
    assert isinstance(it.stack.acquire("request", [A]), PromotionLease)


def test_nobody_waits_for_the_end_of_a_shortage_that_lasts() -> None:
    it = Stack()
    it.put_far(A)
    began_s, num_tried = it.clock.now_s, 0
    while it.stack.lookup(A) is LookupResult.HIT:
        if it.stack.acquire("request", [A]) is not Refusal.BUSY:
            num_tried += 1
            it.end(it.moves(Direction.PROMOTE), BUSY)
        it.clock.now_s += 0.01
    assert it.clock.now_s - began_s < 2.0 and 3 <= num_tried <= 8
    assert it.stack.acquire("request", [A]) is Refusal.PRESENT
    it.clock.now_s += 5
    hold = it.hold(A)
    it.end(it.moves(Direction.PROMOTE))
    assert hold.is_ready, "and it is over when it is over"


def test_what_still_ends_well_does_not_hurry_the_next_attempt() -> None:
    """A hold larger than the medium's queue: the rest is refused first, then what fitted comes."""
    it = Stack()
    it.put_far(A, B)
    it.hold(A, B)
    first, second = it.moves(Direction.PROMOTE)
    it.end([second], BUSY)
    it.end([first])
    assert it.stack.acquire("request", [A, B]) is Refusal.BUSY
    it.clock.now_s += 0.05
    hold = it.hold(A, B)
    it.end(it.moves(Direction.PROMOTE))
    assert hold.is_ready


def test_what_is_in_the_fast_tier_is_had_during_a_shortage() -> None:
    it = Stack()
    it.put_far(A)
    it.put_near(B)
    short(it, A)
    assert it.hold(B).is_ready


def test_a_shortage_of_stores_rests_and_keeps_no_load_away() -> None:
    it = Stack()
    it.put_far(A)
    it.store(B)
    it.end(it.moves(Direction.CASCADE), BUSY)
    it.store(C)
    assert it.stack.take_moves() == []
    assert it.stack.take_counts().moves.cascades == {}
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE))
    it.clock.now_s += 0.05
    it.stack.tick()
    assert [move.key for move in it.moves(Direction.CASCADE)] == [B, C]


@pytest.mark.parametrize("reason", [FailureReason.IO, FailureReason.CHECKSUM])
def test_what_was_tried_and_failed_is_no_shortage(reason: FailureReason) -> None:
    it = Stack()
    it.put_far(A, B)
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE), Failure(reason))
    assert it.stack.lookup(A) is LookupResult.MISS
    assert isinstance(it.stack.acquire("request", [B]), PromotionLease)
