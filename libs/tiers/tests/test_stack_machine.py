"""State machine of a tier stack: in any order of events a found key has its own bytes, and no space is lost."""

from __future__ import annotations

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybridkv.planner import LookupResult
from hybridkv.tiers import Failure, FailureReason, Key, Slot, TierIndex
from hybridkv.tiers.ram import RamIndex
from hybridkv.tiers.stack import (
    BreakerOptions,
    Direction,
    MoveOutcome,
    PromotionLease,
    SecondaryTier,
    SecondaryTierOptions,
    TierMove,
    TierStack,
)

CHUNK = 16
NUM_RANKS = 2
PREFETCHED = 2
"""Chunks of the primary tier that may be prefetched and unused."""
HIT = LookupResult.HIT
keys = st.sampled_from([bytes([number]) for number in range(6)])
owners = st.sampled_from(["first", "second"])
reasons = st.sampled_from([None, None, None, FailureReason.IO, FailureReason.CHECKSUM, FailureReason.BUSY])


class StackMachine(RuleBasedStateMachine):
    """Two ranks with media that end each move independently."""

    num_slower = 1

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.primary = RamIndex(4 * CHUNK, CHUNK)
        self.secondary = RamIndex(5 * CHUNK, CHUNK)
        options = SecondaryTierOptions(
            load_timeout_s=10.0,
            promoting_share=1.0,
            cascading_share=0.5,
            arriving_share=0.5,
            breaker=BreakerOptions(failures=2, first_backoff_s=5.0, max_backoff_s=20.0),
        )
        self.farthest = RamIndex(6 * CHUNK, CHUNK)
        below = [SecondaryTier("disk", self.secondary, options), SecondaryTier("peer", self.farthest, options)]
        self.stack = TierStack(self.primary, below[: self.num_slower], NUM_RANKS, lambda: self.now_s)
        self.primary_bytes: list[dict[int, Key]] = [{} for _ in range(NUM_RANKS)]
        self.secondary_bytes: dict[str, list[dict[int, Key]]] = {
            tier: [{} for _ in range(NUM_RANKS)] for tier in ("disk", "peer")
        }
        self.moving: list[tuple[int, TierMove]] = []
        self.stored: list[tuple[Key, Slot]] = []
        self.leases: dict[str, PromotionLease] = {}
        self.num_prefetches = 0

    def collect(self) -> None:
        for move in self.stack.take_moves():
            self.moving += [(rank, move) for rank in range(NUM_RANKS)]

    @rule(key=keys)
    def store(self, key: Key) -> None:
        slot = self.stack.reserve(key, CHUNK)
        if isinstance(slot, Slot):
            self.stored.append((key, slot))

    @precondition(lambda self: self.stored)
    @rule(succeeds=st.booleans(), data=st.data())
    def end_store(self, succeeds: bool, data: st.DataObject) -> None:
        key, slot = self.stored.pop(data.draw(st.integers(0, len(self.stored) - 1)))
        for there in self.primary_bytes:
            there[slot.first_offset] = key
        if succeeds:
            self.stack.commit(key)
        else:
            self.stack.abort(key)
        self.collect()

    @rule(owner=owners, wanted=st.lists(keys, min_size=1, max_size=4, unique=True))
    def acquire(self, owner: str, wanted: list[Key]) -> None:
        held = [key for key in wanted if self.stack.lookup(key) is not LookupResult.MISS]
        lease = self.stack.acquire(owner, held)
        self.collect()
        self.leases.pop(owner, None)
        if isinstance(lease, PromotionLease):
            self.leases[owner] = lease

    @rule(wanted=st.lists(keys, min_size=1, max_size=4, unique=True), is_pumped=st.booleans())
    def prefetch(self, wanted: list[Key], is_pumped: bool) -> None:
        pinned = [key for lease in self.leases.values() for key in lease.pinned if self.primary.lookup(key) is HIT]
        self.stack.prefetch(wanted, PREFETCHED * CHUNK)
        self.num_prefetches += 1
        if is_pumped:
            self.collect()
        assert all(self.primary.lookup(key) is HIT for key in pinned)

    @rule(owner=owners)
    def release(self, owner: str) -> None:
        self.stack.release(owner)
        self.leases.pop(owner, None)

    @precondition(lambda self: self.moving)
    @rule(reason=reasons, data=st.data())
    def end_move(self, reason: FailureReason | None, data: st.DataObject) -> None:
        rank, move = self.moving.pop(data.draw(st.integers(0, len(self.moving) - 1)))
        if move.direction is Direction.PROMOTE:
            content = self.secondary_bytes[move.tier][rank].get(move.secondary.first_offset)
            # A medium fails a load of bytes that were not stored, and may have written before it fails.
            self.primary_bytes[rank][move.primary.first_offset] = move.key if reason is None else b"torn"
            assert reason is not None or content == move.key
        else:
            content = self.primary_bytes[rank].get(move.primary.first_offset)
            self.secondary_bytes[move.tier][rank][move.secondary.first_offset] = move.key if reason is None else b"torn"
            assert content == move.key
        self.stack.on_move(move.move_id, MoveOutcome(1, None if reason is None else Failure(reason)))
        self.collect()

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]), is_told=st.booleans())
    def pass_time(self, seconds: float, is_told: bool) -> None:
        self.now_s += seconds
        if is_told:
            self.stack.tick()

    @rule(key=keys)
    def invalidate(self, key: Key) -> None:
        self.stack.invalidate(key)

    @rule(wanted=st.lists(keys, max_size=3))
    def touch(self, wanted: list[Key]) -> None:
        self.stack.touch(wanted)
        for key in wanted:
            self.stack.cascade(key)
        self.collect()

    @rule()
    def clear(self) -> None:
        self.stack.clear()

    @invariant()
    def found_keys_have_their_own_bytes_on_every_rank(self) -> None:
        for index, places in (
            (self.primary, self.primary_bytes),
            (self.secondary, self.secondary_bytes["disk"]),
            (self.farthest, self.secondary_bytes["peer"]),
        ):
            for number in range(6):
                key = bytes([number])
                slot = index.pin(key)
                if slot is not None:
                    index.unpin(key)
                    assert all(there[slot.first_offset] == key for there in places)

    @invariant()
    def ready_leases_have_all_their_chunks_in_the_primary_tier(self) -> None:
        for lease in self.leases.values():
            if lease.is_ready:
                assert all(self.primary.pin(key) is not None or self.is_deleted(key) for key in lease.pinned)
                for key in lease.pinned:
                    if self.primary.lookup(key) is LookupResult.HIT:
                        self.primary.unpin(key)

    def is_deleted(self, key: Key) -> bool:
        """Withdrawn during the lease: its bytes stay, and new lookups miss."""
        return self.primary.lookup(key) is LookupResult.MISS

    @invariant()
    def every_wait_ends(self) -> None:
        for owner in self.leases:
            lease = self.stack.lease(owner)
            assert lease is not None and (not lease.waiting or self.now_s - lease.since_s < 10.0)

    @invariant()
    def unused_prefetches_stay_within_their_bound(self) -> None:
        unused = self.stack._prefetches._unused
        assert self.stack._prefetches._unused_cost == len(unused) * CHUNK <= PREFETCHED * CHUNK

    @invariant()
    def prefetches_in_flight_are_accounted(self) -> None:
        moving = self.stack._prefetches._moving
        assert all(tier.in_flight.num_prefetching >= 0 for tier in self.stack._tiers)
        assert sum(tier.in_flight.prefetching_bytes for tier in self.stack._tiers) <= len(moving) * CHUNK

    def teardown(self) -> None:
        for key, _ in self.stored:
            self.stack.abort(key)
        for owner in list(self.leases):
            self.stack.release(owner)
        self.collect()
        self.stack.clear()
        while self.moving:
            _, move = self.moving.pop()
            self.stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.CLOSED)))
        assert [space.used_bytes for space in self.tiers()] == [0, 0, 0]
        assert sum(self.stack.take_counts().prefetches.values()) == self.num_prefetches, "each ends once"
        assert not self.stack._prefetches._moving and not self.stack._prefetches._unused
        assert [tier.in_flight.prefetching_bytes for tier in self.stack._tiers] == [0] * self.num_slower

    def tiers(self) -> list[TierIndex]:
        return [self.primary, self.secondary, self.farthest]


class DeepStackMachine(StackMachine):
    """Over two secondary tiers."""

    num_slower = 2


TestStackMachine = StackMachine.TestCase
TestDeepStackMachine = DeepStackMachine.TestCase
TestDeepStackMachine.settings = settings(max_examples=examples(150, 8), stateful_step_count=40, deadline=None)
TestStackMachine.settings = settings(max_examples=examples(150, 8), stateful_step_count=40, deadline=None)
