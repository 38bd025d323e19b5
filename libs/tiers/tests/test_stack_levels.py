"""A stack of three tiers: each chunk comes from the nearest that holds it, and no tier's trouble is another's."""

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


class Three:
    """Host memory, a disk and a peer, all of them in memory here."""

    def __init__(self, disk: SecondaryTierOptions = WIDE, peer: SecondaryTierOptions = WIDE) -> None:
        self.now_s = 100.0
        self.primary, self.disk, self.peer = (RamIndex(chunks * CHUNK, CHUNK) for chunks in (8, 16, 32))
        below = [SecondaryTier("disk", self.disk, disk), SecondaryTier("peer", self.peer, peer)]
        self.stack = TierStack(self.primary, below, 1, lambda: self.now_s)

    def hold(self, *keys: Key) -> PromotionLease:
        hold = self.stack.acquire("request", keys)
        assert isinstance(hold, PromotionLease)
        return hold

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
        """Promotions from there fail until it is left alone."""
        for number in range(BreakerOptions().failures):
            key = b"bad %d" % number
            put(index, key)
            self.hold(key)
            self.end(self.moves(), Failure(FailureReason.IO))
        assert self.stack.breaker_state(Direction.PROMOTE, tier) is BreakerState.OPEN


def put(index: RamIndex, *keys: Key) -> None:
    for key in keys:
        assert isinstance(index.reserve(key, CHUNK), Slot)
        assert index.commit(key)


def ways(moves: list[TierMove]) -> list[tuple[Key, str]]:
    return [(move.key, move.tier) for move in moves]


def test_each_chunk_is_promoted_from_the_nearest_tier_that_holds_it() -> None:
    it = Three()
    put(it.disk, A, B)
    put(it.peer, B, C)
    hold = it.hold(A, B, C)
    moves = it.moves()
    assert ways(moves) == [(A, "disk"), (B, "disk"), (C, "peer")] and hold.source == "peer"
    it.end(moves)
    assert hold.is_ready and it.primary.leading([A, B, C]) == 3


def test_a_tier_that_is_left_alone_is_passed_over() -> None:
    it = Three()
    it.open_breaker("disk", it.disk)
    put(it.disk, A, B)
    put(it.peer, B)
    assert it.stack.lookup(A) is LookupResult.MISS and it.stack.lookup(B) is LookupResult.HIT
    it.hold(B)
    assert ways(it.moves()) == [(B, "peer")]


def test_a_boundary_is_found_over_all_tiers_at_once() -> None:
    it = Three()
    put(it.primary, A)
    put(it.peer, B)
    put(it.disk, C)
    assert it.stack.leading([A, B, C]) == 3 and it.stack.last_held([A, b"x", B, b"y"]) == 2
    assert it.stack.leading([C, b"x"]) == 1 and it.stack.last_held([b"x"]) is None


def test_a_hold_is_all_or_nothing_over_all_tiers() -> None:
    it = Three()
    put(it.disk, A)
    put(it.peer, B)
    assert it.stack.acquire("request", [A, B, C]) == "present"
    assert it.moves() == [] and it.primary.used_bytes == 0
    for index, key in ((it.disk, A), (it.peer, B)):
        index.invalidate(key)
        assert index.used_bytes == 0, "nobody has it pinned"


def test_what_one_tier_cannot_give_now_is_promoted_from_none() -> None:
    it = Three(disk=SecondaryTierOptions(promoting_share=0.25), peer=SecondaryTierOptions(promoting_share=0.25))
    put(it.disk, A, B, b"d")
    put(it.peer, C)
    assert isinstance(it.stack.acquire("first", [A]), PromotionLease)
    assert isinstance(it.stack.acquire("second", [C]), PromotionLease)
    moves = it.moves()
    # The disk may bring no more now, the peer behind it could.
    put(it.peer, b"e")
    assert it.stack.acquire("third", [B, b"d", b"e"]) == "busy" and it.moves() == []
    it.end(moves)
    it.stack.clear()
    assert (it.disk.used_bytes, it.peer.used_bytes) == (0, 0), "nobody has it pinned"


def test_what_is_stored_cascades_to_every_tier_that_is_given_any() -> None:
    it = Three(peer=READ_ONLY)
    it.store(A)
    assert ways(it.moves()) == [(A, "disk")]
    it = Three()
    it.store(A)
    moves = it.moves()
    assert ways(moves) == [(A, "disk"), (A, "peer")]
    it.end(moves)
    assert it.disk.lookup(A) is it.peer.lookup(A) is LookupResult.HIT


def test_a_promoted_chunk_goes_to_a_nearer_tier_when_somebody_offers_what_he_met() -> None:
    it = Three()
    put(it.peer, A)
    it.hold(A)
    it.end(it.moves())
    assert it.moves() == [], "a promotion says nothing of the path that a chunk is part of"
    it.stack.cascade(A)
    assert ways(it.moves()) == [(A, "disk")]


def test_a_tier_for_what_is_used_again_is_given_nothing_at_its_first_use() -> None:
    it = Three(peer=SecondaryTierOptions(cascades=CascadePolicy.REUSED))
    it.stack.reserve(A, CHUNK)
    assert it.stack.commit(A)
    it.stack.cascade(A, is_reuse=False)
    assert ways(it.moves()) == [(A, "disk")]
    assert it.stack.missing_in_secondary(A) and it.stack.in_all_secondaries([A]), (
        "the end of a path offers it to nobody else"
    )
    it.stack.cascade(A)
    assert ways(it.moves()) == [(A, "peer")]


def test_a_chunk_that_one_tier_cannot_give_comes_from_another() -> None:
    it = Three()
    put(it.disk, A)
    put(it.peer, A)
    hold = it.hold(A)
    it.end(it.moves(), Failure(FailureReason.CHECKSUM))
    assert hold.failure is LeaseFailure.LOST and it.disk.lookup(A) is LookupResult.MISS
    hold = it.hold(A)
    moves = it.moves()
    assert ways(moves) == [(A, "peer")]
    it.end(moves)
    assert hold.is_ready


def test_failures_of_one_tier_keep_nobody_from_the_other() -> None:
    it = Three()
    it.open_breaker("disk", it.disk)
    assert it.stack.breaker_state(Direction.PROMOTE, "peer") is BreakerState.CLOSED
    assert it.stack.take_counts().tiers["disk"].breaker_openings == {"promote": 1}


def test_who_waits_for_two_tiers_waits_for_each_as_long_as_it_may_take() -> None:
    it = Three(peer=SecondaryTierOptions(load_timeout_s=2.0))
    put(it.disk, A)
    put(it.peer, B)
    of_disk = it.stack.acquire("other", [A])
    it.now_s += 1.0
    hold = it.hold(A, B)
    it.moves()
    it.now_s += 2.5
    it.stack.tick()
    it.stack.tick()
    assert hold.failure is LeaseFailure.TIMEOUT
    assert isinstance(of_disk, PromotionLease) and of_disk.failure is None
    it.now_s = 100.0 + SecondaryTierOptions().load_timeout_s
    assert it.stack.lease("other") is of_disk and of_disk.failure is LeaseFailure.TIMEOUT


def test_what_others_had_promoted_comes_from_the_tier_that_brings_it() -> None:
    it = Three()
    put(it.disk, A)
    put(it.peer, B)
    it.hold(B)
    assert isinstance(it.stack.reserve(C, CHUNK), Slot)
    sources = {}
    for keys in ([A], [B], [A, B], [B, C], [C]):
        hold = it.stack.acquire("other", keys)
        assert isinstance(hold, PromotionLease)
        sources[b"".join(keys)] = hold.source
    assert sources == {A: "disk", B: "peer", A + B: "peer", B + C: "peer", C: "disk"}
    it.end(it.moves())
    hold = it.hold(A, B)
    assert hold.is_ready and hold.source == "disk", "it waited for none"


def test_what_waits_for_a_promoted_chunk_to_cascade_goes_behind_it() -> None:
    it = Three(peer=READ_ONLY)
    put(it.peer, A)
    it.hold(A)
    promoted = it.moves()
    it.stack.reserve(B, CHUNK)
    assert it.stack.commit(B, (A,))
    assert it.moves() == [] and it.stack.num_waiting("disk") == 1
    it.stack.cascade(A)
    it.end(promoted)
    it.stack.cascade(A)
    assert it.stack.num_waiting("disk") <= 2
    it.moves()
    assert it.stack.num_waiting("disk") == 0, "nothing is parked for ever"


class Asked:
    """A stack over two stores elsewhere, each with its own answers."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.worlds = [RemoteStore(1, lambda: self.now_s, answer_s=0.5) for _ in range(2)]
        self.primary = RamIndex(8 * CHUNK, CHUNK)
        self.peer, self.object = (RemoteIndex(world, 64 * CHUNK) for world in self.worlds)
        below = [SecondaryTier("peer", self.peer, READ_ONLY), SecondaryTier("object", self.object, READ_ONLY)]
        self.stack = TierStack(self.primary, below, 1, lambda: self.now_s)


def test_each_tier_that_answers_late_is_asked() -> None:
    it = Asked()
    it.worlds[1].lie(A, CHUNK)
    it.peer.start_lookup([B], 9.0)
    it.stack.start_lookup([A, B])
    assert [world.num_lookups for world in it.worlds] == [2, 2], "what one was asked before, another was not"
    it.now_s = 0.5
    assert (it.stack.lookup(A), it.stack.lookup(B)) == (LookupResult.HIT, LookupResult.MISS)


def test_a_question_that_is_asked_again_and_again_has_the_first_deadline() -> None:
    it = Asked()
    for world in it.worlds:
        world.is_silent = True
    for quarter in range(4):
        it.now_s = quarter / 4
        it.stack.start_lookup([A])
        assert it.stack.lookup(A) is LookupResult.PENDING
    it.now_s = it.stack.lookup_wait_s
    assert it.stack.lookup(A) is LookupResult.MISS


def test_a_late_promotion_changes_the_generation() -> None:
    it = Three()
    put(it.disk, A)
    it.hold(A)
    it.moves()
    seen = [it.stack.generation]
    it.now_s += SecondaryTierOptions().load_timeout_s
    it.stack.tick()
    it.stack.tick()
    assert it.stack.lookup(A) is LookupResult.MISS
    seen.append(it.stack.generation)
    assert seen[0] != seen[1], "whoever was told PENDING must look again"


def test_a_late_hold_is_counted_once_and_a_later_tier_keeps_awake() -> None:
    it = Three(peer=SecondaryTierOptions(load_timeout_s=2.0))
    put(it.peer, A)
    it.hold(A)
    it.moves()
    assert it.stack.has_live_moves()
    it.now_s += 2.0
    it.stack.tick()
    it.stack.tick()
    assert it.stack.take_counts().timeouts == 1 and not it.stack.has_live_moves()


def test_a_tier_that_cannot_be_asked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Asked()

    def start_lookup(keys: Iterable[Key], deadline_s: float) -> None:
        raise OSError("no route")

    monkeypatch.setattr(it.peer, "start_lookup", start_lookup)
    for _ in range(BreakerOptions().failures):
        it.stack.start_lookup([A])
        assert it.stack.lookup(A) is LookupResult.PENDING, "the other tier was asked"
    assert it.stack.breaker_state(Direction.PROMOTE, "peer") is BreakerState.OPEN
    assert it.stack.breaker_state(Direction.PROMOTE, "object") is BreakerState.CLOSED
    it.now_s = BreakerOptions().first_backoff_s
    assert it.stack.breaker_state(Direction.PROMOTE, "peer") is BreakerState.PROBING


def test_what_was_only_asked_for_is_told_from_what_is_being_stored() -> None:
    it = Asked()
    assert isinstance(it.stack.reserve(A, CHUNK), Slot)
    assert isinstance(it.peer.reserve(C, CHUNK), Slot)
    it.stack.start_lookup([A, B, C])
    assert [it.stack.lookup(key) for key in (A, B, C)] == [LookupResult.PENDING] * 3
    assert [it.stack.is_lookup_pending(key) for key in (A, B, C, b"x")] == [False, True, False, False]
    it.object.start_lookup([C], 9.0)
    assert not it.stack.is_lookup_pending(C), "one is asked, and the other is given it"


def test_no_tier_thinks_longer_than_somebody_waits_for_it() -> None:
    world = RemoteStore(1, lambda: 0.0, answer_s=9.0)
    options = SecondaryTierOptions(load_timeout_s=0.5)
    stack = TierStack(
        RamIndex(CHUNK, CHUNK), [SecondaryTier("peer", RemoteIndex(world, CHUNK), options)], 1, lambda: 0.0
    )
    assert stack.lookup_wait_s == 0.5


class Raising(RemoteMedium):
    """Raises where it should report."""

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        raise OSError("load")

    def poll(self) -> list[Completion]:
        raise OSError("poll")

    def drain(self, timeout_s: float) -> bool:
        raise OSError("drain")


class Twice(RemoteMedium):
    """Ends everything twice."""

    def poll(self) -> list[Completion]:
        return super().poll() * 2


def test_a_medium_that_raises_costs_its_own_moves_alone() -> None:
    world = RemoteStore(1, lambda: 0.0)
    arena = RamArena(1 << 16, 4096)
    media = {"disk": Raising(world, 0), "peer": Twice(world, 0)}
    mover = TierMover(arena, media, lambda: 0.0)
    near = Slot(((0, CHUNK),))
    assert arena.seal_all([(A, near)]) == [None]
    far = world.allocate(CHUNK)
    mover.start([TierMove(0, Direction.CASCADE, "peer", A, near, far)])
    assert [(move.move_id, failure) for move, failure, _ in mover.poll()] == [(0, None)]
    mover.start([TierMove(2, Direction.PROMOTE, "disk", A, Slot(((4096, CHUNK),)), far)])
    mover.start([TierMove(4, Direction.PROMOTE, "peer", A, Slot(((8192, CHUNK),)), far)])
    assert [(move.move_id, failure) for move, failure, _ in mover.poll()] == [(4, None)]
    assert not mover.close(1.0)
    media["peer"].load(Ticket(6), A, far, [bytearray(CHUNK)])
    [completion, _] = media["peer"].poll()
    assert completion.failure is not None and completion.failure.reason is FailureReason.CLOSED


def test_two_tiers_of_one_name_are_refused() -> None:
    index = RamIndex(CHUNK, CHUNK)
    with pytest.raises(TierConfigurationError):
        TierStack(index, [SecondaryTier("disk", index), SecondaryTier("disk", index)], 1, lambda: 0.0)


def test_a_tier_that_answers_late_is_asked_for_what_no_other_holds_and_still_given_it() -> None:
    now_s = 0.0
    world = RemoteStore(1, lambda: now_s, answer_s=0.5)
    near, disk, peer = RamIndex(8 * CHUNK, CHUNK), RamIndex(8 * CHUNK, CHUNK), RemoteIndex(world, 64 * CHUNK)
    below = [SecondaryTier("disk", disk, WIDE), SecondaryTier("peer", peer, WIDE)]
    stack = TierStack(near, below, 1, lambda: now_s)
    put(disk, A)
    stack.start_lookup([A, B])
    assert world.num_lookups == 1 and stack.lookup_wait_s == 1.0
    assert stack.lookup(A) is LookupResult.HIT and stack.lookup(B) is LookupResult.PENDING
    assert stack.missing_in_secondary(B) and not stack.in_all_secondaries([B])
    assert isinstance(stack.reserve(B, CHUNK), Slot) and stack.commit(B)
    assert ways(stack.take_moves()) == [(B, "disk"), (B, "peer")], "what was asked for is uploaded all the same"


def test_every_tier_that_answers_late_is_asked_at_once_and_has_its_own_time() -> None:
    now_s = 0.0
    worlds = [RemoteStore(1, lambda: now_s, answer_s) for answer_s in (0.1, 2.0)]
    options = [SecondaryTierOptions(async_lookup_timeout_s=lookup_wait_s) for lookup_wait_s in (0.5, 3.0)]
    indexes = [RemoteIndex(world, 64 * CHUNK) for world in worlds]
    below = [SecondaryTier(*each) for each in zip(("peer", "object"), indexes, options, strict=True)]
    stack = TierStack(RamIndex(8 * CHUNK, CHUNK), below, 1, lambda: now_s)
    worlds[1].lie(A, CHUNK)
    stack.start_lookup([A, B])
    assert [world.num_lookups for world in worlds] == [2, 2] and stack.lookup_wait_s == 3.0
    now_s = 1.0
    assert indexes[0].lookup(A) is LookupResult.MISS and stack.lookup(A) is LookupResult.PENDING
    now_s = 2.5
    assert (stack.lookup(A), stack.lookup(B)) == (LookupResult.HIT, LookupResult.MISS)
    hold = stack.acquire("request", [A])
    assert isinstance(hold, PromotionLease) and ways(stack.take_moves()) == [(A, "object")]


def test_what_a_tier_says_after_its_time_is_a_miss_until_it_says_it() -> None:
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


def test_what_needs_a_chunk_that_failed_on_its_way_up_is_judged_when_the_fast_tier_has_heard_of_it() -> None:
    it = Three(peer=READ_ONLY)
    put(it.disk, A)
    it.hold(A)
    promoted = it.moves()
    it.stack.reserve(B, CHUNK)
    assert it.stack.commit(B, (A,)) and it.stack.num_waiting("disk") == 1
    it.end(promoted, Failure(FailureReason.CHECKSUM))
    assert it.stack.num_waiting("disk") == 0, "it waits for nothing that might come"
    assert it.stack.take_counts().tiers["disk"].cascades == {"dropped_orphan": 1}


def test_what_two_tiers_never_answer_takes_up_no_more_than_one_may_bring() -> None:
    """A hold beyond that for each tier, which cannot be known for late before it is."""
    bounded = SecondaryTierOptions(promoting_share=0.5, load_timeout_s=10.0, breaker=BreakerOptions(failures=99))
    it = Three(bounded, bounded)
    for number in range(8):
        put(it.disk, b"disk %d" % number)
        put(it.peer, b"peer %d" % number)

    def wait_in_vain(tier: str, number: int) -> bool:
        key = b"%s %d" % (tier.encode(), number)
        if it.stack.lookup(key) is LookupResult.MISS:
            return False
        it.hold(key)
        it.moves()
        it.now_s += 10.0
        it.stack.tick()
        it.stack.tick()
        return True

    assert [wait_in_vain("disk", number) for number in range(4)] == [True] * 4
    assert wait_in_vain("peer", 0), "one that has nothing late is asked"
    assert not wait_in_vain("peer", 1) and not wait_in_vain("disk", 4)
    assert it.primary.used_bytes == 5 * CHUNK


def test_what_one_tier_never_answers_leaves_others_one_load_at_a_time() -> None:
    bounded = SecondaryTierOptions(promoting_share=0.5, load_timeout_s=10.0)
    it = Three(bounded, bounded)
    put(it.disk, A, B, C)
    put(it.peer, b"d", b"e", b"f")
    it.hold(A, B, C)
    it.moves()
    it.now_s += 10.0
    it.stack.tick()
    it.stack.tick()
    assert isinstance(it.stack.acquire("first", [b"d"]), PromotionLease)
    first = it.moves()
    assert it.stack.acquire("second", [b"e"]) == "busy"
    it.end(first)
    assert isinstance(it.stack.acquire("second", [b"e"]), PromotionLease)
