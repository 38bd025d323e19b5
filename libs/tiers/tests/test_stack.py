"""Tier stack: a lease promotes exactly its missing chunks, stores cascade, and every wait ends in time."""

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
    """Clock that advances only when a test sets it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Stack:
    """Stack of two small tiers, with its clock."""

    def __init__(
        self,
        primary_chunks: int = 8,
        secondary_chunks: int = 16,
        ranks: int = 1,
        secondary_type: type[RamIndex] = RamIndex,
        **options: object,
    ) -> None:
        self.clock = Clock()
        self.primary = RamIndex(primary_chunks * CHUNK, CHUNK)
        self.secondary = secondary_type(secondary_chunks * CHUNK, CHUNK)
        chosen = SecondaryTierOptions(
            **{"promoting_share": 1.0, "cascading_share": 1.0, "arriving_share": 1.0, **options}
        )  # type: ignore[arg-type]
        self.stack = TierStack(self.primary, [SecondaryTier("disk", self.secondary, chosen)], ranks, self.clock)

    def put_secondary(self, *keys: bytes) -> None:
        for key in keys:
            assert isinstance(self.secondary.reserve(key, CHUNK), Slot)
            assert self.secondary.commit(key)

    def put_primary(self, *keys: bytes) -> None:
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

    def lease(self, *keys: bytes) -> PromotionLease:
        lease = self.stack.acquire("request", keys)
        assert isinstance(lease, PromotionLease)
        return lease


def test_a_lookup_moves_nothing() -> None:
    setup = Stack()
    setup.put_secondary(A)
    assert setup.stack.lookup(A) is LookupResult.HIT
    assert setup.stack.leading([A, B]) == 1
    assert setup.stack.take_moves() == []


def test_a_lease_promotes_exactly_the_chunks_that_the_primary_tier_lacks() -> None:
    setup = Stack()
    setup.put_secondary(A, B, C)
    setup.put_primary(B)
    lease = setup.lease(A, B)
    moves = setup.moves(Direction.PROMOTE)
    assert [move.key for move in moves] == [A]
    assert not lease.is_ready
    setup.end(moves)
    assert lease.is_ready
    assert setup.primary.lookup(A) is LookupResult.HIT and setup.primary.lookup(C) is LookupResult.MISS


def test_a_promoted_chunk_is_pending_until_every_rank_has_it() -> None:
    setup = Stack(ranks=2)
    setup.put_secondary(A)
    lease = setup.lease(A)
    (move,) = setup.moves(Direction.PROMOTE)
    setup.stack.on_move(move.move_id, MoveOutcome(1))
    assert setup.stack.lookup(A) is LookupResult.PENDING and not lease.is_ready
    setup.stack.on_move(move.move_id, MoveOutcome(1))
    assert lease.is_ready


def test_two_leases_of_one_chunk_cost_one_promotion() -> None:
    setup = Stack()
    setup.put_secondary(A)
    first = setup.lease(A)
    second = setup.stack.acquire("another", [A])
    assert isinstance(second, PromotionLease)
    moves = setup.moves(Direction.PROMOTE)
    assert len(moves) == 1
    setup.end(moves)
    assert first.is_ready and second.is_ready


def test_chunks_of_a_ready_lease_are_not_evicted() -> None:
    setup = Stack(primary_chunks=2)
    setup.put_secondary(A)
    lease = setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE))
    setup.put_primary(B, C)
    assert lease.is_ready and setup.primary.lookup(A) is LookupResult.HIT
    setup.stack.release("request")
    setup.put_primary(b"d", b"e")
    assert setup.primary.lookup(A) is LookupResult.MISS


def test_a_lease_that_does_not_fit_is_refused_and_pins_nothing() -> None:
    setup = Stack(primary_chunks=2)
    setup.put_secondary(A, B, C)
    setup.primary.pin(A)
    assert setup.stack.acquire("request", [A, B, C]) is Refusal.TOO_LARGE
    setup.put_primary(b"d")
    assert setup.primary.pin(b"d") is not None
    assert setup.stack.acquire("request", [A, B]) is Refusal.NO_ROOM
    assert setup.stack.take_moves() == []
    assert all(setup.secondary.pin(key) is not None for key in (A, B))
    assert setup.primary.lookup(A) is LookupResult.MISS


def test_a_lease_that_does_not_fit_evicts_nothing_for_its_later_chunks() -> None:
    setup = Stack(primary_chunks=4)
    for key, num_chunks in ((A, 1), (B, 3), (C, 1)):
        assert isinstance(setup.secondary.reserve(key, num_chunks * CHUNK), Slot) and setup.secondary.commit(key)
    setup.put_primary(b"pinned", b"pinned too", b"oldest", b"old")
    assert all(setup.primary.pin(key) is not None for key in (b"pinned", b"pinned too"))
    assert setup.stack.acquire("request", [B, A]) is Refusal.NO_ROOM
    assert setup.primary.num_keys == 4, "the first chunk found no room"
    assert setup.stack.acquire("request", [A, B, C]) is Refusal.TOO_LARGE, "the lease as a whole is too large"
    assert setup.secondary.invalidate(C)
    assert setup.stack.acquire("request", [A, B]) is Refusal.NO_ROOM
    assert setup.primary.lookup(b"oldest") is LookupResult.MISS, "the first chunk took its place"
    assert setup.primary.lookup(b"old") is LookupResult.HIT


def test_promotions_beyond_the_share_are_refused_while_others_move() -> None:
    setup = Stack(promoting_share=0.25)
    setup.put_secondary(A, B, C)
    setup.lease(A, B)
    assert setup.stack.acquire("another", [C]) is Refusal.BUSY
    setup.end(setup.moves(Direction.PROMOTE))
    assert isinstance(setup.stack.acquire("another", [C]), PromotionLease)


def test_a_lease_times_out_and_its_late_chunk_still_arrives() -> None:
    setup = Stack(load_timeout_s=30.0)
    setup.put_secondary(A)
    lease = setup.lease(A)
    (move,) = setup.moves(Direction.PROMOTE)
    setup.clock.now_s += 29
    setup.stack.tick()
    assert lease.failure is None and setup.stack.has_live_moves()
    setup.clock.now_s += 1
    setup.stack.tick()
    assert lease.failure is LeaseFailure.TIMEOUT
    setup.stack.tick()
    assert not setup.stack.has_live_moves()
    # The space stays reserved, because the medium may still write to it.
    slots = [setup.primary.reserve(bytes([number]), CHUNK) for number in range(7)]
    assert all(isinstance(slot, Slot) for slot in slots)
    assert move.primary not in slots
    setup.end([move])
    assert setup.primary.lookup(A) is LookupResult.HIT


@pytest.mark.parametrize("reason", [FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.IO])
def test_a_chunk_that_cannot_be_read_is_never_found_again(reason: FailureReason) -> None:
    setup = Stack()
    setup.put_secondary(A, B)
    lease = setup.lease(A, B)
    first, second = setup.moves(Direction.PROMOTE)
    setup.end([first], Failure(reason))
    assert lease.failure is LeaseFailure.LOST
    setup.end([second])
    assert setup.stack.lookup(A) is LookupResult.MISS and setup.stack.lookup(B) is LookupResult.HIT


def test_a_ready_lease_fails_when_one_of_its_chunks_is_withdrawn() -> None:
    """A load that begins then could not pin it."""
    setup = Stack()
    setup.put_secondary(A, B)
    setup.lease(A, B)
    setup.end(setup.moves(Direction.PROMOTE))
    lease = setup.stack.lease("request")
    assert lease is not None and lease.is_ready
    setup.stack.invalidate_primary(B)
    assert setup.stack.pin_all([A, B]) is None
    lease = setup.stack.lease("request")
    assert lease is not None and lease.failure is LeaseFailure.LOST
    assert setup.stack.lookup(A) is LookupResult.HIT


def test_a_busy_medium_costs_no_chunk() -> None:
    setup = Stack()
    setup.put_secondary(A)
    lease = setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.BUSY))
    assert lease.failure is LeaseFailure.LOST and setup.stack.lookup(A) is LookupResult.HIT


def test_a_stored_chunk_cascades_once() -> None:
    setup = Stack()
    setup.store(A)
    (move,) = setup.moves(Direction.CASCADE)
    assert setup.primary.pin(A) is not None and setup.secondary.lookup(A) is LookupResult.PENDING
    setup.end([move])
    assert setup.secondary.lookup(A) is LookupResult.HIT
    setup.stack.cascade(A)
    assert setup.stack.take_moves() == []


def test_a_cascading_chunk_is_not_evicted_before_it_is_read() -> None:
    setup = Stack(primary_chunks=1)
    setup.store(A)
    moves = setup.moves(Direction.CASCADE)
    assert setup.stack.reserve(B, CHUNK) is Refusal.NO_ROOM
    setup.end(moves)
    assert isinstance(setup.stack.reserve(B, CHUNK), Slot)


def test_a_full_cascade_queue_waits_and_loses_nothing() -> None:
    setup = Stack(cascading_share=0.25)
    setup.store(A, B, C)
    first = setup.moves(Direction.CASCADE)
    assert len(first) == 2 and setup.stack.num_waiting("disk") == 1
    setup.end(first)
    (second,) = setup.moves(Direction.CASCADE)
    assert second.key == C and setup.stack.num_waiting("disk") == 0
    setup.end([second])
    assert setup.stack.take_counts().moves.cascades == {"done": 3}


def test_a_failed_cascade_leaves_the_primary_tier_as_it_was() -> None:
    setup = Stack()
    setup.store(A)
    setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.IO, "no space"))
    assert setup.primary.lookup(A) is LookupResult.HIT and setup.secondary.lookup(A) is LookupResult.MISS


def test_a_chunk_changed_in_the_primary_tier_is_withdrawn_from_both() -> None:
    setup = Stack()
    setup.store(A)
    setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.CHECKSUM))
    assert setup.stack.lookup(A) is LookupResult.MISS


def test_a_reset_fails_leases_and_hides_moving_chunks() -> None:
    setup = Stack()
    setup.put_secondary(A)
    lease = setup.lease(A)
    setup.store(B)
    moves = setup.stack.take_moves()
    setup.stack.clear()
    assert lease.failure is LeaseFailure.LOST
    setup.end(moves)
    assert [setup.stack.lookup(key) for key in (A, B)] == [LookupResult.MISS] * 2
    assert setup.primary.used_bytes == 0 and setup.secondary.used_bytes == 0


def test_an_open_breaker_hides_a_dead_tier_until_its_backoff_ends() -> None:
    setup = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=2, first_backoff_s=5.0, max_backoff_s=8.0))
    setup.put_secondary(A, B, C)
    generation = setup.stack.generation
    for key in (A, B):
        setup.stack.acquire(key.hex(), [key])
    setup.stack.take_moves()
    setup.clock.now_s += 30
    setup.stack.tick()
    setup.stack.tick()
    assert (
        setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
        and setup.stack.generation != generation
    )
    assert (
        setup.stack.lookup(C) is LookupResult.MISS
        and setup.stack.leading([C]) == 0
        and setup.stack.last_held([C]) is None
    )
    setup.clock.now_s += 5
    setup.stack.tick()
    assert (
        setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
        and setup.stack.lookup(C) is LookupResult.HIT
    )


def test_a_stalled_caller_does_not_open_the_breaker() -> None:
    setup = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=1))
    setup.put_secondary(A)
    lease = setup.lease(A)
    moves = setup.moves(Direction.PROMOTE)
    setup.clock.now_s += 300
    setup.stack.tick()
    setup.end(moves)
    setup.stack.tick()
    assert lease.failure is LeaseFailure.TIMEOUT and setup.primary.lookup(A) is LookupResult.HIT
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def late_stack(*keys: bytes, **options: object) -> tuple[Stack, list[TierMove]]:
    """Stack with a secondary tier that has not answered in time, and its late moves."""
    setup = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=1, first_backoff_s=5.0), **options)
    setup.put_secondary(*keys)
    setup.lease(*keys)
    moves = setup.moves(Direction.PROMOTE)
    setup.clock.now_s += 30
    setup.stack.tick()
    setup.stack.tick()
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
    setup.stack.release("request")
    setup.clock.now_s += 5
    setup.stack.tick()
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
    return setup, moves


def test_a_chunk_read_too_late_is_a_miss_until_it_arrives() -> None:
    setup, moves = late_stack(B)
    setup.put_primary(A)
    setup.put_secondary(C)
    assert [setup.stack.lookup(key) for key in (A, B, C)] == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    assert (
        setup.stack.leading([A, B, C]) == 1
        and setup.stack.last_held([A, B]) == 0
        and setup.stack.last_held([B]) is None
    )
    assert not setup.stack.any_pending([A, B])
    assert setup.stack.acquire("another", [A, B]) is Refusal.PRESENT
    assert setup.primary.invalidate(A) and setup.primary.lookup(A) is LookupResult.MISS
    setup.put_primary(A)  # refused while a pin is left
    generation = setup.stack.generation
    setup.end(moves)
    assert setup.stack.lookup(B) is LookupResult.HIT and setup.stack.leading([A, B, C]) == 3
    assert setup.stack.generation != generation


def test_a_read_that_never_ends_does_not_block_the_probe() -> None:
    setup, _ = late_stack(A)
    setup.put_secondary(B)
    setup.lease(B)
    setup.end(setup.moves(Direction.PROMOTE))
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def test_a_probe_in_flight_is_the_only_promotion() -> None:
    setup = probing()
    setup.put_secondary(C)
    setup.lease(B)
    (probe,) = setup.moves(Direction.PROMOTE)
    assert (
        setup.stack.lookup(C) is LookupResult.MISS
        and setup.stack.leading([C]) == 0
        and setup.stack.last_held([C]) is None
    )
    assert setup.stack.acquire("another", [C]) is Refusal.PRESENT
    generation = setup.stack.generation
    setup.end([probe])
    assert setup.stack.lookup(C) is LookupResult.HIT and setup.stack.generation != generation


def test_promotions_that_never_end_take_only_their_share() -> None:
    setup, moves = late_stack(A, B, C, promoting_share=0.25)
    setup.put_secondary(b"d")
    assert setup.stack.lookup(b"d") is LookupResult.MISS and setup.stack.acquire("another", [b"d"]) is Refusal.PRESENT
    setup.end(moves[:1])
    assert setup.stack.lookup(b"d") is LookupResult.HIT and isinstance(
        setup.stack.acquire("another", [b"d"]), PromotionLease
    )


def test_a_deadline_counts_from_the_start_of_the_wait() -> None:
    setup = Stack(load_timeout_s=30.0)
    setup.put_secondary(A)
    lease = setup.stack.acquire("request", [A], setup.clock.now_s - 29)
    assert isinstance(lease, PromotionLease)
    setup.clock.now_s += 1
    setup.stack.tick()
    assert lease.failure is LeaseFailure.TIMEOUT


def test_the_secondary_tier_gets_the_reason_of_a_withdrawal(tmp_path: Path) -> None:
    secondary = disk_store.make_index(tmp_path / "store", disk_store.options_for(1 << 16))
    slot = secondary.reserve(A, CHUNK)
    assert isinstance(slot, Slot) and secondary.commit(A)
    stack = TierStack(RamIndex(8 * CHUNK, CHUNK), [SecondaryTier("disk", secondary)], 1, Clock())
    assert isinstance(stack.acquire("request", [A]), PromotionLease)
    (move,) = stack.take_moves()
    stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.CHECKSUM)))
    assert secondary.take_disk_counts().quarantined == {"checksum": 1}
    stack.close()


def probing() -> Stack:
    setup = Stack(breaker=BreakerOptions(failures=1, first_backoff_s=5.0, max_backoff_s=8.0))
    setup.put_secondary(A, B)
    setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    setup.clock.now_s += 5
    setup.stack.tick()
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING
    return setup


def test_a_probe_that_succeeds_closes_the_breaker() -> None:
    setup = probing()
    setup.lease(B)
    setup.end(setup.moves(Direction.PROMOTE))
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED


def test_a_failed_probe_doubles_the_backoff_within_a_bound() -> None:
    setup = probing()
    for pause_s in (8, 8):
        setup.put_secondary(B) if setup.secondary.lookup(B) is LookupResult.MISS else None
        setup.lease(B)
        setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.IO))
        assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
        setup.clock.now_s += pause_s - 1
        setup.stack.tick()
        assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
        setup.clock.now_s += 1
        setup.stack.tick()
        assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.PROBING


def failing_stores(*keys: bytes) -> Stack:
    """Stack with a breaker for stores that is open after failed stores."""
    setup = Stack(breaker=BreakerOptions(failures=2, first_backoff_s=5.0))
    setup.put_secondary(*keys)
    for key in (b"x", b"y"):
        setup.store(key)
        setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.IO, "segment 0: EROFS"))
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    return setup


def test_failed_stores_do_not_block_loads() -> None:
    setup = failing_stores(A, B, C)
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED
    assert setup.stack.leading([A, B, C]) == 3
    lease = setup.lease(A, B, C)
    setup.end(setup.moves(Direction.PROMOTE))
    assert lease.is_ready
    setup.store(b"z")
    assert setup.stack.take_moves() == [] and setup.stack.take_counts().moves.cascades == {
        "failed": 2,
        "dropped_open": 1,
    }


def test_failed_loads_do_not_block_stores() -> None:
    setup = Stack(breaker=BreakerOptions(failures=2, first_backoff_s=5.0))
    setup.put_secondary(A, B, C)
    for key in (A, B):
        setup.lease(key)
        setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    assert setup.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
    assert setup.stack.lookup(C) is LookupResult.MISS
    setup.store(b"d")
    setup.end(setup.moves(Direction.CASCADE))
    assert setup.secondary.lookup(b"d") is LookupResult.HIT
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED


def test_a_successful_load_does_not_close_the_breaker_of_stores() -> None:
    setup = failing_stores(A)
    setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE))
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    setup.clock.now_s += 5
    setup.stack.tick()
    setup.lease(A)
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.PROBING


def test_stores_are_probed_one_at_a_time() -> None:
    setup = failing_stores()
    setup.clock.now_s += 5
    setup.stack.tick()
    setup.store(A, B)
    [probe] = setup.moves(Direction.CASCADE)
    assert probe.key == A and setup.stack.num_waiting("disk") == 1
    setup.end([probe])
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED
    setup.store(C)
    assert [move.key for move in setup.moves(Direction.CASCADE)] == [B, C]


def test_late_stores_block_neither_loads_nor_the_next_probe() -> None:
    setup = Stack(load_timeout_s=30.0, breaker=BreakerOptions(failures=1, first_backoff_s=5.0))
    setup.put_secondary(A)
    setup.store(B)
    [stuck] = setup.moves(Direction.CASCADE)
    setup.clock.now_s += 30
    setup.stack.tick()
    setup.stack.tick()
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    assert setup.stack.lookup(A) is LookupResult.HIT and not setup.stack.has_live_moves()
    setup.clock.now_s += 5
    setup.stack.tick()
    setup.store(C)
    setup.end(setup.moves(Direction.CASCADE))
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED
    setup.end([stuck])
    assert setup.secondary.lookup(B) is LookupResult.HIT


def test_breaker_openings_are_counted_by_direction() -> None:
    setup = failing_stores(A, B)
    assert setup.stack.take_counts().moves.breaker_openings == {"cascade": 1}
    for key in (A, B):
        setup.lease(key)
        setup.end(setup.moves(Direction.PROMOTE), Failure(FailureReason.IO))
    assert setup.stack.take_counts().moves.breaker_openings == {"promote": 1}
    assert setup.stack.take_counts().moves.breaker_openings == {}


def test_a_breaker_of_stores_does_not_change_the_generation() -> None:
    setup = Stack(breaker=BreakerOptions(failures=1))
    setup.store(A)
    [move] = setup.moves(Direction.CASCADE)
    before = setup.stack.generation - setup.primary.generation - setup.secondary.generation
    setup.end([move], Failure(FailureReason.IO))
    assert setup.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.OPEN
    assert setup.stack.generation - setup.primary.generation - setup.secondary.generation == before


def test_counts_cover_the_moves_since_the_last_call() -> None:
    setup = Stack()
    setup.put_secondary(A)
    setup.lease(A)
    setup.end(setup.moves(Direction.PROMOTE))
    setup.store(B)
    setup.end(setup.moves(Direction.CASCADE), Failure(FailureReason.IO))
    counts = setup.stack.take_counts().moves
    assert counts.promotions == {"done": 1} and counts.promoted_bytes == CHUNK
    assert counts.cascades == {"failed": 1} and counts.cascaded_bytes == 0 and counts.failures == {"io": 1}
    assert setup.stack.take_counts().moves.promotions == {}


def test_invalid_options_of_tiers_and_breakers_are_refused() -> None:
    for make in (
        lambda: SecondaryTierOptions(load_timeout_s=0),
        lambda: SecondaryTierOptions(promoting_share=0),
        lambda: SecondaryTierOptions(cascading_share=1.5),
        lambda: BreakerOptions(failures=0),
        lambda: BreakerOptions(first_backoff_s=9, max_backoff_s=8),
    ):
        with pytest.raises(TierConfigurationError):
            make()
