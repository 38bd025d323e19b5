"""A stack promotes what a hold needs and nothing else, lets what is stored cascade, and ends every wait in time."""

from __future__ import annotations

from pathlib import Path

import disk_store
import pytest

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Refusal, Slot, TierConfigurationError
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import (
    BreakerOptions,
    BreakerState,
    Direction,
    LeaseFailure,
    MoveOutcome,
    PromotionLease,
    SecondaryTier,
    SecondaryTierOptions,
    TierMove,
    TierStack,
)

CHUNK = 16
A, B, C = b"a", b"b", b"c"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Stack:
    """A stack of two small tiers, and the clock it reads."""

    def __init__(
        self,
        near_chunks: int = 8,
        far_chunks: int = 16,
        ranks: int = 1,
        far_type: type[RamIndex] = RamIndex,
        **options: object,
    ) -> None:
        self.clock = Clock()
        self.primary = RamIndex(near_chunks * CHUNK, CHUNK)
        self.far = far_type(far_chunks * CHUNK, CHUNK)
        chosen = SecondaryTierOptions(
            **{"promoting_share": 1.0, "cascading_share": 1.0, "arriving_share": 1.0, **options}
        )  # type: ignore[arg-type]
        self.stack = TierStack(self.primary, [SecondaryTier("disk", self.far, chosen)], ranks, self.clock)

    def put_far(self, *keys: bytes) -> None:
        for key in keys:
            assert isinstance(self.far.reserve(key, CHUNK), Slot)
            assert self.far.commit(key)

    def put_near(self, *keys: bytes) -> None:
        for key in keys:
            assert isinstance(self.primary.reserve(key, CHUNK), Slot)
            assert self.primary.commit(key)

    def store(self, *keys: bytes) -> None:
        for key in keys:
            assert isinstance(self.stack.reserve(key, CHUNK), Slot)
            assert self.stack.commit(key)

    def moves(self, direction: Direction) -> list[TierMove]:
        moves = self.stack.take_moves()
        assert all(move.direction is direction for move in moves)
        return moves

    def end(self, moves: list[TierMove], failure: Failure | None = None) -> None:
        for move in moves:
            self.stack.on_move(move.move_id, MoveOutcome(1, failure))

    def hold(self, *keys: bytes) -> PromotionLease:
        hold = self.stack.acquire("request", keys)
        assert isinstance(hold, PromotionLease)
        return hold


def test_a_lookup_moves_nothing() -> None:
    it = Stack()
    it.put_far(A)
    assert it.stack.lookup(A) is LookupResult.HIT
    assert it.stack.leading([A, B]) == 1
    assert it.stack.take_moves() == []


def test_a_hold_promotes_exactly_what_the_fast_tier_lacks() -> None:
    it = Stack()
    it.put_far(A, B, C)
    it.put_near(B)
    hold = it.hold(A, B)
    moves = it.moves(Direction.PROMOTE)
    assert [move.key for move in moves] == [A]
    assert not hold.is_ready
    it.end(moves)
    assert hold.is_ready
    assert it.primary.lookup(A) is LookupResult.HIT and it.primary.lookup(C) is LookupResult.MISS


def test_a_promoted_chunk_is_pending_until_every_rank_has_it() -> None:
    it = Stack(ranks=2)
    it.put_far(A)
    hold = it.hold(A)
    (move,) = it.moves(Direction.PROMOTE)
    it.stack.on_move(move.move_id, MoveOutcome(1))
    assert it.stack.lookup(A) is LookupResult.PENDING and not hold.is_ready
    it.stack.on_move(move.move_id, MoveOutcome(1))
    assert hold.is_ready


def test_two_holds_of_one_chunk_cost_one_promotion() -> None:
    it = Stack()
    it.put_far(A)
    first = it.hold(A)
    second = it.stack.acquire("another", [A])
    assert isinstance(second, PromotionLease)
    moves = it.moves(Direction.PROMOTE)
    assert len(moves) == 1
    it.end(moves)
    assert first.is_ready and second.is_ready


def test_what_a_ready_hold_keeps_is_not_evicted() -> None:
    it = Stack(near_chunks=2)
    it.put_far(A)
    hold = it.hold(A)
    it.end(it.moves(Direction.PROMOTE))
    it.put_near(B, C)
    assert hold.is_ready and it.primary.lookup(A) is LookupResult.HIT
    it.stack.release("request")
    it.put_near(b"d", b"e")
    assert it.primary.lookup(A) is LookupResult.MISS


def test_a_hold_that_does_not_fit_is_refused_and_keeps_nothing() -> None:
    it = Stack(near_chunks=2)
    it.put_far(A, B, C)
    it.primary.pin(A)
    assert it.stack.acquire("request", [A, B, C]) is Refusal.TOO_LARGE
    it.put_near(b"d")
    assert it.primary.pin(b"d") is not None
    assert it.stack.acquire("request", [A, B]) is Refusal.NO_ROOM
    assert it.stack.take_moves() == []
    assert all(it.far.pin(key) is not None for key in (A, B))
    assert it.primary.lookup(A) is LookupResult.MISS


def test_a_hold_that_does_not_fit_pushes_out_nothing_for_what_is_behind_it() -> None:
    it = Stack(near_chunks=4)
    for key, num_chunks in ((A, 1), (B, 3), (C, 1)):
        assert isinstance(it.far.reserve(key, num_chunks * CHUNK), Slot) and it.far.commit(key)
    it.put_near(b"pinned", b"pinned too", b"oldest", b"old")
    assert all(it.primary.pin(key) is not None for key in (b"pinned", b"pinned too"))
    assert it.stack.acquire("request", [B, A]) is Refusal.NO_ROOM
    assert it.primary.num_keys == 4, "the first of them found no room"
    assert it.stack.acquire("request", [A, B, C]) is Refusal.TOO_LARGE, "as a whole"
    assert it.far.invalidate(C)
    assert it.stack.acquire("request", [A, B]) is Refusal.NO_ROOM
    assert it.primary.lookup(b"oldest") is LookupResult.MISS, "which the first of them took the place of"
    assert it.primary.lookup(b"old") is LookupResult.HIT


def test_more_than_its_share_is_refused_while_something_moves() -> None:
    it = Stack(promoting_share=0.25)
    it.put_far(A, B, C)
    it.hold(A, B)
    assert it.stack.acquire("another", [C]) is Refusal.BUSY
    it.end(it.moves(Direction.PROMOTE))
    assert isinstance(it.stack.acquire("another", [C]), PromotionLease)


def test_a_hold_fails_when_its_time_is_over_and_the_late_bytes_find_their_own_place() -> None:
    it = Stack(load_timeout_s=30.0)
    it.put_far(A)
    hold = it.hold(A)
    (move,) = it.moves(Direction.PROMOTE)
    it.clock.now_s += 29
    it.stack.tick()
    assert hold.failure is None and it.stack.has_live_moves()
    it.clock.now_s += 1
    it.stack.tick()
    assert hold.failure is LeaseFailure.TIMEOUT
    it.stack.tick()
    assert not it.stack.has_live_moves()
    # The space stays reserved, so nobody else is given it while the medium may still write.
    slots = [it.primary.reserve(bytes([number]), CHUNK) for number in range(7)]
    assert all(isinstance(slot, Slot) for slot in slots)
    assert move.primary not in slots
    it.end([move])
    assert it.primary.lookup(A) is LookupResult.HIT


@pytest.mark.parametrize("reason", [FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.IO])
def test_a_chunk_that_cannot_be_read_is_never_offered_again(reason: FailureReason) -> None:
    it = Stack()
    it.put_far(A, B)
    hold = it.hold(A, B)
    first, second = it.moves(Direction.PROMOTE)
    it.end([first], Failure(reason))
    assert hold.failure is LeaseFailure.LOST
    it.end([second])
    assert it.stack.lookup(A) is LookupResult.MISS and it.stack.lookup(B) is LookupResult.HIT


def test_a_busy_medium_costs_no_chunk() -> None:
    it = Stack()
    it.put_far(A)
    hold = it.hold(A)
    it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.BUSY))
    assert hold.failure is LeaseFailure.LOST and it.stack.lookup(A) is LookupResult.HIT


def test_what_is_stored_cascades_once() -> None:
    it = Stack()
    it.store(A)
    (move,) = it.moves(Direction.CASCADE)
    assert it.primary.pin(A) is not None and it.far.lookup(A) is LookupResult.PENDING
    it.end([move])
    assert it.far.lookup(A) is LookupResult.HIT
    it.stack.cascade(A)
    assert it.stack.take_moves() == []


def test_what_cascades_cannot_be_evicted_before_it_was_read() -> None:
    it = Stack(near_chunks=1)
    it.store(A)
    moves = it.moves(Direction.CASCADE)
    assert it.stack.reserve(B, CHUNK) is Refusal.NO_ROOM
    it.end(moves)
    assert isinstance(it.stack.reserve(B, CHUNK), Slot)


def test_a_full_way_down_makes_wait_and_loses_nothing() -> None:
    it = Stack(cascading_share=0.25)
    it.store(A, B, C)
    first = it.moves(Direction.CASCADE)
    assert len(first) == 2 and it.stack.num_waiting("disk") == 1
    it.end(first)
    (second,) = it.moves(Direction.CASCADE)
    assert second.key == C and it.stack.num_waiting("disk") == 0
    it.end([second])
    assert it.stack.take_counts().moves.cascades == {"done": 3}


def test_a_failed_cascade_leaves_the_fast_tier_as_it_was() -> None:
    it = Stack()
    it.store(A)
    it.end(it.moves(Direction.CASCADE), Failure(FailureReason.IO, "no space"))
    assert it.primary.lookup(A) is LookupResult.HIT and it.far.lookup(A) is LookupResult.MISS


def test_bytes_that_changed_in_the_fast_tier_are_withdrawn_from_both() -> None:
    it = Stack()
    it.store(A)
    it.end(it.moves(Direction.CASCADE), Failure(FailureReason.CHECKSUM))
    assert it.stack.lookup(A) is LookupResult.MISS


def test_a_reset_fails_holds_and_nothing_that_moved_is_offered_afterwards() -> None:
    it = Stack()
    it.put_far(A)
    hold = it.hold(A)
    it.store(B)
    moves = it.stack.take_moves()
    it.stack.clear()
    assert hold.failure is LeaseFailure.LOST
    it.end(moves)
    assert [it.stack.lookup(key) for key in (A, B)] == [LookupResult.MISS] * 2
    assert it.primary.used_bytes == 0 and it.far.used_bytes == 0


def test_the_breaker_hides_a_dead_tier_and_lets_it_come_back() -> None:
    it = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=2, first_backoff_s=5.0, max_backoff_s=8.0))
    it.put_far(A, B, C)
    generation = it.stack.generation
    for key in (A, B):
        it.stack.acquire(key.hex(), [key])
    it.stack.take_moves()
    it.clock.now_s += 30
    it.stack.tick()
    it.stack.tick()
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN and it.stack.generation != generation
    assert it.stack.lookup(C) is LookupResult.MISS and it.stack.leading([C]) == 0 and it.stack.last_held([C]) is None
    it.clock.now_s += 5
    it.stack.tick()
    assert (
        it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
        and it.stack.lookup(C) is LookupResult.HIT
    )


def test_a_caller_that_stood_still_blames_no_tier_for_it() -> None:
    it = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=1))
    it.put_far(A)
    hold = it.hold(A)
    moves = it.moves(Direction.PROMOTE)
    it.clock.now_s += 300
    it.stack.tick()
    it.end(moves)
    it.stack.tick()
    assert hold.failure is LeaseFailure.TIMEOUT and it.primary.lookup(A) is LookupResult.HIT
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def late(*keys: bytes, **options: object) -> tuple[Stack, list[TierMove]]:
    """A stack whose slow tier has not answered in time, and the moves that it owes."""
    it = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=1, first_backoff_s=5.0), **options)
    it.put_far(*keys)
    it.hold(*keys)
    moves = it.moves(Direction.PROMOTE)
    it.clock.now_s += 30
    it.stack.tick()
    it.stack.tick()
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
    it.stack.release("request")
    it.clock.now_s += 5
    it.stack.tick()
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
    return it, moves


def test_what_is_read_too_late_is_not_offered_until_it_has_come() -> None:
    it, moves = late(B)
    it.put_near(A)
    it.put_far(C)
    assert [it.stack.lookup(key) for key in (A, B, C)] == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    assert it.stack.leading([A, B, C]) == 1 and it.stack.last_held([A, B]) == 0 and it.stack.last_held([B]) is None
    assert not it.stack.any_pending([A, B])
    assert it.stack.acquire("another", [A, B]) is Refusal.PRESENT
    assert it.primary.invalidate(A) and it.primary.lookup(A) is LookupResult.MISS
    it.put_near(A)  # which is refused while a pin is left
    generation = it.stack.generation
    it.end(moves)
    assert it.stack.lookup(B) is LookupResult.HIT and it.stack.leading([A, B, C]) == 3
    assert it.stack.generation != generation


def test_a_read_that_never_ends_keeps_no_probe_away() -> None:
    it, _ = late(A)
    it.put_far(B)
    it.hold(B)
    it.end(it.moves(Direction.PROMOTE))
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def test_while_a_probe_is_on_its_way_nobody_else_is_sent_after_it() -> None:
    it = probing()
    it.put_far(C)
    it.hold(B)
    (probe,) = it.moves(Direction.PROMOTE)
    assert it.stack.lookup(C) is LookupResult.MISS and it.stack.leading([C]) == 0 and it.stack.last_held([C]) is None
    assert it.stack.acquire("another", [C]) is Refusal.PRESENT
    generation = it.stack.generation
    it.end([probe])
    assert it.stack.lookup(C) is LookupResult.HIT and it.stack.generation != generation


def test_what_never_comes_takes_up_no_more_of_the_fast_tier_than_may_move() -> None:
    it, moves = late(A, B, C, promoting_share=0.25)
    it.put_far(b"d")
    assert it.stack.lookup(b"d") is LookupResult.MISS and it.stack.acquire("another", [b"d"]) is Refusal.PRESENT
    it.end(moves[:1])
    assert it.stack.lookup(b"d") is LookupResult.HIT and isinstance(it.stack.acquire("another", [b"d"]), PromotionLease)


def test_a_deadline_counts_from_when_its_owner_began_to_wait() -> None:
    it = Stack(load_timeout_s=30.0)
    it.put_far(A)
    hold = it.stack.acquire("request", [A], it.clock.now_s - 29)
    assert isinstance(hold, PromotionLease)
    it.clock.now_s += 1
    it.stack.tick()
    assert hold.failure is LeaseFailure.TIMEOUT


def test_the_slow_tier_hears_why_a_chunk_is_withdrawn(tmp_path: Path) -> None:
    far = disk_store.make_index(tmp_path / "store", disk_store.options_for(1 << 16))
    slot = far.reserve(A, CHUNK)
    assert isinstance(slot, Slot) and far.commit(A)
    stack = TierStack(RamIndex(8 * CHUNK, CHUNK), [SecondaryTier("disk", far)], 1, Clock())
    assert isinstance(stack.acquire("request", [A]), PromotionLease)
    (move,) = stack.take_moves()
    stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.CHECKSUM)))
    assert far.take_disk_counts().quarantined == {"checksum": 1}
    stack.close()


def probing() -> Stack:
    it = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0, max_backoff_s=8.0))
    it.put_far(A, B)
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    it.clock.now_s += 5
    it.stack.tick()
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
    return it


def test_a_probe_that_succeeds_closes_the_breaker() -> None:
    it = probing()
    it.hold(B)
    it.end(it.moves(Direction.PROMOTE))
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def test_a_probe_that_fails_opens_it_for_longer_within_a_bound() -> None:
    it = probing()
    for pause_s in (8, 8):
        it.put_far(B) if it.far.lookup(B) is LookupResult.MISS else None
        it.hold(B)
        it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.IO))
        assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
        it.clock.now_s += pause_s - 1
        it.stack.tick()
        assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
        it.clock.now_s += 1
        it.stack.tick()
        assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING


def failing_stores(*keys: bytes) -> Stack:
    """A stack whose slow tier has refused to take chunks until it was left alone."""
    it = Stack(breaker=BreakerOptions(failures=2, first_backoff_s=5.0))
    it.put_far(*keys)
    for key in (b"x", b"y"):
        it.store(key)
        it.end(it.moves(Direction.CASCADE), Failure(FailureReason.IO, "segment 0: EROFS"))
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    return it


def test_stores_that_fail_keep_no_load_away() -> None:
    it = failing_stores(A, B, C)
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED
    assert it.stack.leading([A, B, C]) == 3
    hold = it.hold(A, B, C)
    it.end(it.moves(Direction.PROMOTE))
    assert hold.is_ready
    it.store(b"z")
    assert it.stack.take_moves() == [] and it.stack.take_counts().moves.cascades == {"failed": 2, "dropped_open": 1}


def test_loads_that_fail_keep_no_store_away() -> None:
    it = Stack(breaker=BreakerOptions(failures=2, first_backoff_s=5.0))
    it.put_far(A, B, C)
    for key in (A, B):
        it.hold(key)
        it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    assert it.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
    assert it.stack.lookup(C) is LookupResult.MISS
    it.store(b"d")
    it.end(it.moves(Direction.CASCADE))
    assert it.far.lookup(b"d") is LookupResult.HIT
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED


def test_a_load_that_succeeds_says_nothing_about_stores() -> None:
    it = failing_stores(A)
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE))
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    it.clock.now_s += 5
    it.stack.tick()
    it.hold(A)
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.PROBING


def test_stores_are_tried_again_one_at_a_time() -> None:
    it = failing_stores()
    it.clock.now_s += 5
    it.stack.tick()
    it.store(A, B)
    [probe] = it.moves(Direction.CASCADE)
    assert probe.key == A and it.stack.num_waiting("disk") == 1
    it.end([probe])
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED
    it.store(C)
    assert [move.key for move in it.moves(Direction.CASCADE)] == [B, C]


def test_stores_that_are_late_keep_no_load_away_and_never_the_next_probe() -> None:
    it = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    it.put_far(A)
    it.store(B)
    [stuck] = it.moves(Direction.CASCADE)
    it.clock.now_s += 30
    it.stack.tick()
    it.stack.tick()
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    assert it.stack.lookup(A) is LookupResult.HIT and not it.stack.has_live_moves()
    it.clock.now_s += 5
    it.stack.tick()
    it.store(C)
    it.end(it.moves(Direction.CASCADE))
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED
    it.end([stuck])
    assert it.far.lookup(B) is LookupResult.HIT


def test_openings_are_counted_by_direction() -> None:
    it = failing_stores(A, B)
    assert it.stack.take_counts().moves.breaker_openings == {"cascade": 1}
    for key in (A, B):
        it.hold(key)
        it.end(it.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    assert it.stack.take_counts().moves.breaker_openings == {"promote": 1}
    assert it.stack.take_counts().moves.breaker_openings == {}


def test_a_breaker_of_stores_changes_no_answer_of_a_lookup() -> None:
    it = Stack(breaker=BreakerOptions(failures=1))
    it.store(A)
    [move] = it.moves(Direction.CASCADE)
    before = it.stack.generation - it.primary.generation - it.far.generation
    it.end([move], Failure(FailureReason.IO))
    assert it.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    assert it.stack.generation - it.primary.generation - it.far.generation == before


def test_counts_say_what_moved_since_they_were_taken() -> None:
    it = Stack()
    it.put_far(A)
    it.hold(A)
    it.end(it.moves(Direction.PROMOTE))
    it.store(B)
    it.end(it.moves(Direction.CASCADE), Failure(FailureReason.IO))
    counts = it.stack.take_counts().moves
    assert counts.promotions == {"done": 1} and counts.promoted_bytes == CHUNK
    assert counts.cascades == {"failed": 1} and counts.cascaded_bytes == 0 and counts.failures == {"io": 1}
    assert it.stack.take_counts().moves.promotions == {}


def test_options_that_cannot_work_are_refused() -> None:
    for make in (
        lambda: SecondaryTierOptions(load_timeout_s=0),
        lambda: SecondaryTierOptions(promoting_share=0),
        lambda: SecondaryTierOptions(cascading_share=1.5),
        lambda: BreakerOptions(failures=0),
        lambda: BreakerOptions(first_backoff_s=9, max_backoff_s=8),
    ):
        with pytest.raises(TierConfigurationError):
            make()
