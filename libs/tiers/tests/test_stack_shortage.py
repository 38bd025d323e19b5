"""Shortages of files, memory or threads cost no chunk, open no breaker and are retried after a pause."""

from __future__ import annotations

import pytest
from test_stack import A, B, C, Stack

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Refusal
from hybridkv.tiers.stack import BreakerState, Direction, LeaseFailure, PromotionLease

BUSY = Failure(FailureReason.BUSY, "segment 0: EMFILE")


def fail_for_shortage(setup: Stack, key: bytes) -> None:
    """A lease that fails because of a shortage."""
    lease = setup.lease(key)
    setup.end(setup.moves(Direction.PROMOTE), BUSY)
    assert lease.failure is LeaseFailure.LOST


def test_a_lasting_shortage_costs_no_chunk() -> None:
    setup = Stack()
    setup.put_secondary(A, B, C)
    for _ in range(20):
        fail_for_shortage(setup, A)
        setup.clock.now_s += 10
    assert setup.stack.leading([A, B, C]) == 3
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED
    assert setup.stack.take_counts().moves.breaker_openings == {}


def test_a_lease_after_a_shortage_is_refused_as_busy_for_a_moment() -> None:
    setup = Stack()
    setup.put_secondary(A)
    fail_for_shortage(setup, A)
    for _ in range(1000):
        assert setup.stack.lookup(A) is LookupResult.HIT
        assert setup.stack.acquire("request", [A]) is Refusal.BUSY
    assert setup.stack.take_moves() == []
    setup.clock.now_s += 0.05
    assert isinstance(setup.stack.acquire("request", [A]), PromotionLease)


def test_a_lasting_shortage_becomes_a_miss() -> None:
    setup = Stack()
    setup.put_secondary(A)
    began_s, num_tried = setup.clock.now_s, 0
    while setup.stack.lookup(A) is LookupResult.HIT:
        if setup.stack.acquire("request", [A]) is not Refusal.BUSY:
            num_tried += 1
            setup.end(setup.moves(Direction.PROMOTE), BUSY)
        setup.clock.now_s += 0.01
    assert setup.clock.now_s - began_s < 2.0 and 3 <= num_tried <= 8
    assert setup.stack.acquire("request", [A]) is Refusal.PRESENT
    setup.clock.now_s += 5
    lease = setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE))
    assert lease.is_ready, "the shortage is over"


def test_completions_after_a_shortage_do_not_shorten_the_pause() -> None:
    """A lease larger than the medium's queue: the rest is refused first, then the accepted loads complete."""
    setup = Stack()
    setup.put_secondary(A, B)
    setup.lease(A, B)
    first, second = setup.moves(Direction.PROMOTE)
    setup.end([second], BUSY)
    setup.end([first])
    assert setup.stack.acquire("request", [A, B]) is Refusal.BUSY
    setup.clock.now_s += 0.05
    lease = setup.lease(A, B)
    setup.end(setup.moves(Direction.PROMOTE))
    assert lease.is_ready


def test_chunks_in_the_primary_tier_are_leased_during_a_shortage() -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.put_primary(B)
    fail_for_shortage(setup, A)
    assert setup.lease(B).is_ready


def test_a_shortage_of_stores_pauses_them_and_blocks_no_load() -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.store(B)
    setup.end(setup.moves(Direction.CASCADE), BUSY)
    setup.store(C)
    assert setup.stack.take_moves() == []
    assert setup.stack.take_counts().moves.cascades == {}
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED
    setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE))
    setup.clock.now_s += 0.05
    setup.stack.tick()
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [B, C]


@pytest.mark.parametrize("reason", [FailureReason.IO, FailureReason.CHECKSUM])
def test_a_failed_operation_is_no_shortage(reason: FailureReason) -> None:
    setup = Stack()
    setup.put_secondary(A, B)
    setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE), Failure(reason))
    assert setup.stack.lookup(A) is LookupResult.MISS
    assert isinstance(setup.stack.acquire("request", [B]), PromotionLease)
