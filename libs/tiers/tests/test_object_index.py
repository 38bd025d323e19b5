"""Index of an object store: lookups, cached results and stores, with a clock and a store under the test's control."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from played_objects import FakeObjectClient  # noqa: E402

from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import (  # noqa: E402
    BatchedIndex,
    Extends,
    FailureReason,
    Key,
    Refusal,
    Slot,
    TierConfigurationError,
    TierIndex,
)
from hybridkv.tiers.object import (  # noqa: E402
    ObjectIndex,
    ObjectOptions,
    ObjectSlot,
    PackPlace,
    store_checks,
)
from hybridkv.tiers.object.store_checks import CHECKED_S, FRESH_ANSWER_S  # noqa: E402
from hybridkv.tiers.ram import RamIndex  # noqa: E402
from hybridkv.tiers.stack import (  # noqa: E402
    CascadePolicy,
    MoveOutcome,
    SecondaryTier,
    SecondaryTierOptions,
    TierStack,
)
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
FULL, WINDOW = b"f" * 16, b"w" * 16
"""Tags of two groups."""


class TestObjectIndex(IndexConformance, AskConformance, EvictionConformance, ExactEvictionConformance, LateConformance):
    time_s = 0.0
    depot: FakeObjectClient

    def make_tier(self, capacity_bytes: int) -> Tier:
        self.depot = FakeObjectClient(self.now_s, {})
        return Tier(ObjectIndex(self.depot, ObjectOptions(known_bytes=capacity_bytes), self.now_s), ReferenceMedium())

    def make_late(self) -> TierIndex:
        index = self.make_tier_of(4).index
        self.depot.held = {A: PackPlace("p", 0, CHUNK_BYTES), B: PackPlace("p", CHUNK_BYTES, CHUNK_BYTES)}
        return index

    def now_s(self) -> float:
        return self.time_s

    def pass_time(self, seconds: float) -> None:
        self.time_s += seconds

    def answer_all(self) -> None:
        self.depot.answer()


class TestObjectIndexInAnIdleFaultInjector(TestObjectIndex):
    def make_tier(self, capacity_bytes: int) -> Tier:
        tier = super().make_tier(capacity_bytes)
        index = FaultInjectingIndex(tier.index, FaultPlan())
        assert isinstance(index, BatchedIndex)
        return Tier(index, tier.medium)


class IndexBench:
    """Index over a store that holds A and B."""

    def __init__(self, *, clears_all: bool = False, **options: float) -> None:
        self.time_s = 0.0
        self.depot = FakeObjectClient(
            lambda: self.time_s, {A: PackPlace("p", 0, CHUNK_BYTES), B: PackPlace("q", 7, CHUNK_BYTES)}
        )
        self.index = ObjectIndex(self.depot, ObjectOptions(**options), lambda: self.time_s, clears_all=clears_all)

    def look_up(self, *keys: Key) -> list[LookupResult]:
        self.index.start_lookup(keys, self.time_s + 1.0)
        self.depot.answer()
        return [self.index.lookup(key) for key in keys]

    def reserve(self, key: Key, num_bytes: int = CHUNK_BYTES, extends: Extends = ()) -> ObjectSlot:
        slot = self.index.reserve(key, num_bytes, extends)
        assert isinstance(slot, ObjectSlot)
        return slot


def test_an_object_index_is_a_batched_index() -> None:
    assert isinstance(IndexBench().index, BatchedIndex)


def test_a_found_chunk_is_pinned_at_its_place() -> None:
    bench = IndexBench()
    assert bench.look_up(A, B, C) == [HIT, HIT, MISS]
    slot = bench.index.pin(B)
    assert isinstance(slot, ObjectSlot)
    assert (slot.pack, slot.offset, slot.num_bytes) == ("q", 7, CHUNK_BYTES)


def test_a_prompt_is_one_lookup() -> None:
    bench = IndexBench()
    bench.index.start_lookup([A, B, C], 1.0)
    assert [keys for _, keys in bench.depot.asked] == [(A, B, C)]


def test_an_unreachable_store_leaves_no_pending_lookup() -> None:
    bench = IndexBench()
    bench.depot.is_reachable = False
    bench.index.start_lookup([A], 1.0)
    assert bench.index.lookup(A) is MISS


def test_a_failed_lookup_is_no_longer_pending() -> None:
    bench = IndexBench()
    bench.index.start_lookup([A, B], 1.0)
    bench.depot.fail()
    assert not bench.index.any_pending([A, B])
    assert bench.index.lookup_counts == (0, 2)


def test_a_missing_key_is_not_looked_up_again_for_a_while() -> None:
    bench = IndexBench(missing_s=5.0)
    bench.look_up(C)
    bench.index.start_lookup([C], 2.0)
    assert not bench.depot.asked
    bench.time_s = 5.1
    bench.index.start_lookup([C], 6.0)
    assert bench.depot.asked


def test_a_found_key_is_cached_for_a_while_and_then_looked_up_again() -> None:
    bench = IndexBench(found_s=60.0)
    bench.look_up(A)
    bench.time_s = 59.0
    assert bench.index.lookup(A) is HIT
    bench.time_s = 60.0
    assert bench.index.lookup(A) is MISS
    assert bench.look_up(A) == [HIT]


def test_an_expired_result_is_not_stored_again_before_a_lookup() -> None:
    bench = IndexBench(found_s=60.0, missing_s=1.0)
    bench.look_up(A, B)
    bench.time_s = 60.0
    assert not bench.index.lacks(A) and bench.index.lacks(C)
    del bench.depot.held[A]
    assert bench.look_up(A) == [MISS]
    assert bench.index.lacks(A) and not bench.index.lacks(B)


def test_a_pinned_result_expires_after_its_unpin() -> None:
    bench = IndexBench(found_s=60.0)
    bench.look_up(A)
    bench.index.pin(A)
    bench.time_s = 60.0
    assert bench.index.lookup(A) is HIT
    bench.index.unpin(A)
    assert bench.index.lookup(A) is MISS


@pytest.mark.parametrize("reason", [FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.MISSING])
def test_a_bad_place_is_not_cached_again_and_its_manifest_is_withdrawn(reason: FailureReason) -> None:
    bench = IndexBench(bad_s=100.0, missing_s=1.0)
    bench.look_up(A)
    bench.index.invalidate(A, reason)
    bench.time_s = 2.0
    assert bench.look_up(A) == [MISS]
    assert bench.depot.retracted == [(A, PackPlace("p", 0, CHUNK_BYTES, b"source"))]
    bench.depot.held[A] = PackPlace("p2", 0, CHUNK_BYTES)
    bench.time_s = 4.0
    assert bench.look_up(A) == [HIT], "another place is accepted"


def test_a_chunk_that_failed_for_another_reason_is_found_again() -> None:
    bench = IndexBench(missing_s=1.0)
    bench.look_up(A)
    bench.index.invalidate(A)
    assert bench.look_up(A) == [HIT]
    assert not bench.depot.retracted


def test_chunks_of_one_group_and_batch_are_adjacent() -> None:
    bench = IndexBench()
    first, second = bench.reserve(FULL + b"1"), bench.reserve(FULL + b"2")
    assert first.pack == second.pack
    assert second.offset >= first.offset + CHUNK_BYTES
    assert bench.reserve(WINDOW + b"1").pack != first.pack, "each group has its own pack"
    bench.index.end_batch()
    assert bench.reserve(FULL + b"3").pack != first.pack


def test_a_full_pack_is_followed_by_another() -> None:
    bench = IndexBench(pack_bytes=3 * CHUNK_BYTES)
    packs = [bench.reserve(FULL + bytes([number])).pack for number in range(5)]
    assert packs[0] == packs[1] != packs[2] == packs[3] != packs[4]


def test_a_batch_is_published_when_its_last_chunk_is_committed() -> None:
    bench = IndexBench()
    bench.reserve(FULL + b"1")
    bench.reserve(FULL + b"2", extends=(FULL + b"1",))
    bench.index.commit(FULL + b"1")
    bench.index.end_batch()
    assert not bench.depot.published
    bench.index.commit(FULL + b"2")
    assert [(stored.key, stored.needs) for stored in bench.depot.published] == [
        (FULL + b"1", ()),
        (FULL + b"2", (FULL + b"1",)),
    ]


def test_a_batch_committed_before_its_end_is_published_at_the_end() -> None:
    bench = IndexBench()
    bench.reserve(FULL + b"1")
    bench.index.commit(FULL + b"1")
    assert not bench.depot.published
    bench.index.end_batch()
    assert len(bench.depot.published) == 1


def test_an_uncommitted_chunk_is_not_published() -> None:
    bench = IndexBench()
    bench.reserve(FULL + b"1")
    bench.reserve(FULL + b"2")
    bench.index.end_batch()
    bench.index.invalidate(FULL + b"1")
    assert not bench.index.commit(FULL + b"1")
    bench.index.abort(FULL + b"2")
    assert not bench.depot.published


def test_a_reset_affects_only_this_engine_by_default() -> None:
    bench = IndexBench()
    bench.look_up(A)
    bench.reserve(FULL + b"1")
    assert bench.index.clear() == 2
    assert bench.depot.cleared == [False]
    bench.index.end_batch()
    assert not bench.index.commit(FULL + b"1")
    assert not bench.depot.published
    bench = IndexBench(clears_all=True)
    bench.index.clear()
    assert bench.depot.cleared == [True]


def test_committed_chunks_are_published_at_the_close() -> None:
    bench = IndexBench()
    bench.reserve(FULL + b"1")
    bench.reserve(FULL + b"2")
    bench.index.end_batch()
    bench.index.commit(FULL + b"1")
    bench.index.close()
    assert [stored.key for stored in bench.depot.published] == [FULL + b"1"]
    assert bench.depot.is_closed
    assert not bench.index.commit(FULL + b"2"), "a later commit is refused"


def test_pack_names_of_two_engines_differ() -> None:
    assert IndexBench().reserve(A).pack != IndexBench().reserve(A).pack


def test_invalid_object_options_are_refused() -> None:
    with pytest.raises(TierConfigurationError, match="pack_bytes"):
        ObjectOptions(pack_bytes=0)


def test_found_chunks_are_pinned_as_slots() -> None:
    bench = IndexBench()
    bench.look_up(A, B)
    slots = bench.index.pin_all([A, B])
    assert slots is not None
    assert all(isinstance(slot, Slot) for slot in slots)
    assert len({slot.first_offset for slot in slots}) == 2


def test_stores_are_busy_until_the_store_is_reached() -> None:
    bench = IndexBench()
    bench.depot.namespace = None
    assert bench.index.reserve(FULL + b"1", CHUNK_BYTES) is Refusal.BUSY
    bench.depot.namespace = "n"
    bench.reserve(FULL + b"1")


def test_a_new_epoch_drops_found_keys_and_stores_of_the_last_one() -> None:
    bench = IndexBench()
    bench.look_up(A)
    bench.index.start_lookup([C], 1.0)
    first = bench.reserve(FULL + b"1")
    bench.depot.move()
    assert [bench.index.lookup(key) for key in (A, C)] == [MISS, MISS]
    assert not bench.index.commit(FULL + b"1")
    assert bench.reserve(FULL + b"2").pack != first.pack
    bench.index.end_batch()
    bench.index.commit(FULL + b"2")
    assert [stored.key for stored in bench.depot.published] == [FULL + b"2"]
    assert bench.index.take_counts().invalidations == 0


def test_found_keys_are_evicted_oldest_first() -> None:
    bench = IndexBench(known_bytes=2 * CHUNK_BYTES)
    bench.depot.held[C] = PackPlace("r", 0, CHUNK_BYTES)
    assert bench.look_up(A) == [HIT]
    assert bench.look_up(B) == [HIT]
    assert bench.look_up(C) == [HIT]
    assert [bench.index.lookup(key) for key in (A, B)] == [MISS, HIT]
    bench.index.pin(B)
    bench.reserve(FULL + b"1")
    assert [bench.index.lookup(key) for key in (B, C)] == [HIT, MISS], "a pinned key stays"
    assert bench.index.used_bytes == bench.index.capacity_bytes
    assert bench.index.take_counts().evictions == 2


def test_a_lookup_with_too_little_room_keeps_its_beginning() -> None:
    bench = IndexBench(max_known=2)
    keys = [FULL + bytes([number]) * 32 for number in range(3)]
    bench.depot.held |= {key: PackPlace("p", place, CHUNK_BYTES) for place, key in enumerate(keys)}
    assert bench.look_up(*keys) == [HIT, HIT, MISS]


def test_expired_results_take_no_room() -> None:
    bench = IndexBench(found_s=60.0)
    bench.look_up(A, B)
    bench.index.pin(A)
    bench.index.unpin(A)
    assert (bench.index.num_keys, bench.index.used_bytes) == (2, 2 * CHUNK_BYTES)
    bench.time_s = 61.0
    assert bench.index.generation and (bench.index.num_keys, bench.index.used_bytes) == (0, 0)


def test_a_withdrawn_key_gets_its_own_lookup() -> None:
    bench = IndexBench()
    bench.index.start_lookup([A, B], 1.0)
    bench.index.invalidate(A)
    bench.index.start_lookup([A, B], 1.0)
    assert [keys for _, keys in bench.depot.asked] == [(A, B), (A,)]
    bench.depot.answer()
    assert [bench.index.lookup(key) for key in (A, B)] == [HIT, HIT]
    assert bench.index.lookup_counts == (2, 0)


# Lookups before stores.


class Stores:
    """Index over a store that the test controls, and its clock."""

    def __init__(self, held: dict[Key, PackPlace], **options: object) -> None:
        self.time_s = 0.0
        self.depot = FakeObjectClient(lambda: self.time_s, held)
        self.index = ObjectIndex(self.depot, ObjectOptions(**options), lambda: self.time_s)  # type: ignore[arg-type]

    def announce(self, *keys: Key) -> None:
        """Touch a path, as before the store of a request."""
        self.index.touch(keys[::-1], [*((key,) for key in keys[-2::-1]), ()])


@pytest.mark.parametrize("is_prepared", [True, False])
def test_keys_not_looked_up_are_looked_up_before_their_store(is_prepared: bool) -> None:
    stores = Stores({A: PackPlace("p", 0, 100), B: PackPlace("p", 300, 100)})
    stores.announce(A, B, C)
    if is_prepared:
        stores.index.prepare_stores([A, B, C])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    assert [keys for _, keys in stores.depot.asked] == [(A, B, C)], "the whole path is one lookup"
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.depot.answer()
    assert [stores.index.reserve(key, 100) for key in (A, B)] == [Refusal.PRESENT] * 2
    assert isinstance(stores.index.reserve(C, 100), Slot)


@pytest.mark.parametrize(("age_s", "is_fresh"), [(FRESH_ANSWER_S - 0.1, True), (FRESH_ANSWER_S + 0.1, False)])
def test_an_answer_to_a_request_counts_for_half_a_second(age_s: float, is_fresh: bool) -> None:
    stores = Stores({})
    stores.index.start_lookup([A, B], 1.0)
    stores.depot.answer()
    assert stores.index.lookup(A) is MISS
    stores.announce(A, B)
    stores.time_s += age_s
    stores.index.prepare_stores([A, B])
    assert [keys for _, keys in stores.depot.asked] == ([] if is_fresh else [(A, B)])
    assert isinstance(stores.index.reserve(A, 100), Slot) == is_fresh, "another engine may have stored it meanwhile"
    stores.depot.answer()
    assert isinstance(stores.index.reserve(B, 100), Slot)


def test_a_lookup_of_a_request_that_ends_without_an_answer_is_continued_for_a_store() -> None:
    stores = Stores({A: PackPlace("p", 0, 100)}, check_timeout_s=1.0)
    stores.announce(A)
    stores.index.start_lookup([A], 0.25)
    stores.index.prepare_stores([A])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.time_s = 0.3
    stores.index.prepare_stores([A])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.depot.answer()
    assert stores.index.reserve(A, 100) is Refusal.PRESENT


def test_a_store_waits_once_and_briefly_for_a_silent_server() -> None:
    stores = Stores({}, check_timeout_s=1.0)
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.time_s += 1.1
    stores.index.prepare_stores([A, B])
    assert isinstance(stores.index.reserve(A, 100), Slot)
    assert isinstance(stores.index.reserve(B, 100), Slot)


def test_a_store_goes_on_if_no_lookup_can_be_sent() -> None:
    stores = Stores({})
    stores.depot.is_reachable = False
    stores.announce(A)
    stores.index.prepare_stores([A])
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_a_lookup_of_a_new_path_does_not_delay_a_chunk_that_was_looked_up() -> None:
    """A shared prefix waits in the queue while each step brings another path with it."""
    stores = Stores({})
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    stores.depot.answer()
    stores.time_s += 2.0
    stores.announce(A, C)
    stores.index.prepare_stores([A, B, C])
    assert [keys for _, keys in stores.depot.asked] == [(C,)]
    assert stores.index.reserve(C, 100) is Refusal.BUSY
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_a_chunk_that_waits_long_after_its_lookup_is_looked_up_again() -> None:
    """For example for a budget. One attempt follows each answer, however long the steps are."""
    stores = Stores({})
    stores.announce(A)
    stores.index.prepare_stores([A])
    stores.depot.answer()
    for _ in range(2):
        stores.time_s += CHECKED_S + 1
        stores.index.prepare_stores([A])
        assert not stores.depot.asked, "its answer came after the last attempt"
        stores.time_s += CHECKED_S + 1
        stores.depot.held[A] = PackPlace("p", 0, 100)
        stores.index.prepare_stores([A])
        assert len(stores.depot.asked) == 1
        stores.depot.held = {}
        stores.depot.answer()
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_lookups_before_stores_leave_room_for_those_of_requests() -> None:
    stores = Stores({}, max_open_keys=8)
    keys = [b"key %d" % number for number in range(6)]
    stores.announce(*keys)
    stores.index.prepare_stores(keys)
    assert [asked for _, asked in stores.depot.asked] == [tuple(keys[:4])]
    stores.index.start_lookup([b"r %d" % number for number in range(8)], 1.0)
    assert len(stores.depot.asked[-1][1]) == 4
    assert [stores.index.reserve(key, 100) for key in keys] == [Refusal.BUSY] * 6
    stores.depot.answer()
    stores.index.prepare_stores(keys)
    assert [asked for _, asked in stores.depot.asked] == [tuple(keys[4:])]
    stores.depot.answer()
    assert all(isinstance(stores.index.reserve(key, 100), Slot) for key in keys)


@pytest.mark.parametrize("why", ["budget", "read-only", "unreachable"])
def test_no_lookup_before_a_store_is_sent_while_nothing_can_be_stored(why: str) -> None:
    stores = Stores({}, store_bytes_per_s=100.0)
    if why == "budget":
        assert isinstance(stores.index.reserve(b"first", 250), Slot)
    stores.depot.takes_objects = why != "read-only"
    stores.depot.namespace = None if why == "unreachable" else "n"
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    assert stores.index.reserve(A, 10) is Refusal.BUSY
    assert not stores.depot.asked


def test_a_new_epoch_needs_new_lookups() -> None:
    stores = Stores({})
    stores.announce(A)
    stores.index.prepare_stores([A])
    stores.depot.answer()
    stores.depot.move()
    stores.index.prepare_stores([A])
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    assert len(stores.depot.asked) == 1


def test_lookups_before_stores_do_not_affect_the_health_of_the_tier() -> None:
    stores = Stores({}, check_timeout_s=1.0)
    before = stores.index.answer_s
    stores.announce(A, B)
    stores.index.prepare_stores([A, B])
    stores.time_s += 1.1
    assert stores.index.lookup_counts == (0, 0) and stores.index.answer_s == before
    stores.depot.answer()
    assert stores.index.lookup_counts == (0, 0) and stores.index.answer_s == before


@pytest.mark.parametrize("hot", [(), (b"hot 1", b"hot 2")], ids=["apart", "with a shared prefix"])
@pytest.mark.parametrize("step_s", [0.05, 0.4, 0.6, 0.8, 7.0])
def test_all_chunks_are_stored_at_the_pace_of_the_steps(step_s: float, hot: tuple[Key, ...]) -> None:
    """Prompts wait and compute longer than an answer counts, so each path is looked up again before its store."""
    time_s = [0.0]
    depot = FakeObjectClient(lambda: time_s[0], {})
    index = ObjectIndex(depot, ObjectOptions(), lambda: time_s[0])
    tier = SecondaryTier("object", index, SecondaryTierOptions(cascades=CascadePolicy.ALL))
    stack = TierStack(RamIndex(1 << 20, 1 << 10), [tier], num_ranks=1, clock=lambda: time_s[0])
    num_steps, per_step, moved, sent = 12, 8, set[Key](), set[Key]()
    paths = [
        [*hot, *(b"path %d chunk %d" % (each, chunk) for chunk in range(3))] for each in range(num_steps * per_step)
    ]
    for path in paths:
        stack.start_lookup(path)
    for step in range(num_steps + 2):
        if step:
            sent.update(key for _, keys in depot.asked for key in keys)
        depot.answer()
        time_s[0] += step_s
        batch = paths[step * per_step : (step + 1) * per_step]
        for path in batch:
            stack.touch(path[::-1], [*((key,) for key in path[-2::-1]), ()])
        new = [key for path in batch for key in path if isinstance(stack.reserve(key, 1 << 10), Slot)]
        for move in stack.take_moves():
            moved.add(move.key)
            stack.on_move(move.move_id, MoveOutcome(1, None))
        before = {key: (path[place - 1],) if place else () for path in batch for place, key in enumerate(path)}
        stack.commit_all([(key, before[key]) for key in new])
        assert stack.num_waiting("object") == len(new), "only the chunks of this step wait for the next one"
    assert moved == {key for path in paths for key in path}
    is_each_old = step_s > FRESH_ANSWER_S
    assert not is_each_old or sent >= moved, "each path is looked up before its store"


def test_stores_stay_within_their_budgets() -> None:
    stores = Stores({}, store_bytes_per_s=100.0)
    keys = [b"key %d" % number for number in range(8)]
    assert isinstance(stores.index.reserve(keys[0], 250), Slot), "a chunk may exceed the remaining budget"
    assert stores.index.reserve(keys[1], 10) is Refusal.BUSY
    stores.time_s += 1.6
    assert isinstance(stores.index.reserve(keys[1], 10), Slot)
    packs = Stores({}, store_packs_per_s=2.0, pack_bytes=1)
    assert [isinstance(packs.index.reserve(key, 10), Slot) for key in keys[:4]] == [True, True, False, False]
    packs.time_s += 0.5
    assert [isinstance(packs.index.reserve(key, 10), Slot) for key in keys[2:5]] == [True, False, False]


def test_the_budget_of_packs_counts_only_new_packs() -> None:
    """A chunk added to the open pack costs no request."""
    stores = Stores({}, store_packs_per_s=1.0)
    slots = [stores.index.reserve(b"key %d" % number, 10) for number in range(100)]
    assert len({slot.pack for slot in slots if isinstance(slot, ObjectSlot)}) == 1
    assert all(isinstance(slot, ObjectSlot) for slot in slots)
    stores.index.end_batch()
    assert stores.index.reserve(b"next", 10) is Refusal.BUSY


def test_the_newest_path_of_a_key_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_checks, "MAX_ANNOUNCED", 4)
    stores = Stores({})
    stores.announce(A, B)
    stores.announce(A, C)
    stores.index.prepare_stores([A])
    assert [keys for _, keys in stores.depot.asked] == [(A, C)]
    stores.depot.answer()
    stores.announce(b"x", b"y")  # drops the first path, not the second
    stores.index.prepare_stores([B])
    assert not stores.depot.asked
    assert isinstance(stores.index.reserve(B, 10), Slot), "its path is dropped"
    assert stores.index._checks._path_of.keys() == {A, C, b"x", b"y"}
