"""Index of an object store: lookups, cached results and stores, with a clock and a store under the test's control."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("kits.tiers.conformance")

from played_objects import FakeObjectClient  # noqa: E402

from hybridkv.planner import LookupResult  # noqa: E402
from hybridkv.tiers import (  # noqa: E402
    BatchedIndex,
    Extends,
    Failure,
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
)
from hybridkv.tiers.ram import RamIndex  # noqa: E402
from hybridkv.tiers.stack import MoveOutcome, SecondaryTier, TierStack  # noqa: E402
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


def test_chunks_that_were_evicted_take_no_memory_and_expire_no_other_chunk() -> None:
    """Chunks that were stored, and chunks that were found and read."""
    bench = IndexBench(found_s=60.0, max_known=2, max_open_keys=1)
    bench.look_up(A)
    bench.index.pin(A)
    bench.index.unpin(A)
    bench.time_s = 1.0
    bench.reserve(C)
    bench.index.commit(C)
    bench.time_s = 2.0
    for number in range(20):
        key = FULL + bytes([number])
        bench.depot.held[key] = PackPlace("p", number, CHUNK_BYTES)
        if number % 2:
            assert bench.look_up(key) == [HIT]
            bench.index.pin(key)
            bench.index.unpin(key)
        else:
            bench.reserve(key)
            bench.index.commit(key)
        bench.index.touch([C])
    remembered = [key for _, _, places in bench.index._found._answers for key in places]
    assert len(bench.index._expiries) <= 4 and len(remembered) <= 4
    bench.time_s = 60.0
    assert bench.index.lookup(C) is HIT
    bench.time_s = 61.0
    assert bench.index.lookup(C) is MISS


def test_a_pinned_result_expires_after_its_unpin() -> None:
    bench = IndexBench(found_s=60.0)
    bench.look_up(A)
    bench.index.pin(A)
    bench.time_s = 60.0
    assert bench.index.lookup(A) is HIT
    bench.index.unpin(A)
    assert bench.index.lookup(A) is MISS


def test_a_chunk_that_is_found_during_its_reservation_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = IndexBench()
    bench.index.touch([A], [()])
    bench.index.start_lookup([A], 1.0)
    bench.time_s = 1.5  # the lookup has timed out, and its answer comes late
    is_storable = bench.index._is_storable

    def answer_late() -> bool:
        """Called between the two places where `reserve` reads the client's events."""
        bench.depot.answer()
        return is_storable()

    monkeypatch.setattr(bench.index, "_is_storable", answer_late)
    assert bench.index.reserve(A, CHUNK_BYTES) is Refusal.PRESENT
    assert bench.index.pin(A) is not None


@pytest.mark.parametrize("wait_s", [1.0, 3.0])
def test_wrong_bytes_are_retracted_even_if_the_result_has_expired_meanwhile(wait_s: float) -> None:
    bench = IndexBench(found_s=60.0)
    stack = TierStack(RamIndex(1 << 20, CHUNK_BYTES), [SecondaryTier("object", bench.index)], 1, lambda: bench.time_s)
    bench.look_up(A)
    bench.index.pin(A)
    bench.index.unpin(A)
    bench.time_s = 58.0
    stack.acquire("r", [A])
    (move,) = stack.take_moves()
    bench.time_s += wait_s
    bench.index.lookup(A)
    stack.on_move(move.move_id, MoveOutcome(1, Failure(FailureReason.CHECKSUM, "wrong bytes")))
    assert [key for key, _ in bench.depot.retracted] == [A]


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
