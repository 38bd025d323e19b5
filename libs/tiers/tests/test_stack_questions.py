"""A tier that answers no question is left alone as one whose loads are late: not every prompt waits for it in vain."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Key
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import (
    BreakerOptions,
    BreakerState,
    CascadePolicy,
    Direction,
    MoveOutcome,
    PromotionLease,
    SecondaryTier,
    SecondaryTierOptions,
    TierStack,
)
from kits.tiers.reference import RemoteIndex, RemoteStore

CHUNK = 16
A, B, C = b"a", b"b", b"c"
ASK_S, ANSWER_S = 1.0, 0.25
BREAKER = BreakerOptions(failures=3, first_backoff_s=5.0, max_backoff_s=20.0)
OPTIONS = SecondaryTierOptions(cascades=CascadePolicy.NOTHING, async_lookup_timeout_s=ASK_S, breaker=BREAKER)


class Elsewhere:
    """Host memory over a store elsewhere, which somebody else fills."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.world = RemoteStore(1, lambda: self.now_s, answer_s=ANSWER_S)
        self.index = RemoteIndex(self.world, 64 * CHUNK)
        peer = SecondaryTier("peer", self.index, OPTIONS)
        self.stack = TierStack(RamIndex(8 * CHUNK, CHUNK), [peer], 1, lambda: self.now_s)
        self.num_questions = 0

    @property
    def state(self) -> BreakerState:
        return self.stack.breaker_state(Direction.PROMOTE, "peer")

    def question(self) -> Key:
        """About a key that nobody was asked about."""
        self.num_questions += 1
        key = b"question %d" % self.num_questions
        self.stack.start_lookup([key])
        return key

    def be_silent(self, num_questions: int = BREAKER.failures) -> None:
        """So many questions in a row come to nothing."""
        self.world.is_silent = True
        for _ in range(num_questions):
            self.question()
            self.now_s += ASK_S
            self.stack.tick()

    def know(self, key: Key) -> None:
        """It was answered before that this is there."""
        self.world.lie(key, CHUNK)
        self.stack.start_lookup([key])
        self.now_s += ANSWER_S
        assert self.stack.lookup(key) is LookupResult.HIT


def test_a_tier_that_answers_no_question_is_left_alone_for_a_pause() -> None:
    it = Elsewhere()
    it.be_silent(BREAKER.failures - 1)
    assert it.state is BreakerState.CLOSED and it.stack.lookup_wait_s == ASK_S
    it.be_silent(1)
    assert it.state is BreakerState.OPEN
    assert it.stack.lookup_wait_s == 0.0, "nobody waits"
    asked = it.world.num_lookups
    assert it.stack.lookup(it.question()) is LookupResult.MISS and it.world.num_lookups == asked
    it.now_s += BREAKER.first_backoff_s
    assert it.state is BreakerState.PROBING and it.stack.lookup_wait_s == ASK_S
    assert it.stack.take_counts().tiers["peer"].breaker_openings == {"promote": 1}


def test_one_question_at_a_time_is_the_probe_and_each_that_fails_doubles_the_pause() -> None:
    it = Elsewhere()
    it.be_silent()
    pause_s = BREAKER.first_backoff_s
    it.now_s += pause_s
    for _ in range(2):
        assert it.state is BreakerState.PROBING
        assert it.stack.lookup(it.question()) is LookupResult.PENDING
        assert it.stack.lookup_wait_s == 0.0 and it.stack.lookup(it.question()) is LookupResult.MISS
        it.now_s += ASK_S
        assert it.state is BreakerState.OPEN
        it.now_s += pause_s
        assert it.state is BreakerState.OPEN, "it is left alone for longer"
        it.now_s += pause_s
        pause_s *= 2


def test_a_probe_that_is_answered_ends_the_pause_at_once() -> None:
    it = Elsewhere()
    it.be_silent()
    it.world.is_silent = False
    it.now_s += BREAKER.first_backoff_s
    it.world.lie(A, CHUNK)
    it.stack.start_lookup([A])
    it.now_s += ANSWER_S
    assert it.stack.lookup_wait_s == ASK_S and it.state is BreakerState.CLOSED
    assert it.stack.lookup(A) is LookupResult.HIT


@pytest.mark.parametrize("is_there", [True, False])
def test_an_answer_between_begins_the_count_anew_whatever_it_says(is_there: bool) -> None:
    it = Elsewhere()
    for _ in range(3):
        it.be_silent(BREAKER.failures - 1)
        it.world.is_silent = False
        if is_there:
            it.world.lie(A, CHUNK)
        it.stack.start_lookup([A])
        it.now_s += ASK_S
        assert it.state is BreakerState.CLOSED
        it.index.invalidate(A)


def test_an_answer_after_its_time_is_none() -> None:
    it = Elsewhere()
    it.world.answer_s = 1.5 * ASK_S
    for _ in range(BREAKER.failures):
        it.question()
        it.now_s += 2 * ASK_S
    assert it.state is BreakerState.OPEN


def test_what_a_tier_knows_already_is_not_asked_for_while_it_is_left_alone() -> None:
    it = Elsewhere()
    it.know(A)
    it.be_silent()
    assert it.stack.lookup(A) is LookupResult.MISS
    it.now_s += BREAKER.first_backoff_s
    assert it.stack.lookup(A) is LookupResult.HIT
    it.question()
    assert it.stack.lookup(A) is LookupResult.HIT, "a question keeps no load away"
    assert isinstance(it.stack.acquire("request", [A]), PromotionLease)


def test_loads_that_end_well_answer_no_question_and_answers_excuse_no_load() -> None:
    it = Elsewhere()
    for number in range(BREAKER.failures):
        it.know(b"%d" % number)
    for number in range(BREAKER.failures - 1):
        it.be_silent(1)
        assert isinstance(it.stack.acquire("request", [b"%d" % number]), PromotionLease)
        [move] = it.stack.take_moves()
        it.stack.on_move(move.move_id, MoveOutcome(1))
    it.be_silent(1)
    assert it.state is BreakerState.OPEN
    it = Elsewhere()
    for _ in range(BREAKER.failures):
        it.know(A)
        assert isinstance(it.stack.acquire("request", [A]), PromotionLease)
        [move] = it.stack.take_moves()
        it.stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.IO)))
    assert it.state is BreakerState.OPEN


def test_a_question_of_which_nothing_is_left_says_nothing() -> None:
    it = Elsewhere()
    it.be_silent(BREAKER.failures - 1)
    it.index.invalidate(it.question())
    it.now_s += ASK_S
    assert it.state is BreakerState.CLOSED
    it.be_silent(1)
    assert it.state is BreakerState.OPEN, "nor does it begin the count anew"
    it.now_s += BREAKER.first_backoff_s
    it.index.invalidate(it.question())
    it.now_s += ASK_S
    assert it.state is BreakerState.PROBING and it.stack.lookup_wait_s == ASK_S


def test_a_tier_that_cannot_be_asked_is_as_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Elsewhere()

    def start_lookup(keys: Iterable[Key], deadline_s: float) -> None:
        raise OSError("no route")

    it.be_silent(BREAKER.failures - 1)
    monkeypatch.setattr(it.index, "start_lookup", start_lookup)
    it.question()
    assert it.state is BreakerState.OPEN and it.stack.lookup_wait_s == 0.0


def test_an_opening_is_heard_of_by_whoever_looks_at_the_generation() -> None:
    it = Elsewhere()
    it.know(A)
    it.be_silent(BREAKER.failures - 1)
    it.question()
    before = it.stack.generation
    it.now_s += ASK_S
    after = it.stack.generation
    assert before != after and it.stack.lookup(A) is LookupResult.MISS
    it.now_s += BREAKER.first_backoff_s
    assert it.stack.generation != after and it.stack.lookup(A) is LookupResult.HIT


# Measured speed of reads.


def read(it: Elsewhere, key: Key, took_s: float, failure: Failure | None = None) -> None:
    """One promotion of a known chunk."""
    it.know(key)
    assert isinstance(it.stack.acquire(key.decode(), [key]), PromotionLease)
    [move] = it.stack.take_moves()
    it.now_s += took_s
    it.stack.on_move(move.move_id, MoveOutcome(1, failure))
    it.stack.release(key.decode())


def read_s(it: Elsewhere) -> float:
    """Expected time of a read of 1 GB."""
    return it.stack.expected_answer()[1] * 1e9


def test_the_speed_of_reads_follows_the_reads_and_is_forgotten_in_time() -> None:
    it = Elsewhere()
    assert read_s(it) == pytest.approx(1.0), "before the first one"
    for number in range(100):
        read(it, b"slow %d" % number, 0.2)
    assert read_s(it) == pytest.approx(0.2 / CHUNK * 1e9, rel=0.1)
    it.now_s += 3600.0
    assert read_s(it) == pytest.approx(1.0), "the tier is tried again"


def test_a_small_slow_read_weighs_little_beside_large_ones() -> None:
    it = Elsewhere()
    read(it, A, 0.2)
    assert read_s(it) < 100, "0.2 s of 16 bytes, and 1 MiB as it was assumed"


def test_a_read_that_fails_or_ends_late_is_not_measured() -> None:
    it = Elsewhere()
    read(it, A, 5.0, Failure(FailureReason.IO))
    assert read_s(it) == pytest.approx(1.0)
    it.know(B)
    assert isinstance(it.stack.acquire("b", [B]), PromotionLease)
    [move] = it.stack.take_moves()
    it.now_s += 3 * OPTIONS.load_timeout_s
    it.stack.tick()
    it.stack.tick()
    it.stack.on_move(move.move_id, MoveOutcome(1, None))
    assert read_s(it) == pytest.approx(1.0)
