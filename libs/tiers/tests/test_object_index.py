"""What an index of a fleet's store asks, believes and doubts; time and the store are the test's."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from played_objects import PlayedDepot  # noqa: E402

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
from hybridkv.tiers.object import ObjectIndex, ObjectOptions, ObjectSlot, PackPlace  # noqa: E402
from hybridkv.tiers.object import index as index_module  # noqa: E402
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
    depot: PlayedDepot

    def make_tier(self, capacity_bytes: int) -> Tier:
        self.depot = PlayedDepot(self.now_s, {})
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
        return Tier(FaultInjectingIndex(tier.index, FaultPlan()), tier.medium)


class World:
    """An index over a store that holds A and B."""

    def __init__(self, *, clears_all: bool = False, **options: float) -> None:
        self.time_s = 0.0
        self.depot = PlayedDepot(
            lambda: self.time_s, {A: PackPlace("p", 0, CHUNK_BYTES), B: PackPlace("q", 7, CHUNK_BYTES)}
        )
        self.index = ObjectIndex(self.depot, ObjectOptions(**options), lambda: self.time_s, clears_all=clears_all)

    def hear(self, *keys: Key) -> list[LookupResult]:
        self.index.start_lookup(keys, self.time_s + 1.0)
        self.depot.answer()
        return [self.index.lookup(key) for key in keys]

    def reserve(self, key: Key, num_bytes: int = CHUNK_BYTES, extends: Extends = ()) -> ObjectSlot:
        slot = self.index.reserve(key, num_bytes, extends)
        assert isinstance(slot, ObjectSlot)
        return slot


def test_an_index_of_objects_gathers_places() -> None:
    assert isinstance(World().index, BatchedIndex)


def test_what_was_found_is_offered_where_it_lies() -> None:
    world = World()
    assert world.hear(A, B, C) == [HIT, HIT, MISS]
    slot = world.index.pin(B)
    assert isinstance(slot, ObjectSlot)
    assert (slot.pack, slot.offset, slot.num_bytes) == ("q", 7, CHUNK_BYTES)


def test_a_prompt_is_one_question() -> None:
    world = World()
    world.index.start_lookup([A, B, C], 1.0)
    assert [keys for _, keys in world.depot.asked] == [(A, B, C)]


def test_a_store_that_cannot_be_asked_leaves_nobody_waiting() -> None:
    world = World()
    world.depot.is_reachable = False
    world.index.start_lookup([A], 1.0)
    assert world.index.lookup(A) is MISS


def test_a_question_without_an_answer_is_over() -> None:
    world = World()
    world.index.start_lookup([A, B], 1.0)
    world.depot.fail()
    assert not world.index.any_pending([A, B])
    assert world.index.lookup_counts == (0, 2)


def test_what_is_not_there_is_not_asked_for_again_for_a_while() -> None:
    world = World(missing_s=5.0)
    world.hear(C)
    world.index.start_lookup([C], 2.0)
    assert not world.depot.asked
    world.time_s = 5.1
    world.index.start_lookup([C], 6.0)
    assert world.depot.asked


def test_what_was_found_is_believed_for_a_while_and_then_asked_for_again() -> None:
    world = World(found_s=60.0)
    world.hear(A)
    world.time_s = 59.0
    assert world.index.lookup(A) is HIT
    world.time_s = 60.0
    assert world.index.lookup(A) is MISS
    assert world.hear(A) == [HIT]


def test_what_faded_is_not_stored_again_before_somebody_asked() -> None:
    world = World(found_s=60.0, missing_s=1.0)
    world.hear(A, B)
    world.time_s = 60.0
    assert not world.index.lacks(A) and world.index.lacks(C)
    del world.depot.held[A]
    assert world.hear(A) == [MISS]
    assert world.index.lacks(A) and not world.index.lacks(B)


def test_what_is_read_while_it_fades_stays_until_it_is_read() -> None:
    world = World(found_s=60.0)
    world.hear(A)
    world.index.pin(A)
    world.time_s = 60.0
    assert world.index.lookup(A) is HIT
    world.index.unpin(A)
    assert world.index.lookup(A) is MISS


@pytest.mark.parametrize("reason", [FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.MISSING])
def test_a_bad_place_is_not_learned_again_and_its_manifest_is_withdrawn(reason: FailureReason) -> None:
    world = World(bad_s=100.0, missing_s=1.0)
    world.hear(A)
    world.index.invalidate(A, reason)
    world.time_s = 2.0
    assert world.hear(A) == [MISS]
    assert world.depot.retracted == [(A, PackPlace("p", 0, CHUNK_BYTES, b"source"))]
    world.depot.held[A] = PackPlace("p2", 0, CHUNK_BYTES)
    world.time_s = 4.0
    assert world.hear(A) == [HIT], "another place is as good as any"


def test_what_failed_for_another_reason_is_believed_again() -> None:
    world = World(missing_s=1.0)
    world.hear(A)
    world.index.invalidate(A)
    assert world.hear(A) == [HIT]
    assert not world.depot.retracted


def test_chunks_of_one_group_and_one_batch_lie_one_behind_the_other() -> None:
    world = World()
    first, second = world.reserve(FULL + b"1"), world.reserve(FULL + b"2")
    assert first.pack == second.pack
    assert second.offset >= first.offset + CHUNK_BYTES
    assert world.reserve(WINDOW + b"1").pack != first.pack, "groups are read apart"
    world.index.end_batch()
    assert world.reserve(FULL + b"3").pack != first.pack


def test_a_full_pack_is_followed_by_another() -> None:
    world = World(pack_bytes=3 * CHUNK_BYTES)
    packs = [world.reserve(FULL + bytes([number])).pack for number in range(5)]
    assert packs[0] == packs[1] != packs[2] == packs[3] != packs[4]


def test_a_batch_is_named_when_the_last_of_it_has_come() -> None:
    world = World()
    world.reserve(FULL + b"1")
    world.reserve(FULL + b"2", extends=(FULL + b"1",))
    world.index.commit(FULL + b"1")
    world.index.end_batch()
    assert not world.depot.published
    world.index.commit(FULL + b"2")
    assert [(stored.key, stored.needs) for stored in world.depot.published] == [
        (FULL + b"1", ()),
        (FULL + b"2", (FULL + b"1",)),
    ]


def test_what_came_before_its_batch_had_ended_is_named_at_its_end() -> None:
    world = World()
    world.reserve(FULL + b"1")
    world.index.commit(FULL + b"1")
    assert not world.depot.published
    world.index.end_batch()
    assert len(world.depot.published) == 1


def test_what_did_not_come_is_not_named() -> None:
    world = World()
    world.reserve(FULL + b"1")
    world.reserve(FULL + b"2")
    world.index.end_batch()
    world.index.invalidate(FULL + b"1")
    assert not world.index.commit(FULL + b"1")
    world.index.abort(FULL + b"2")
    assert not world.depot.published


def test_a_reset_is_this_engines_own_unless_it_is_told_otherwise() -> None:
    world = World()
    world.hear(A)
    world.reserve(FULL + b"1")
    assert world.index.clear() == 2
    assert world.depot.cleared == [False]
    world.index.end_batch()
    assert not world.index.commit(FULL + b"1")
    assert not world.depot.published
    world = World(clears_all=True)
    world.index.clear()
    assert world.depot.cleared == [True]


def test_what_has_come_at_the_end_is_named() -> None:
    world = World()
    world.reserve(FULL + b"1")
    world.reserve(FULL + b"2")
    world.index.end_batch()
    world.index.commit(FULL + b"1")
    world.index.close()
    assert [stored.key for stored in world.depot.published] == [FULL + b"1"]
    assert world.depot.is_closed
    assert not world.index.commit(FULL + b"2"), "what comes later is nobody's"


def test_no_two_engines_name_a_pack_alike() -> None:
    assert World().reserve(A).pack != World().reserve(A).pack


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(TierConfigurationError, match="pack_bytes"):
        ObjectOptions(pack_bytes=0)


def test_a_slot_that_was_found_is_a_slot() -> None:
    world = World()
    world.hear(A, B)
    slots = world.index.pin_all([A, B])
    assert slots is not None
    assert all(isinstance(slot, Slot) for slot in slots)
    assert len({slot.first_offset for slot in slots}) == 2


def test_before_the_store_is_reached_nothing_is_stored_and_asking_again_helps() -> None:
    world = World()
    world.depot.namespace = None
    assert world.index.reserve(FULL + b"1", CHUNK_BYTES) is Refusal.BUSY
    world.depot.namespace = "n"
    world.reserve(FULL + b"1")


def test_when_another_epoch_begins_nothing_of_the_last_one_is_offered_or_named() -> None:
    world = World()
    world.hear(A)
    world.index.start_lookup([C], 1.0)
    first = world.reserve(FULL + b"1")
    world.depot.move()
    assert [world.index.lookup(key) for key in (A, C)] == [MISS, MISS]
    assert not world.index.commit(FULL + b"1")
    assert world.reserve(FULL + b"2").pack != first.pack
    world.index.end_batch()
    world.index.commit(FULL + b"2")
    assert [stored.key for stored in world.depot.published] == [FULL + b"2"]
    assert world.index.take_counts().invalidations == 0


def test_what_was_heard_of_makes_room_the_oldest_answer_first() -> None:
    world = World(known_bytes=2 * CHUNK_BYTES)
    world.depot.held[C] = PackPlace("r", 0, CHUNK_BYTES)
    assert world.hear(A) == [HIT]
    assert world.hear(B) == [HIT]
    assert world.hear(C) == [HIT]
    assert [world.index.lookup(key) for key in (A, B)] == [MISS, HIT]
    world.index.pin(B)
    world.reserve(FULL + b"1")
    assert [world.index.lookup(key) for key in (B, C)] == [HIT, MISS], "what is read stays"
    assert world.index.used_bytes == world.index.capacity_bytes
    assert world.index.take_counts().evictions == 2


def test_of_an_answer_for_which_there_is_no_room_the_beginning_is_known() -> None:
    world = World(max_known=2)
    keys = [FULL + bytes([number]) * 32 for number in range(3)]
    world.depot.held |= {key: PackPlace("p", place, CHUNK_BYTES) for place, key in enumerate(keys)}
    assert world.hear(*keys) == [HIT, HIT, MISS]


def test_what_nobody_knows_any_more_takes_no_room() -> None:
    world = World(found_s=60.0)
    world.hear(A, B)
    world.index.pin(A)
    world.index.unpin(A)
    assert (world.index.num_keys, world.index.used_bytes) == (2, 2 * CHUNK_BYTES)
    world.time_s = 61.0
    assert world.index.generation and (world.index.num_keys, world.index.used_bytes) == (0, 0)


def test_a_key_that_was_withdrawn_is_asked_for_again_by_a_question_of_its_own() -> None:
    world = World()
    world.index.start_lookup([A, B], 1.0)
    world.index.invalidate(A)
    world.index.start_lookup([A, B], 1.0)
    assert [keys for _, keys in world.depot.asked] == [(A, B), (A,)]
    world.depot.answer()
    assert [world.index.lookup(key) for key in (A, B)] == [HIT, HIT]
    assert world.index.lookup_counts == (2, 0)


# Looking before storing.


class Stores:
    """An index of a played store, and its time."""

    def __init__(self, held: dict[Key, PackPlace], **options: object) -> None:
        self.time_s = 0.0
        self.depot = PlayedDepot(lambda: self.time_s, held)
        self.index = ObjectIndex(self.depot, ObjectOptions(**options), lambda: self.time_s)  # type: ignore[arg-type]

    def announce(self, *keys: Key) -> None:
        """A request has a path that is about to be stored."""
        self.index.touch(keys[::-1], [*((key,) for key in keys[-2::-1]), ()])


def test_what_was_not_looked_up_is_before_it_is_stored() -> None:
    stores = Stores({A: PackPlace("p", 0, 100), B: PackPlace("p", 300, 100)})
    stores.announce(A, B, C)
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    assert [keys for _, keys in stores.depot.asked] == [(A, B, C)], "the whole path is one lookup"
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.depot.answer()
    assert [stores.index.reserve(key, 100) for key in (A, B)] == [Refusal.PRESENT] * 2
    assert isinstance(stores.index.reserve(C, 100), Slot)


def test_what_was_looked_up_lately_is_stored_at_once() -> None:
    stores = Stores({})
    stores.index.start_lookup([A, B], 1.0)
    stores.depot.answer()
    assert stores.index.lookup(A) is MISS
    stores.announce(A, B)
    assert isinstance(stores.index.reserve(A, 100), Slot)
    stores.time_s += 10.0
    assert stores.index.reserve(B, 100) is Refusal.BUSY, "another engine may have stored it meanwhile"
    stores.depot.answer()
    assert isinstance(stores.index.reserve(B, 100), Slot)


def test_a_store_that_does_not_answer_is_awaited_once_and_not_for_long() -> None:
    stores = Stores({}, check_timeout_s=1.0)
    stores.announce(A, B)
    assert stores.index.reserve(A, 100) is Refusal.BUSY
    stores.time_s += 1.1
    assert isinstance(stores.index.reserve(A, 100), Slot)
    assert isinstance(stores.index.reserve(B, 100), Slot)


def test_a_store_that_cannot_be_asked_is_stored_to() -> None:
    stores = Stores({})
    stores.depot.is_reachable = False
    stores.announce(A)
    assert isinstance(stores.index.reserve(A, 100), Slot)


def test_no_more_is_stored_than_the_budgets_say() -> None:
    stores = Stores({}, store_bytes_per_s=100.0)
    keys = [b"key %d" % number for number in range(8)]
    assert isinstance(stores.index.reserve(keys[0], 250), Slot), "a chunk may be larger than what is left"
    assert stores.index.reserve(keys[1], 10) is Refusal.BUSY
    stores.time_s += 1.6
    assert isinstance(stores.index.reserve(keys[1], 10), Slot)
    packs = Stores({}, store_packs_per_s=2.0, pack_bytes=1)
    assert [isinstance(packs.index.reserve(key, 10), Slot) for key in keys[:4]] == [True, True, False, False]
    packs.time_s += 0.5
    assert [isinstance(packs.index.reserve(key, 10), Slot) for key in keys[2:5]] == [True, False, False]


def test_the_budget_of_packs_is_for_new_packs_alone() -> None:
    """What goes into the open pack costs no request."""
    stores = Stores({}, store_packs_per_s=1.0)
    slots = [stores.index.reserve(b"key %d" % number, 10) for number in range(100)]
    assert len({slot.pack for slot in slots if isinstance(slot, ObjectSlot)}) == 1
    assert all(isinstance(slot, ObjectSlot) for slot in slots)
    stores.index.end_batch()
    assert stores.index.reserve(b"next", 10) is Refusal.BUSY


def test_the_newest_path_of_a_key_is_looked_up_and_a_dropped_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_ANNOUNCED", 4)
    stores = Stores({})
    stores.announce(A, B)
    stores.announce(A, C)
    assert stores.index.reserve(A, 10) is Refusal.BUSY
    assert [keys for _, keys in stores.depot.asked] == [(A, C)]
    stores.depot.answer()
    stores.announce(b"x", b"y")  # drops the first path, not the second
    assert isinstance(stores.index.reserve(B, 10), Slot), "its path is dropped"
    assert stores.index._path_of.keys() == {A, C, b"x", b"y"}


def test_nothing_is_looked_up_while_the_budget_is_spent() -> None:
    stores = Stores({}, store_bytes_per_s=100.0)
    assert isinstance(stores.index.reserve(b"first", 250), Slot)
    stores.announce(A, B)
    assert stores.index.reserve(A, 10) is Refusal.BUSY
    assert not stores.depot.asked
