"""Deadlines hold without calls of `tick`: every call reads the clock, and no tier times out too early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_stack import A, B, C, Stack

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Refusal
from hybridkv.tiers.stack import BreakerOptions, BreakerState, Direction, LeaseFailure, PromotionLease

LIMIT_S = 30.0

CALLS: dict[str, Callable[[Stack], object]] = {
    "generation": lambda setup: setup.stack.generation,
    "breaker_state": lambda setup: setup.stack.breaker_state(Direction.PROMOTE, "disk"),
    "lookup": lambda setup: setup.stack.lookup(C),
    "leading": lambda setup: setup.stack.leading([C]),
    "last_held": lambda setup: setup.stack.last_held([C]),
    "any_pending": lambda setup: setup.stack.any_pending([C]),
    "acquire": lambda setup: setup.stack.acquire("somebody", [C]),
    "lease": lambda setup: setup.stack.lease("request"),
    "has_live_moves": lambda setup: setup.stack.has_live_moves(),
}


def stack_with_a_waiting_lease() -> tuple[Stack, PromotionLease]:
    """Stack with a lease on a chunk that never arrives, without a call of `tick`."""
    setup = Stack(load_timeout_s=LIMIT_S, breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    setup.put_secondary(A)
    setup.put_primary(C)
    lease = setup.lease(A)
    assert len(setup.moves(Direction.PROMOTE)) == 1
    return setup, lease


@pytest.mark.parametrize("question", CALLS)
def test_any_call_times_out_a_lease(question: str) -> None:
    setup, lease = stack_with_a_waiting_lease()
    setup.clock.now_s += LIMIT_S - 1
    CALLS[question](setup)
    assert lease.failure is None
    setup.clock.now_s += 1
    CALLS[question](setup)
    assert lease.failure is LeaseFailure.TIMEOUT and setup.stack.take_counts().timeouts == 1


@pytest.mark.parametrize("question", CALLS)
def test_any_call_counts_a_late_move_against_the_secondary_tier(question: str) -> None:
    setup, _ = stack_with_a_waiting_lease()
    setup.put_secondary(B)
    for _ in range(3):
        setup.clock.now_s += LIMIT_S
        CALLS[question](setup)
    assert setup.stack.take_counts().moves.breaker_openings == {"promote": 1}
    assert setup.stack.lookup(A) is LookupResult.MISS and not setup.stack.has_live_moves()


def test_a_stalled_caller_opens_no_breaker_with_any_number_of_calls() -> None:
    setup = Stack(load_timeout_s=LIMIT_S, breaker=BreakerOptions(failures=1))
    setup.put_secondary(A)
    lease = setup.lease(A)
    moves = setup.moves(Direction.PROMOTE)
    setup.clock.now_s += 10 * LIMIT_S
    for _ in range(2):
        for ask in CALLS.values():
            ask(setup)
    assert lease.failure is LeaseFailure.TIMEOUT
    setup.stack.tick()
    setup.end(moves)
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED
    assert setup.primary.lookup(A) is LookupResult.HIT


def test_a_backoff_of_the_breaker_ends_without_ticks() -> None:
    setup = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    setup.put_secondary(A, B)
    setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    generation = setup.stack.generation
    setup.clock.now_s += 4
    assert setup.stack.lookup(B) is LookupResult.MISS and setup.stack.generation == generation
    setup.clock.now_s += 1
    assert setup.stack.generation != generation, "cached answers are stale"
    assert setup.stack.lookup(B) is LookupResult.HIT
    setup.lease(B)
    setup.end(setup.moves(Direction.PROMOTE))
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def test_stores_are_probed_without_ticks() -> None:
    setup = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    setup.store(A)
    setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.IO))
    setup.store(B)
    assert setup.stack.take_moves() == []
    setup.clock.now_s += 5
    setup.store(C)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [C]


def test_a_lease_with_all_chunks_has_no_deadline() -> None:
    setup, lease = stack_with_a_waiting_lease()
    setup.stack.release("request")
    setup.put_secondary(B)
    lease = setup.lease(B)
    setup.end(setup.moves(Direction.PROMOTE))
    setup.clock.now_s += 10 * LIMIT_S
    assert setup.stack.lease("request") is lease and lease.is_ready and lease.failure is None


def test_the_clock_is_read_only_if_something_waits() -> None:
    setup = Stack(load_timeout_s=LIMIT_S)
    setup.put_secondary(A)
    num_read = 0
    now_s = setup.clock.now_s

    def clock() -> float:
        nonlocal num_read
        num_read += 1
        return now_s

    setup.stack._clock = setup.stack._deadlines._clock = clock
    for _ in range(10):
        assert setup.stack.lookup(A) is LookupResult.HIT and setup.stack.leading([A]) == 1
    assert num_read == 0
    setup.lease(A)
    before = num_read
    assert setup.stack.leading([A]) == 1
    assert num_read == before + 1


def test_a_lease_made_after_its_deadline_fails_at_once() -> None:
    setup, _ = stack_with_a_waiting_lease()
    setup.put_secondary(B)
    lease = setup.stack.acquire("late", [B], setup.clock.now_s - LIMIT_S)
    assert not isinstance(lease, Refusal) and setup.stack.lease("late") is lease
    assert lease.failure is LeaseFailure.TIMEOUT
