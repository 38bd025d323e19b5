"""What an index of LMCache's servers asks, believes and doubts; time and the server are the test's."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from played_lmcache import PlayedServer  # noqa: E402

from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import Answer, FailureReason, Key, Refusal, Slot, TierConfigurationError, TierIndex  # noqa: E402
from hybridkv.tiers.lmcache import Found, LMCacheIndex, LMCacheOptions  # noqa: E402
from hybridkv.tiers.ram import RamIndex  # noqa: E402
from hybridkv.tiers.stack import Direction, MoveOutcome, SlowerTier, SlowerTierOptions, TierStack  # noqa: E402
from hybridkv.tiers.stack.breaker import BreakerState  # noqa: E402
from kits.tiers.conformance import (  # noqa: E402
    CHUNK_BYTES,
    AskConformance,
    EvictionConformance,
    ExactEvictionConformance,
    IndexConformance,
    LateConformance,
    Tier,
)
from kits.tiers.faults import FaultInjectingIndex, FaultPlan  # noqa: E402
from kits.tiers.reference import ReferenceMedium  # noqa: E402

A, B, C = b"key a", b"key b", b"key c"
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS
ANY_SIZE = range(1, 1 << 40)


class TestLMCacheIndex(
    IndexConformance, AskConformance, EvictionConformance, ExactEvictionConformance, LateConformance
):
    time_s = 0.0
    server: PlayedServer

    def make_tier(self, capacity_bytes: int) -> Tier:
        self.server = PlayedServer(self.now_s, {})
        options = LMCacheOptions(known_bytes=capacity_bytes)
        return Tier(LMCacheIndex(self.server, ANY_SIZE, options, self.now_s), ReferenceMedium())

    def make_late(self) -> TierIndex:
        index = self.make_tier_of(4).index
        self.server.held = {A: CHUNK_BYTES, B: CHUNK_BYTES}
        return index

    def now_s(self) -> float:
        return self.time_s

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds

    def answer_all(self) -> None:
        self.server.answer()


class TestLMCacheIndexInAnIdleFaultInjector(TestLMCacheIndex):
    def make_tier(self, capacity_bytes: int) -> Tier:
        tier = super().make_tier(capacity_bytes)
        return Tier(FaultInjectingIndex(tier.index, FaultPlan()), tier.medium)


class World:
    """An index over a server that holds A and B."""

    def __init__(self, **options: float) -> None:
        self.time_s = 0.0
        self.server = PlayedServer(lambda: self.time_s, {A: CHUNK_BYTES, B: 2 * CHUNK_BYTES})
        sizes = {CHUNK_BYTES, 2 * CHUNK_BYTES}
        self.index = LMCacheIndex(self.server, sizes, LMCacheOptions(**options), lambda: self.time_s)

    def ask(self, *keys: Key) -> None:
        self.index.ask(keys, self.time_s + 1.0)

    def hear(self, *keys: Key) -> list[LookupResult]:
        self.ask(*keys)
        self.server.answer()
        return self.lookups(*keys)

    def store(self, key: Key) -> None:
        assert isinstance(self.index.reserve(key, CHUNK_BYTES), Slot) and self.index.commit(key)

    def lookups(self, *keys: Key) -> list[LookupResult]:
        return [self.index.lookup(key) for key in keys]


def test_a_chunk_that_a_server_holds_is_offered_with_its_length() -> None:
    world = World()
    assert world.hear(A, B, C) == [HIT, HIT, MISS]
    slots = [world.index.pin(key) for key in (A, B)]
    assert [slot.num_bytes for slot in slots if slot] == [CHUNK_BYTES, 2 * CHUNK_BYTES]


def test_what_a_server_is_believed_to_hold_is_asked_for_again_after_a_while() -> None:
    world = World(believed_s=60.0)
    assert world.hear(A) == [HIT]
    world.time_s = 30.0
    world.store(C)
    world.time_s = 59.9
    before = world.index.generation
    assert world.lookups(A, C) == [HIT, HIT] and world.index.generation == before
    world.time_s = 60.0
    assert world.lookups(A, C) == [MISS, HIT] and world.index.generation != before
    world.time_s = 90.0
    assert world.lookups(A, C) == [MISS, MISS]
    assert world.hear(A, C) == [HIT, MISS], "C was evicted there meanwhile"
    assert world.index.take_counts().invalidations == 0, "nobody withdrew anything"


def test_what_is_doubted_is_not_worth_storing_until_a_server_says_that_it_lacks_it() -> None:
    world = World(believed_s=60.0)
    world.store(A)
    world.store(C)
    world.time_s = 60.0
    assert world.lookups(A, C) == [MISS, MISS]
    assert not world.index.lacks(A) and not world.index.lacks(C)
    world.ask(A, C)
    assert world.index.lacks(A) and world.index.lacks(C), "being found out"
    world.server.answer()
    assert world.lookups(A, C) == [HIT, MISS]
    assert not world.index.lacks(A) and world.index.lacks(C)


def test_what_is_read_while_it_becomes_doubtful_is_read_to_its_end() -> None:
    world = World(believed_s=60.0)
    assert world.hear(A) == [HIT] and world.index.pin(A)
    world.time_s = 61.0
    assert world.lookups(A) == [HIT]
    world.index.unpin(A)
    assert world.lookups(A) == [MISS] and world.index.used_bytes == 0


def test_a_server_that_is_lost_is_waited_for_no_more_and_believed_no_more() -> None:
    world = World()
    assert world.hear(A) == [HIT] and world.index.pin(A)
    assert isinstance(world.index.reserve(C, CHUNK_BYTES), Slot)
    world.ask(B)
    world.server.lose()
    assert world.lookups(A, B, C) == [MISS, MISS, PENDING]
    assert world.index.take_counts().answers == {Answer.HELD: 1, Answer.LATE: 1}
    assert world.index.heard == (1, 1)
    world.index.unpin(A)
    world.index.abort(C)
    assert world.index.used_bytes == 0
    world.ask(A)
    assert world.lookups(A) == [MISS] and world.index.heard == (1, 1), "nobody could be asked: nobody is blamed"
    assert world.index.take_counts().answers == {Answer.LATE: 1}
    world.server.is_there = True
    assert world.hear(A) == [HIT]


def test_nothing_is_stored_at_a_server_that_is_gone_and_its_return_is_noticed_at_once() -> None:
    world, near = World(), RamIndex(1 << 20, CHUNK_BYTES)
    tier = SlowerTier("lmcache", world.index, SlowerTierOptions())
    stack = TierStack(near, [tier], 1, lambda: world.time_s)
    world.server.lose()
    for number in range(200):
        key = b"key %d" % number
        assert isinstance(stack.reserve(key, CHUNK_BYTES), Slot) and stack.commit(key)
        world.time_s += 1.0
        stack.tick()
        assert not stack.take_moves()
    assert stack.breaker_state(Direction.CASCADE, "lmcache") is BreakerState.CLOSED
    waiting = stack.num_waiting("lmcache")
    assert 0 < waiting < 200, "what waits for too long is dropped"
    assert not stack.has_moves_alive(), "an engine without requests does not wait for it"
    world.server.is_there = True
    stack.tick()
    moves = stack.take_moves()
    assert len(moves) == waiting
    for move in moves:
        stack.on_move(move.move_id, MoveOutcome(1, None))
    assert stack.num_waiting("lmcache") == 0 and world.index.num_keys == waiting


def test_a_question_that_ends_without_an_answer_is_a_miss_at_once() -> None:
    world = World()
    world.ask(A)
    world.server.give_up()
    assert world.lookups(A) == [MISS] and world.index.take_counts().answers == {Answer.LATE: 1}
    assert world.hear(A) == [HIT]


def test_an_answer_to_an_older_question_about_a_chunk_brings_nothing_back() -> None:
    world = World()
    world.ask(A)
    world.index.invalidate(A)
    older, world.server.waiting = world.server.waiting, []
    world.ask(A)
    newer, world.server.waiting = world.server.waiting, older
    world.server.answer()
    assert world.lookups(A) == [PENDING]
    world.server.waiting = newer
    world.server.answer()
    assert world.lookups(A) == [HIT]


def test_answers_about_what_nobody_asked_for_change_nothing() -> None:
    world = World()
    world.server.news.append(Found(7, A, CHUNK_BYTES, 0.0))
    assert world.lookups(A) == [MISS] and world.index.num_keys == 0


def test_what_a_server_lacks_is_not_asked_for_again_at_once() -> None:
    world = World(missing_s=5.0)
    assert world.hear(C) == [MISS] and world.server.num_asked == 1
    assert world.hear(C) == [MISS] and world.server.num_asked == 1
    world.time_s = 5.0
    world.ask(C)
    assert world.lookups(C) == [PENDING] and world.server.num_asked == 2


@pytest.mark.parametrize("reason", [FailureReason.CHECKSUM, FailureReason.WRONG_KEY])
def test_a_chunk_whose_bytes_were_wrong_is_left_alone_for_a_while(reason: FailureReason) -> None:
    world = World(bad_s=600.0)
    assert world.hear(A, B) == [HIT, HIT]
    world.index.invalidate(A, reason)
    world.index.invalidate(B, FailureReason.MISSING)
    assert world.hear(A, B) == [MISS, HIT] and world.server.num_asked == 3
    assert world.index.reserve(A, CHUNK_BYTES) is Refusal.PRESENT, "the server would keep what it has"
    world.time_s = 600.0
    assert world.hear(A) == [HIT]


def test_a_chunk_of_a_size_that_no_page_has_is_refused() -> None:
    world = World()
    assert world.index.reserve(C, CHUNK_BYTES + 1) is Refusal.TOO_LARGE
    assert isinstance(world.index.reserve(C, CHUNK_BYTES), Slot)


def test_no_more_is_believed_than_may_be_and_the_oldest_goes() -> None:
    world = World(max_known=3)
    for name in (b"1", b"2", b"3", b"4"):
        world.store(name)
    assert world.lookups(b"1", b"2", b"3", b"4") == [MISS, HIT, HIT, HIT]
    assert world.index.take_counts().evictions == 1


def test_what_is_believed_takes_up_no_memory_for_ever() -> None:
    world = World(max_known=2, max_asked=1, believed_s=1.0)
    for number in range(100):
        world.time_s = float(number)
        world.store(b"%d" % number)
        world.lookups(A)
    assert len(world.index._believed) <= 6 and len(world.index._faded) <= 2


def test_what_was_heard_of_is_counted_as_no_store_of_a_servers() -> None:
    world = World()
    assert world.hear(A) == [HIT]
    world.store(C)
    counts = world.index.take_counts()
    assert (counts.reservations, counts.commits, counts.answers) == (1, 1, {Answer.HELD: 1})


@pytest.mark.parametrize("field", list(LMCacheOptions.__struct_fields__))
def test_options_of_servers_that_cannot_work_name_the_field(field: str) -> None:
    with pytest.raises(TierConfigurationError) as caught:
        LMCacheOptions(**{field: 0})
    assert caught.value.field == field
