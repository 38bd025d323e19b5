"""Eviction of any `TierIndex`: which chunks make room for a new one, and which never do.

`EvictionConformance` is for every tier. `ExactEvictionConformance` is for tiers that evict chunk by chunk, none before
its room is needed: a tier that frees larger pieces may pass it while it has room to spare. `LeafFirstConformance` is
for tiers that evict a key before the one that it extends.
"""

from __future__ import annotations

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Refusal, Slot, TierIndex
from kits.tiers.conformance.tier import CHUNK_BYTES, TierSuite, committed, reserved

A, B, C, D = b"key a", b"key b", b"key c", b"key d"
ROUNDS = 12
"""Number of times that a tier is filled, so that work beyond its capacity is included."""


def hits(index: TierIndex) -> list[Key]:
    return [key for key in (A, B, C, D) if index.lookup(key) is LookupResult.HIT]


class EvictionConformance(TierSuite):
    def flood(self, index: TierIndex, num_chunks: int) -> int:
        """Stores so many chunks under other keys; returns how many were taken."""
        taken = 0
        for number in range(num_chunks):
            key = b"flood %d" % number
            if isinstance(index.reserve(key, CHUNK_BYTES), Slot):
                taken += index.commit(key)
            assert index.used_bytes <= index.capacity_bytes
        return taken

    def test_a_pinned_key_is_never_evicted(self) -> None:
        index = self.make_index(4)
        committed(index, A, B)
        slot = index.pin(A)
        index.pin(A)
        index.unpin(A)
        assert self.flood(index, 4 * ROUNDS)
        assert hits(index) == [A]
        assert index.pin(A) == slot

    def test_a_reserved_key_is_never_evicted(self) -> None:
        index = self.make_index(4)
        reserved(index, A)
        self.flood(index, 4 * ROUNDS)
        assert index.lookup(A) is LookupResult.PENDING
        assert index.commit(A)

    def test_a_full_tier_takes_new_chunks(self) -> None:
        index = self.make_index(4)
        assert self.flood(index, 4 * ROUNDS) == 4 * ROUNDS

    def test_pinned_and_reserved_keys_leave_no_room(self) -> None:
        index = self.make_index(2)
        committed(index, A)
        index.pin(A)
        reserved(index, B)
        assert index.reserve(C, CHUNK_BYTES) is Refusal.NO_ROOM
        assert hits(index) == [A]

    def test_a_touched_key_outlives_the_others(self) -> None:
        index = self.make_index(4)
        committed(index, A, B)
        for number in range(4 * ROUNDS):
            index.touch([A])
            committed(index, b"flood %d" % number)
        assert hits(index) == [A]

    def test_a_refusal_evicts_nothing(self) -> None:
        index = self.make_index(3)
        committed(index, A, B, C)
        index.pin(C)
        assert index.reserve(D, self.bytes_of(3)) is Refusal.NO_ROOM
        assert index.reserve(D, self.bytes_of(3) + 1) is Refusal.TOO_LARGE
        assert hits(index) == [A, B, C]

    def test_touching_keys_that_are_not_committed_does_nothing(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        index.touch([A, B])
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.PENDING, LookupResult.MISS)


class ExactEvictionConformance(TierSuite):
    def test_the_first_committed_key_goes_first(self) -> None:
        index = self.make_index(3)
        reserved(index, A)
        reserved(index, B)
        index.commit(B)
        index.commit(A)
        committed(index, C, D)
        assert hits(index) == [A, C, D]

    def test_the_touched_key_of_a_full_tier_stays(self) -> None:
        index = self.make_index(3)
        committed(index, A, B, C)
        index.touch([A])
        committed(index, D)
        assert hits(index) == [A, C, D]

    def test_the_last_of_keys_touched_together_is_the_most_recent(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.touch([B, A])
        committed(index, C)
        assert hits(index) == [A, C]

    def test_a_lookup_is_not_a_use(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.lookup(A)
        committed(index, C)
        assert hits(index) == [B, C]

    def test_an_unpinned_key_is_the_most_recent(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.pin(A)
        index.unpin(A)
        committed(index, C)
        assert hits(index) == [A, C]

    def test_the_order_of_commits_and_unpins_is_the_order_of_use(self) -> None:
        index = self.make_index(3)
        index.reserve_all([(A, CHUNK_BYTES), (B, CHUNK_BYTES), (C, CHUNK_BYTES)])
        for key in (C, B, A):
            index.commit(key)
        committed(index, D)
        assert hits(index) == [A, B, D]
        index.pin_all([A, B])
        index.unpin_all([B, A])
        committed(index, C, b"key e")
        assert hits(index) == [A, C]

    def test_a_failed_pin_of_many_keys_changes_no_order(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        assert index.pin_all([A, D]) is None
        committed(index, C)
        assert hits(index) == [B, C]

    def test_the_pinned_key_of_a_full_tier_stays(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.pin(A)
        index.pin(A)
        index.unpin(A)
        committed(index, C, D)
        assert hits(index) == [A, D]

    def test_a_reserved_key_that_fills_the_tier_stays(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        assert index.reserve(B, CHUNK_BYTES) is Refusal.NO_ROOM
        assert index.commit(A)

    def test_no_more_is_evicted_than_is_needed(self) -> None:
        index = self.make_index(4)
        committed(index, A, B, C)
        reserved(index, D, self.bytes_of(2))
        assert hits(index) == [B, C]

    def test_nothing_is_evicted_while_there_is_room(self) -> None:
        index = self.make_index(3)
        committed(index, A, B, C)
        assert hits(index) == [A, B, C]
        assert index.take_counts().evictions == 0

    def test_any_free_space_serves_any_chunk(self) -> None:
        index = self.make_index(4)
        committed(index, A, B, C, D)
        index.invalidate(A)
        index.invalidate(C)
        slot = reserved(index, b"key e", self.bytes_of(2))
        assert slot.num_bytes == self.bytes_of(2)
        assert hits(index) == [B, D]


class LeafFirstConformance(TierSuite):
    """Contract of a tier that evicts chunk by chunk and holds chunks of its own, not answers of other tiers."""

    def test_a_key_is_evicted_after_those_that_extend_it(self) -> None:
        index = self.make_index(3)
        self.extend(index, A, B, C)
        committed(index, D)
        assert hits(index) == [A, B, D]
        committed(index, b"key e")
        assert hits(index) == [A, D], "a key without extensions is the next to go"

    def test_touching_the_last_key_of_a_path_makes_the_path_recent(self) -> None:
        index = self.make_index(4)
        self.extend(index, A, B)
        committed(index, C, D)
        index.touch([B])
        committed(index, b"key e", b"key f")
        assert hits(index) == [A, B]

    def test_a_path_that_fills_the_tier_evicts_none_of_its_own_keys(self) -> None:
        index = self.make_index(3)
        committed(index, D)
        self.extend(index, A, B, C)
        assert hits(index) == [A, B, C]
        assert index.reserve(D, CHUNK_BYTES, (b"unknown", C)) is Refusal.NO_ROOM
        assert hits(index) == [A, B, C]
        assert isinstance(index.reserve(D, CHUNK_BYTES, (b"unknown",)), Slot)
        assert hits(index) == [A, B]

    def test_a_key_that_a_pinned_key_extends_leaves_no_room(self) -> None:
        index = self.make_index(3)
        self.extend(index, A, B, C)
        index.pin(B)
        assert index.reserve(D, self.bytes_of(2)) is Refusal.NO_ROOM
        assert hits(index) == [A, B, C]
        committed(index, D)
        assert hits(index) == [A, B, D]

    def test_several_keys_extend_one(self) -> None:
        index = self.make_index(4)
        self.extend(index, A, B)
        committed(index, C)
        index.touch([C], [(A,)])
        committed(index, D, b"key e")
        assert hits(index) == [A, C, D]
        committed(index, b"key f")
        assert hits(index) == [A, D]
        committed(index, b"key g")
        assert hits(index) == [D]

    def test_a_key_used_after_its_extension_is_the_most_recent(self) -> None:
        index = self.make_index(4)
        self.extend(index, A, B)
        committed(index, C)
        index.touch([A])
        committed(index, D, b"key e")
        assert hits(index) == [A, C, D]
        committed(index, b"key f")
        assert hits(index) == [A, D]

    def test_a_touch_may_set_which_keys_extend(self) -> None:
        index = self.make_index(3)
        committed(index, A, B, C)
        index.touch([C, B, A], [(B, A), (D, A), (C,)])
        committed(index, D)
        assert hits(index) == [A, B, D], "a cycle is ignored"

    def test_extensions_of_an_invalidated_key_extend_its_predecessor(self) -> None:
        index = self.make_index(4)
        self.extend(index, A, B, C)
        index.invalidate(B)
        committed(index, D, b"key e", b"key f")
        assert hits(index) == [A, D]
        committed(index, b"key g")
        assert hits(index) == [D]

    @staticmethod
    def extend(index: TierIndex, *keys: Key) -> None:
        """Stores keys that each extend the one before."""
        for number, key in enumerate(keys):
            assert isinstance(index.reserve(key, CHUNK_BYTES, keys[max(number - 1, 0) : number]), Slot)
            assert index.commit(key)
