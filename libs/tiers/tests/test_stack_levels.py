"""Stack of three tiers: each chunk comes from the first tier that holds it, and a failing tier does not affect
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import pytest

from hybridkv.planner import LookupResult
from hybridkv.tiers import Completion, Failure, FailureReason, Key, Slot, Ticket, TierConfigurationError
from hybridkv.tiers.ram import RamArena, RamIndex
from hybridkv.tiers.stack import (
    BreakerOptions,
    BreakerState,
    CascadePolicy,
    Direction,
    LeaseFailure,
    MoveOutcome,
    PromotionLease,
    SecondaryTier,
    SecondaryTierOptions,
    TierMove,
    TierMover,
    TierStack,
)
from kits.tiers.reference import RemoteIndex, RemoteMedium, RemoteStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK = 16
A, B, C = b"a", b"b", b"c"
READ_ONLY = SecondaryTierOptions(cascades=CascadePolicy.NOTHING)
WIDE = SecondaryTierOptions(promoting_share=1.0, cascading_share=1.0, arriving_share=1.0)


class ThreeTiers:
    """Host memory, a disk and a peer, all of them in memory."""

    def __init__(self, disk: SecondaryTierOptions = WIDE, peer: SecondaryTierOptions = WIDE) -> None:
        self.now_s = 100.0
        self.primary, self.disk, self.peer = (RamIndex(chunks * CHUNK, CHUNK) for chunks in (8, 16, 32))
        below = [SecondaryTier("disk", self.disk, disk), SecondaryTier("peer", self.peer, peer)]
        self.stack = TierStack(self.primary, below, 1, lambda: self.now_s)

    def lease(self, *keys: Key) -> PromotionLease:
        lease = self.stack.acquire("request", keys)
        assert isinstance(lease, PromotionLease)
        return lease

    def store(self, *keys: Key) -> None:
        for key in keys:
            assert isinstance(self.stack.reserve(key, CHUNK), Slot)
            assert self.stack.commit(key)

    def moves(self) -> list[TierMove]:
        return self.stack.take_moves()

    def end(self, moves: list[TierMove], failure: Failure | None = None) -> None:
        for move in moves:
            self.stack.on_move(move.move_id, MoveOutcome(1, failure))

    def open_breaker(self, tier: str, index: RamIndex) -> None:
        """Fail promotions from the tier until its breaker opens."""
        for number in range(BreakerOptions().failures):
            key = b"bad %d" % number
            put(index, key)
            self.lease(key)
            self.end(self.moves(), Failure(FailureReason.IO))
        assert self.stack.breaker_state(Direction.PROMOTE, tier) is BreakerState.OPEN


def put(index: RamIndex, *keys: Key) -> None:
    for key in keys:
        assert isinstance(index.reserve(key, CHUNK), Slot)
        assert index.commit(key)


def tiers_of(moves: list[TierMove]) -> list[tuple[Key, str]]:
    return [(move.key, move.tier) for move in moves]


def test_each_chunk_is_promoted_from_the_first_tier_that_holds_it() -> None:
    setup = ThreeTiers()
    put(setup.disk, A, B)
    put(setup.peer, B, C)
    lease = setup.lease(A, B, C)
    moves = setup.moves()
    assert tiers_of(moves) == [(A, "disk"), (B, "disk"), (C, "peer")] and lease.source == "peer"
    setup.end(moves)
    assert lease.is_ready and setup.primary.leading([A, B, C]) == 3


def test_a_tier_with_an_open_breaker_is_skipped() -> None:
    setup = ThreeTiers()
    setup.open_breaker("disk", setup.disk)
    put(setup.disk, A, B)
    put(setup.peer, B)
    assert setup.stack.lookup(A) is LookupResult.MISS and setup.stack.lookup(B) is LookupResult.HIT
    setup.lease(B)
    assert tiers_of(setup.moves()) == [(B, "peer")]


def test_a_prefix_is_found_over_all_tiers_at_once() -> None:
    setup = ThreeTiers()
    put(setup.primary, A)
    put(setup.peer, B)
    put(setup.disk, C)
    assert setup.stack.leading([A, B, C]) == 3 and setup.stack.last_held([A, b"x", B, b"y"]) == 2
    assert setup.stack.leading([C, b"x"]) == 1 and setup.stack.last_held([b"x"]) is None


def test_a_lease_is_all_or_nothing_over_all_tiers() -> None:
    setup = ThreeTiers()
    put(setup.disk, A)
    put(setup.peer, B)
    assert setup.stack.acquire("request", [A, B, C]) == "present"
    assert setup.moves() == [] and setup.primary.used_bytes == 0
    for index, key in ((setup.disk, A), (setup.peer, B)):
        index.invalidate(key)
        assert index.used_bytes == 0, "nothing has it pinned"


def test_a_lease_refused_by_one_tier_promotes_from_none() -> None:
    setup = ThreeTiers(disk=SecondaryTierOptions(promoting_share=0.25), peer=SecondaryTierOptions(promoting_share=0.25))
    put(setup.disk, A, B, b"d")
    put(setup.peer, C)
    assert isinstance(setup.stack.acquire("first", [A]), PromotionLease)
    assert isinstance(setup.stack.acquire("second", [C]), PromotionLease)
    moves = setup.moves()
    # The disk has used up its share, and the peer has not.
    put(setup.peer, b"e")
    assert setup.stack.acquire("third", [B, b"d", b"e"]) == "busy" and setup.moves() == []
    setup.end(moves)
    setup.stack.clear()
    assert (setup.disk.used_bytes, setup.peer.used_bytes) == (0, 0), "nothing has it pinned"


def test_a_stored_chunk_cascades_to_every_tier_that_accepts_stores() -> None:
    setup = ThreeTiers(peer=READ_ONLY)
    setup.store(A)
    assert tiers_of(setup.moves()) == [(A, "disk")]
    setup = ThreeTiers()
    setup.store(A)
    moves = setup.moves()
    assert tiers_of(moves) == [(A, "disk"), (A, "peer")]
    setup.end(moves)
    assert setup.disk.lookup(A) is setup.peer.lookup(A) is LookupResult.HIT


def test_a_promoted_chunk_cascades_when_a_caller_asks_for_it() -> None:
    setup = ThreeTiers()
    put(setup.peer, A)
    setup.lease(A)
    setup.end(setup.moves())
    assert setup.moves() == [], "a promotion alone does not cascade"
    setup.stack.cascade(A)
    assert tiers_of(setup.moves()) == [(A, "disk")]


def test_a_tier_for_reused_chunks_gets_nothing_at_the_first_use() -> None:
    setup = ThreeTiers(peer=SecondaryTierOptions(cascades=CascadePolicy.REUSED))
    setup.stack.reserve(A, CHUNK)
    assert setup.stack.commit(A)
    setup.stack.cascade(A, is_reuse=False)
    assert tiers_of(setup.moves()) == [(A, "disk")]
    assert setup.stack.missing_in_cascading(A) and setup.stack.in_all_eager_secondaries([A]), (
        "nothing else is to be copied at the end of a path"
    )
    setup.stack.cascade(A)
    assert tiers_of(setup.moves()) == [(A, "peer")]


def test_a_chunk_lost_by_one_tier_comes_from_another() -> None:
    setup = ThreeTiers()
    put(setup.disk, A)
    put(setup.peer, A)
    lease = setup.lease(A)
    setup.end(setup.moves(), Failure(FailureReason.CHECKSUM))
    assert lease.failure is LeaseFailure.LOST and setup.disk.lookup(A) is LookupResult.MISS
    lease = setup.lease(A)
    moves = setup.moves()
    assert tiers_of(moves) == [(A, "peer")]
    setup.end(moves)
    assert lease.is_ready


def test_failures_of_one_tier_do_not_block_another() -> None:
    setup = ThreeTiers()
    setup.open_breaker("disk", setup.disk)
    assert setup.stack.breaker_state(Direction.PROMOTE, "peer") is BreakerState.CLOSED
    assert setup.stack.take_counts().tiers["disk"].breaker_openings == {"promote": 1}


def test_a_lease_over_two_tiers_keeps_the_timeout_of_each() -> None:
    setup = ThreeTiers(peer=SecondaryTierOptions(load_timeout_s=2.0))
    put(setup.disk, A)
    put(setup.peer, B)
    disk_lease = setup.stack.acquire("other", [A])
    setup.now_s += 1.0
    lease = setup.lease(A, B)
    setup.moves()
    setup.now_s += 2.5
    setup.stack.tick()
    setup.stack.tick()
    assert lease.failure is LeaseFailure.TIMEOUT
    assert isinstance(disk_lease, PromotionLease) and disk_lease.failure is None
    setup.now_s = 100.0 + SecondaryTierOptions().load_timeout_s
    assert setup.stack.lease("other") is disk_lease and disk_lease.failure is LeaseFailure.TIMEOUT


def test_a_lease_on_chunks_in_flight_has_the_source_of_their_promotion() -> None:
    setup = ThreeTiers()
    put(setup.disk, A)
    put(setup.peer, B)
    setup.lease(B)
    assert isinstance(setup.stack.reserve(C, CHUNK), Slot)
    sources = {}
    for keys in ([A], [B], [A, B], [B, C], [C]):
        lease = setup.stack.acquire("other", keys)
        assert isinstance(lease, PromotionLease)
        sources[b"".join(keys)] = lease.source
    assert sources == {A: "disk", B: "peer", A + B: "peer", B + C: "peer", C: "disk"}
    setup.end(setup.moves())
    lease = setup.lease(A, B)
    assert lease.is_ready and lease.source == "disk", "it waited for no tier"


def test_a_chunk_queued_after_a_promoted_one_cascades_after_it() -> None:
    setup = ThreeTiers(peer=READ_ONLY)
    put(setup.peer, A)
    setup.lease(A)
    promoted = setup.moves()
    setup.stack.reserve(B, CHUNK)
    assert setup.stack.commit(B, (A,))
    assert setup.moves() == [] and setup.stack.num_waiting("disk") == 1
    setup.stack.cascade(A)
    setup.end(promoted)
    setup.stack.cascade(A)
    assert setup.stack.num_waiting("disk") <= 2
    setup.moves()
    assert setup.stack.num_waiting("disk") == 0, "nothing is parked for ever"


class AsyncBench:
    """Stack over two remote stores, each with its own answers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stores = [RemoteStore(1, lambda: self.now_s, answer_s=0.5) for _ in range(2)]
        self.primary = RamIndex(8 * CHUNK, CHUNK)
        self.peer, self.object = (RemoteIndex(world, 64 * CHUNK) for world in self.stores)
        below = [SecondaryTier("peer", self.peer, READ_ONLY), SecondaryTier("object", self.object, READ_ONLY)]
        self.stack = TierStack(self.primary, below, 1, lambda: self.now_s)


def test_each_async_tier_is_asked() -> None:
    setup = AsyncBench()
    setup.stores[1].lie(A, CHUNK)
    setup.peer.start_lookup([B], 9.0)
    setup.stack.start_lookup([A, B])
    assert [world.num_lookups for world in setup.stores] == [2, 2], (
        "an earlier lookup of one tier does not count for the other"
    )
    setup.now_s = 0.5
    assert (setup.stack.lookup(A), setup.stack.lookup(B)) == (LookupResult.HIT, LookupResult.MISS)


def test_a_repeated_lookup_keeps_its_first_deadline() -> None:
    setup = AsyncBench()
    for world in setup.stores:
        world.is_silent = True
    for quarter in range(4):
        setup.now_s = quarter / 4
        setup.stack.start_lookup([A])
        assert setup.stack.lookup(A) is LookupResult.PENDING
    setup.now_s = setup.stack.lookup_wait_s
    assert setup.stack.lookup(A) is LookupResult.MISS


def test_a_late_promotion_changes_the_generation() -> None:
    setup = ThreeTiers()
    put(setup.disk, A)
    setup.lease(A)
    setup.moves()
    seen = [setup.stack.generation]
    setup.now_s += SecondaryTierOptions().load_timeout_s
    setup.stack.tick()
    setup.stack.tick()
    assert setup.stack.lookup(A) is LookupResult.MISS
    seen.append(setup.stack.generation)
    assert seen[0] != seen[1], "a caller with a PENDING answer must look again"


def test_a_late_lease_is_counted_once_and_the_stack_becomes_idle() -> None:
    setup = ThreeTiers(peer=SecondaryTierOptions(load_timeout_s=2.0))
    put(setup.peer, A)
    setup.lease(A)
    setup.moves()
    assert setup.stack.has_live_moves()
    setup.now_s += 2.0
    setup.stack.tick()
    setup.stack.tick()
    assert setup.stack.take_counts().timeouts == 1 and not setup.stack.has_live_moves()


def test_a_tier_that_raises_on_lookups_opens_its_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = AsyncBench()

    def start_lookup(keys: Iterable[Key], deadline_s: float) -> None:
        raise OSError("no route")

    monkeypatch.setattr(setup.peer, "start_lookup", start_lookup)
    for _ in range(BreakerOptions().failures):
        setup.stack.start_lookup([A])
        assert setup.stack.lookup(A) is LookupResult.PENDING, "the other tier was asked"
    assert setup.stack.breaker_state(Direction.PROMOTE, "peer") is BreakerState.OPEN
    assert setup.stack.breaker_state(Direction.PROMOTE, "object") is BreakerState.CLOSED
    setup.now_s = BreakerOptions().first_backoff_s
    assert setup.stack.breaker_state(Direction.PROMOTE, "peer") is BreakerState.PROBING


def test_pending_lookups_and_pending_stores_are_distinguished() -> None:
    setup = AsyncBench()
    assert isinstance(setup.stack.reserve(A, CHUNK), Slot)
    assert isinstance(setup.peer.reserve(C, CHUNK), Slot)
    setup.stack.start_lookup([A, B, C])
    assert [setup.stack.lookup(key) for key in (A, B, C)] == [LookupResult.PENDING] * 3
    assert [setup.stack.is_lookup_pending(key) for key in (A, B, C, b"x")] == [False, True, False, False]
    setup.object.start_lookup([C], 9.0)
    assert not setup.stack.is_lookup_pending(C), "one tier has a lookup in flight, and the other a store"


def test_the_lookup_timeout_is_bounded_by_the_load_timeout() -> None:
    world = RemoteStore(1, lambda: 0.0, answer_s=9.0)
    options = SecondaryTierOptions(load_timeout_s=0.5)
    stack = TierStack(
        RamIndex(CHUNK, CHUNK), [SecondaryTier("peer", RemoteIndex(world, CHUNK), options)], 1, lambda: 0.0
    )
    assert stack.lookup_wait_s == 0.5


class Raising(RemoteMedium):
    """Medium that raises instead of reporting failures."""

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        raise OSError("load")

    def poll(self) -> list[Completion]:
        raise OSError("poll")

    def drain(self, timeout_s: float) -> bool:
        raise OSError("drain")


class Twice(RemoteMedium):
    """Medium that reports each completion twice."""

    def poll(self) -> list[Completion]:
        return super().poll() * 2


def test_a_medium_that_raises_costs_only_its_own_moves() -> None:
    world = RemoteStore(1, lambda: 0.0)
    arena = RamArena(1 << 16, 4096)
    media = {"disk": Raising(world, 0), "peer": Twice(world, 0)}
    mover = TierMover(arena, media, lambda: 0.0)
    primary = Slot(((0, CHUNK),))
    assert arena.seal_all([(A, primary)]) == [None]
    secondary = world.allocate(CHUNK)
    mover.start([TierMove(0, Direction.CASCADE, "peer", A, primary, secondary)])
    assert [(move.move_id, failure) for move, failure, _ in mover.poll()] == [(0, None)]
    mover.start([TierMove(2, Direction.PROMOTE, "disk", A, Slot(((4096, CHUNK),)), secondary)])
    mover.start([TierMove(4, Direction.PROMOTE, "peer", A, Slot(((8192, CHUNK),)), secondary)])
    assert [(move.move_id, failure) for move, failure, _ in mover.poll()] == [(4, None)]
    assert not mover.close(1.0)
    for medium in media.values():
        RemoteMedium.load(medium, Ticket(6), A, secondary, [bytearray(CHUNK)])
        completion = RemoteMedium.poll(medium)[-1]
        assert completion.failure is not None and completion.failure.reason is FailureReason.CLOSED


def test_two_tiers_with_one_name_are_refused() -> None:
    index = RamIndex(CHUNK, CHUNK)
    with pytest.raises(TierConfigurationError):
        TierStack(index, [SecondaryTier("disk", index), SecondaryTier("disk", index)], 1, lambda: 0.0)


def test_an_async_tier_is_asked_only_for_missing_keys_and_still_gets_stores() -> None:
    now_s = 0.0
    world = RemoteStore(1, lambda: now_s, answer_s=0.5)
    primary, disk, peer = RamIndex(8 * CHUNK, CHUNK), RamIndex(8 * CHUNK, CHUNK), RemoteIndex(world, 64 * CHUNK)
    below = [SecondaryTier("disk", disk, WIDE), SecondaryTier("peer", peer, WIDE)]
    stack = TierStack(primary, below, 1, lambda: now_s)
    put(disk, A)
    stack.start_lookup([A, B])
    assert world.num_lookups == 1 and stack.lookup_wait_s == 1.0
    assert stack.lookup(A) is LookupResult.HIT and stack.lookup(B) is LookupResult.PENDING
    assert stack.missing_in_cascading(B) and not stack.in_all_eager_secondaries([B])
    assert isinstance(stack.reserve(B, CHUNK), Slot) and stack.commit(B)
    assert tiers_of(stack.take_moves()) == [(B, "disk"), (B, "peer")], "a key that was looked up is still stored"


def test_async_tiers_are_asked_at_once_with_their_own_timeouts() -> None:
    now_s = 0.0
    stores = [RemoteStore(1, lambda: now_s, answer_s) for answer_s in (0.1, 2.0)]
    options = [SecondaryTierOptions(async_lookup_timeout_s=lookup_wait_s) for lookup_wait_s in (0.5, 3.0)]
    indexes = [RemoteIndex(world, 64 * CHUNK) for world in stores]
    below = [SecondaryTier(*each) for each in zip(("peer", "object"), indexes, options, strict=True)]
    stack = TierStack(RamIndex(8 * CHUNK, CHUNK), below, 1, lambda: now_s)
    stores[1].lie(A, CHUNK)
    stack.start_lookup([A, B])
    assert [world.num_lookups for world in stores] == [2, 2] and stack.lookup_wait_s == 3.0
    now_s = 1.0
    assert indexes[0].lookup(A) is LookupResult.MISS and stack.lookup(A) is LookupResult.PENDING
    now_s = 2.5
    assert (stack.lookup(A), stack.lookup(B)) == (LookupResult.HIT, LookupResult.MISS)
    lease = stack.acquire("request", [A])
    assert isinstance(lease, PromotionLease) and tiers_of(stack.take_moves()) == [(A, "object")]


def test_a_late_answer_is_a_miss_until_it_arrives() -> None:
    now_s = 0.0
    world = RemoteStore(1, lambda: now_s, answer_s=1.0)
    world.lie(A, CHUNK)
    peer = SecondaryTier("peer", RemoteIndex(world, 64 * CHUNK), SecondaryTierOptions(async_lookup_timeout_s=0.5))
    stack = TierStack(RamIndex(8 * CHUNK, CHUNK), [peer], 1, lambda: now_s)
    stack.start_lookup([A])
    seen = []
    for now_s in (0.4, 0.6, 1.1):  # noqa: B007 - the stack's clock
        seen.append((stack.lookup(A), stack.generation))
    assert [answer for answer, _ in seen] == [LookupResult.PENDING, LookupResult.MISS, LookupResult.HIT]
    assert len({generation for _, generation in seen}) == 3


def test_a_chunk_queued_after_a_failed_promotion_is_dropped() -> None:
    setup = ThreeTiers(peer=READ_ONLY)
    put(setup.disk, A)
    setup.lease(A)
    promoted = setup.moves()
    setup.stack.reserve(B, CHUNK)
    assert setup.stack.commit(B, (A,)) and setup.stack.num_waiting("disk") == 1
    setup.end(promoted, Failure(FailureReason.CHECKSUM))
    assert setup.stack.num_waiting("disk") == 0, "nothing is left to wait for"
    assert setup.stack.take_counts().tiers["disk"].cascades == {"dropped_orphan": 1}


def test_two_silent_tiers_take_no_more_room_than_one() -> None:
    """Plus one lease per tier, which is not late before its deadline."""
    bounded = SecondaryTierOptions(promoting_share=0.5, load_timeout_s=10.0, breaker=BreakerOptions(failures=99))
    setup = ThreeTiers(bounded, bounded)
    for number in range(8):
        put(setup.disk, b"disk %d" % number)
        put(setup.peer, b"peer %d" % number)

    def wait_in_vain(tier: str, number: int) -> bool:
        key = b"%s %d" % (tier.encode(), number)
        if setup.stack.lookup(key) is LookupResult.MISS:
            return False
        setup.lease(key)
        setup.moves()
        setup.now_s += 10.0
        setup.stack.tick()
        setup.stack.tick()
        return True

    assert [wait_in_vain("disk", number) for number in range(4)] == [True] * 4
    assert wait_in_vain("peer", 0), "a tier without late moves is asked"
    assert not wait_in_vain("peer", 1) and not wait_in_vain("disk", 4)
    assert setup.primary.used_bytes == 5 * CHUNK


def test_a_silent_tier_leaves_the_other_one_load_at_a_time() -> None:
    bounded = SecondaryTierOptions(promoting_share=0.5, load_timeout_s=10.0)
    setup = ThreeTiers(bounded, bounded)
    put(setup.disk, A, B, C)
    put(setup.peer, b"d", b"e", b"f")
    setup.lease(A, B, C)
    setup.moves()
    setup.now_s += 10.0
    setup.stack.tick()
    setup.stack.tick()
    assert isinstance(setup.stack.acquire("first", [b"d"]), PromotionLease)
    first = setup.moves()
    assert setup.stack.acquire("second", [b"e"]) == "busy"
    setup.end(first)
    assert isinstance(setup.stack.acquire("second", [b"e"]), PromotionLease)
