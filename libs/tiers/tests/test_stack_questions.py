"""Breaker of lookups: a tier without answers to lookups is skipped like one with late loads."""

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


class RemoteBench:
    """Host memory over a remote store that other engines fill."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.world = RemoteStore(1, lambda: self.now_s, answer_s=ANSWER_S)
        self.index = RemoteIndex(self.world, 64 * CHUNK)
        peer = SecondaryTier("peer", self.index, OPTIONS)
        self.stack = TierStack(RamIndex(8 * CHUNK, CHUNK), [peer], 1, lambda: self.now_s)
        self.num_lookups_started = 0

    @property
    def state(self) -> BreakerState:
        return self.stack.breaker_state(Direction.PROMOTE, "peer")

    def start_new_lookup(self) -> Key:
        """Look up a key that was not looked up before."""
        self.num_lookups_started += 1
        key = b"question %d" % self.num_lookups_started
        self.stack.start_lookup([key])
        return key

    def time_out_lookups(self, num_lookups_started: int = BREAKER.failures) -> None:
        """Let this many lookups in a row time out."""
        self.world.is_silent = True
        for _ in range(num_lookups_started):
            self.start_new_lookup()
            self.now_s += ASK_S
            self.stack.tick()

    def find(self, key: Key) -> None:
        """Make the key a hit through a lookup."""
        self.world.lie(key, CHUNK)
        self.stack.start_lookup([key])
        self.now_s += ANSWER_S
        assert self.stack.lookup(key) is LookupResult.HIT


def test_unanswered_lookups_open_the_breaker() -> None:
    setup = RemoteBench()
    setup.time_out_lookups(BREAKER.failures - 1)
    assert setup.state is BreakerState.CLOSED and setup.stack.lookup_wait_s == ASK_S
    setup.time_out_lookups(1)
    assert setup.state is BreakerState.OPEN
    assert setup.stack.lookup_wait_s == 0.0, "no caller waits"
    asked = setup.world.num_lookups
    assert setup.stack.lookup(setup.start_new_lookup()) is LookupResult.MISS and setup.world.num_lookups == asked
    setup.now_s += BREAKER.first_backoff_s
    assert setup.state is BreakerState.PROBING and setup.stack.lookup_wait_s == ASK_S
    assert setup.stack.take_counts().tiers["peer"].breaker_openings == {"promote": 1}


def test_one_lookup_at_a_time_is_the_probe_and_a_failure_doubles_the_backoff() -> None:
    setup = RemoteBench()
    setup.time_out_lookups()
    pause_s = BREAKER.first_backoff_s
    setup.now_s += pause_s
    for _ in range(2):
        assert setup.state is BreakerState.PROBING
        assert setup.stack.lookup(setup.start_new_lookup()) is LookupResult.PENDING
        assert setup.stack.lookup_wait_s == 0.0 and setup.stack.lookup(setup.start_new_lookup()) is LookupResult.MISS
        setup.now_s += ASK_S
        assert setup.state is BreakerState.OPEN
        setup.now_s += pause_s
        assert setup.state is BreakerState.OPEN, "the backoff is longer"
        setup.now_s += pause_s
        pause_s *= 2


def test_an_answered_probe_closes_the_breaker_at_once() -> None:
    setup = RemoteBench()
    setup.time_out_lookups()
    setup.world.is_silent = False
    setup.now_s += BREAKER.first_backoff_s
    setup.world.lie(A, CHUNK)
    setup.stack.start_lookup([A])
    setup.now_s += ANSWER_S
    assert setup.stack.lookup_wait_s == ASK_S and setup.state is BreakerState.CLOSED
    assert setup.stack.lookup(A) is LookupResult.HIT


@pytest.mark.parametrize("is_there", [True, False])
def test_any_answer_resets_the_count_of_failures(is_there: bool) -> None:
    setup = RemoteBench()
    for _ in range(3):
        setup.time_out_lookups(BREAKER.failures - 1)
        setup.world.is_silent = False
        if is_there:
            setup.world.lie(A, CHUNK)
        setup.stack.start_lookup([A])
        setup.now_s += ASK_S
        assert setup.state is BreakerState.CLOSED
        setup.index.invalidate(A)


def test_a_late_answer_counts_as_a_failure() -> None:
    setup = RemoteBench()
    setup.world.answer_s = 1.5 * ASK_S
    for _ in range(BREAKER.failures):
        setup.start_new_lookup()
        setup.now_s += 2 * ASK_S
    assert setup.state is BreakerState.OPEN


def test_found_keys_are_misses_while_the_breaker_is_open() -> None:
    setup = RemoteBench()
    setup.find(A)
    setup.time_out_lookups()
    assert setup.stack.lookup(A) is LookupResult.MISS
    setup.now_s += BREAKER.first_backoff_s
    assert setup.stack.lookup(A) is LookupResult.HIT
    setup.start_new_lookup()
    assert setup.stack.lookup(A) is LookupResult.HIT, "a lookup blocks no load"
    assert isinstance(setup.stack.acquire("request", [A]), PromotionLease)


def test_loads_and_lookups_have_separate_failure_counts() -> None:
    setup = RemoteBench()
    for number in range(BREAKER.failures):
        setup.find(b"%d" % number)
    for number in range(BREAKER.failures - 1):
        setup.time_out_lookups(1)
        assert isinstance(setup.stack.acquire("request", [b"%d" % number]), PromotionLease)
        [move] = setup.stack.take_moves()
        setup.stack.on_move(move.move_id, MoveOutcome(1))
    setup.time_out_lookups(1)
    assert setup.state is BreakerState.OPEN
    setup = RemoteBench()
    for _ in range(BREAKER.failures):
        setup.find(A)
        assert isinstance(setup.stack.acquire("request", [A]), PromotionLease)
        [move] = setup.stack.take_moves()
        setup.stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.IO)))
    assert setup.state is BreakerState.OPEN


def test_a_withdrawn_lookup_counts_neither_way() -> None:
    setup = RemoteBench()
    setup.time_out_lookups(BREAKER.failures - 1)
    setup.index.invalidate(setup.start_new_lookup())
    setup.now_s += ASK_S
    assert setup.state is BreakerState.CLOSED
    setup.time_out_lookups(1)
    assert setup.state is BreakerState.OPEN, "and does not reset the count"
    setup.now_s += BREAKER.first_backoff_s
    setup.index.invalidate(setup.start_new_lookup())
    setup.now_s += ASK_S
    assert setup.state is BreakerState.PROBING and setup.stack.lookup_wait_s == ASK_S


def test_a_lookup_that_cannot_be_sent_counts_as_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = RemoteBench()

    def start_lookup(keys: Iterable[Key], deadline_s: float) -> None:
        raise OSError("no route")

    setup.time_out_lookups(BREAKER.failures - 1)
    monkeypatch.setattr(setup.index, "start_lookup", start_lookup)
    setup.start_new_lookup()
    assert setup.state is BreakerState.OPEN and setup.stack.lookup_wait_s == 0.0


def test_a_breaker_opening_changes_the_generation() -> None:
    setup = RemoteBench()
    setup.find(A)
    setup.time_out_lookups(BREAKER.failures - 1)
    setup.start_new_lookup()
    before = setup.stack.generation
    setup.now_s += ASK_S
    after = setup.stack.generation
    assert before != after and setup.stack.lookup(A) is LookupResult.MISS
    setup.now_s += BREAKER.first_backoff_s
    assert setup.stack.generation != after and setup.stack.lookup(A) is LookupResult.HIT


# Measured speed of reads.


def read(setup: RemoteBench, key: Key, took_s: float, failure: Failure | None = None) -> None:
    """One promotion of a found chunk."""
    setup.find(key)
    assert isinstance(setup.stack.acquire(key.decode(), [key]), PromotionLease)
    [move] = setup.stack.take_moves()
    setup.now_s += took_s
    setup.stack.on_move(move.move_id, MoveOutcome(1, failure))
    setup.stack.release(key.decode())


def read_s(setup: RemoteBench) -> float:
    """Expected time of a read of 1 GB."""
    return setup.stack.expected_lookup_times()[1] * 1e9


def test_the_speed_follows_the_reads_and_is_forgotten_in_time() -> None:
    setup = RemoteBench()
    assert read_s(setup) == pytest.approx(1.0), "before the first read"
    for number in range(100):
        read(setup, b"slow %d" % number, 0.2)
    assert read_s(setup) == pytest.approx(0.2 / CHUNK * 1e9, rel=0.1)
    setup.now_s += 3600.0
    assert read_s(setup) == pytest.approx(1.0), "the tier is tried again"


def test_a_small_slow_read_has_little_weight() -> None:
    setup = RemoteBench()
    read(setup, A, 0.2)
    assert read_s(setup) < 100, "0.2 s for 16 bytes, averaged with the assumed 1 MiB"


def test_a_failed_or_late_read_is_not_measured() -> None:
    setup = RemoteBench()
    read(setup, A, 5.0, Failure(FailureReason.IO))
    assert read_s(setup) == pytest.approx(1.0)
    setup.find(B)
    assert isinstance(setup.stack.acquire("b", [B]), PromotionLease)
    [move] = setup.stack.take_moves()
    setup.now_s += 3 * OPTIONS.load_timeout_s
    setup.stack.tick()
    setup.stack.tick()
    setup.stack.on_move(move.move_id, MoveOutcome(1, None))
    assert read_s(setup) == pytest.approx(1.0)
