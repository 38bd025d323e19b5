"""What any `TierIndex` gives up for a new chunk, in which order, and what it never gives up."""

from __future__ import annotations

from hybridkv.planner import LookupResult
from hybridkv.tiers.conformance.tier import CHUNK_BYTES, TierSuite, committed, reserved
from hybridkv.tiers.contract import Key, Refusal, TierIndex

A, B, C, D = b"key a", b"key b", b"key c", b"key d"


def hits(index: TierIndex) -> list[Key]:
    return [key for key in (A, B, C, D) if index.lookup(key) is LookupResult.HIT]


class EvictionConformance(TierSuite):
    def test_the_first_committed_key_goes_first(self) -> None:
        index = self.make_index(3)
        reserved(index, A)
        reserved(index, B)
        index.commit(B)
        index.commit(A)
        committed(index, C, D)
        assert hits(index) == [A, C, D]

    def test_a_touched_key_outlives_the_others(self) -> None:
        index = self.make_index(3)
        committed(index, A, B, C)
        index.touch([A])
        committed(index, D)
        assert hits(index) == [A, C, D]

    def test_of_keys_touched_together_the_last_is_the_most_recent(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.touch([B, A])
        committed(index, C)
        assert hits(index) == [A, C]

    def test_touching_keys_that_are_not_committed_does_nothing(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        index.touch([A, B])
        assert (index.lookup(A), index.lookup(B)) == (LookupResult.PENDING, LookupResult.MISS)

    def test_a_lookup_is_no_use(self) -> None:
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

    def test_a_pinned_key_is_never_evicted(self) -> None:
        index = self.make_index(2)
        committed(index, A, B)
        index.pin(A)
        index.pin(A)
        index.unpin(A)
        committed(index, C, D)
        assert hits(index) == [A, D]

    def test_a_reserved_key_is_never_evicted(self) -> None:
        index = self.make_index(1)
        reserved(index, A)
        assert index.reserve(B, CHUNK_BYTES) is Refusal.NO_ROOM
        assert index.commit(A)

    def test_a_refusal_evicts_nothing(self) -> None:
        index = self.make_index(3)
        committed(index, A, B, C)
        index.pin(C)
        assert index.reserve(D, 3 * CHUNK_BYTES) is Refusal.NO_ROOM
        assert index.reserve(D, 4 * CHUNK_BYTES) is Refusal.TOO_LARGE
        assert hits(index) == [A, B, C]

    def test_no_more_is_evicted_than_is_needed(self) -> None:
        index = self.make_index(4)
        committed(index, A, B, C)
        reserved(index, D, 2 * CHUNK_BYTES)
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
        slot = reserved(index, b"key e", 2 * CHUNK_BYTES)
        assert slot.num_bytes == 2 * CHUNK_BYTES
        assert hits(index) == [B, D]
