"""Deadlines hold though nobody calls `tick`: every answer looks at the clock, and blames nobody too early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_stack import A, B, C, Stack

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Refusal
from hybridkv.tiers.stack import BreakerOptions, BreakerState, Direction, LeaseFailure, PromotionLease

LIMIT_S = 30.0

QUESTIONS: dict[str, Callable[[Stack], object]] = {
    "generation": lambda it: it.stack.generation,
    "breaker_state": lambda it: it.stack.breaker_state(Direction.PROMOTE, "disk"),
    "lookup": lambda it: it.stack.lookup(C),
    "leading": lambda it: it.stack.leading([C]),
    "last_held": lambda it: it.stack.last_held([C]),
    "any_pending": lambda it: it.stack.any_pending([C]),
    "acquire": lambda it: it.stack.acquire("somebody", [C]),
    "hold": lambda it: it.stack.lease("request"),
    "has_live_moves": lambda it: it.stack.has_live_moves(),
}


def waiting() -> tuple[Stack, PromotionLease]:
    """A hold of a chunk that never comes, in a stack that is never told that a step has passed."""
    it = Stack(load_timeout_s=LIMIT_S, breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    it.put_far(A)
    it.put_near(C)
    hold = it.hold(A)
    assert len(it.moves(Direction.PROMOTE)) == 1
    return it, hold


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_hold_fails_at_its_time_whatever_is_asked_then(question: str) -> None:
    it, hold = waiting()
    it.clock.now_s += LIMIT_S - 1
    QUESTIONS[question](it)
    assert hold.failure is None
    it.clock.now_s += 1
    QUESTIONS[question](it)
    assert hold.failure is LeaseFailure.TIMEOUT and it.stack.take_counts().timeouts == 1


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_late_move_is_held_against_the_slow_tier_whatever_is_asked(question: str) -> None:
    it, _ = waiting()
    it.put_far(B)
    for _ in range(3):
        it.clock.now_s += LIMIT_S
        QUESTIONS[question](it)
    assert it.stack.take_counts().moves.breaker_openings == {"promote": 1}
    assert it.stack.lookup(A) is LookupResult.MISS and not it.stack.has_live_moves()


def test_a_caller_that_stood_still_blames_no_tier_for_it_however_often_it_asks() -> None:
    it = Stack(load_timeout_s=LIMIT_S, breaker=BreakerOptions(failures=1))
    it.put_far(A)
    hold = it.hold(A)
    moves = it.moves(Direction.PROMOTE)
    it.clock.now_s += 10 * LIMIT_S
    for _ in range(2):
        for ask in QUESTIONS.values():
            ask(it)
    assert hold.failure is LeaseFailure.TIMEOUT
    it.stack.tick()
    it.end(moves)
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED
    assert it.primary.lookup(A) is LookupResult.HIT


def test_a_pause_of_the_breaker_ends_though_nobody_ticks() -> None:
    it = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    it.put_far(A, B)
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    generation = it.stack.generation
    it.clock.now_s += 4
    assert it.stack.lookup(B) is LookupResult.MISS and it.stack.generation == generation
    it.clock.now_s += 1
    assert it.stack.generation != generation, "who remembers an answer must ask again"
    assert it.stack.lookup(B) is LookupResult.HIT
    it.hold(B)
    it.end(it.moves(Direction.PROMOTE))
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def test_stores_are_tried_again_though_nobody_ticks() -> None:
    it = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    it.store(A)
    it.end(it.moves(Direction.CASCADE), Failure(FailureReason.IO))
    it.store(B)
    assert it.stack.take_moves() == []
    it.clock.now_s += 5
    it.store(C)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [C]


def test_a_hold_whose_chunks_came_has_no_deadline() -> None:
    it, hold = waiting()
    it.stack.release("request")
    it.put_far(B)
    hold = it.hold(B)
    it.end(it.moves(Direction.PROMOTE))
    it.clock.now_s += 10 * LIMIT_S
    assert it.stack.lease("request") is hold and hold.is_ready and hold.failure is None


def test_the_clock_is_read_only_where_something_waits() -> None:
    it = Stack(load_timeout_s=LIMIT_S)
    it.put_far(A)
    num_read = 0
    now_s = it.clock.now_s

    def clock() -> float:
        nonlocal num_read
        num_read += 1
        return now_s

    it.stack._clock = it.stack._deadlines._clock = clock
    for _ in range(10):
        assert it.stack.lookup(A) is LookupResult.HIT and it.stack.leading([A]) == 1
    assert num_read == 0
    it.hold(A)
    before = num_read
    assert it.stack.leading([A]) == 1
    assert num_read == before + 1


def test_a_hold_made_after_its_time_is_over_fails_at_once() -> None:
    it, _ = waiting()
    it.put_far(B)
    hold = it.stack.acquire("late", [B], it.clock.now_s - LIMIT_S)
    assert not isinstance(hold, Refusal) and it.stack.lease("late") is hold
    assert hold.failure is LeaseFailure.TIMEOUT
