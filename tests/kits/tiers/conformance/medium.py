"""Contract of any `TierMedium` about bytes, above all when it cannot return the stored ones."""

from __future__ import annotations

import xxhash

from hybridkv.tiers.contract import FailureReason, Slot, Ticket, TierMedium
from kits.tiers.conformance.tier import (
    CHUNK_BYTES,
    Tier,
    TierSuite,
    failure_of,
    finish,
    reserved,
)

A, B = b"key a", b"key b"
NUM_BYTES = CHUNK_BYTES + 7
POISON = 0xA5
FIRST, SECOND = Ticket(1), Ticket(2)


def chunk_bytes(seed: int, num_bytes: int = NUM_BYTES) -> bytes:
    return bytes((seed + 31 * position) % 251 for position in range(num_bytes))


class MediumConformance(TierSuite):
    def stored(self, seed: int = 1) -> tuple[Tier, Slot]:
        """A tier that holds one chunk under A."""
        tier = self.make_tier_of(8)
        slot = reserved(tier.index, A, NUM_BYTES)
        tier.medium.store(FIRST, A, slot, [chunk_bytes(seed)])
        assert failure_of(tier.medium, FIRST) is None
        return tier, slot

    def test_a_medium_is_a_tier_medium(self) -> None:
        assert isinstance(self.make_tier_of(1).medium, TierMedium)

    def test_a_stored_chunk_is_loaded(self) -> None:
        tier, slot = self.stored()
        destination = bytearray(NUM_BYTES)
        tier.medium.load(SECOND, A, slot, [destination])
        assert failure_of(tier.medium, SECOND) is None
        assert destination == chunk_bytes(1)

    def test_buffers_may_be_split_anywhere(self) -> None:
        tier = self.make_tier_of(4)
        slot = reserved(tier.index, A, NUM_BYTES)
        chunk = chunk_bytes(3)
        tier.medium.store(FIRST, A, slot, [chunk[:5], b"", memoryview(chunk)[5:4000], chunk[4000:]])
        assert failure_of(tier.medium, FIRST) is None
        parts = [bytearray(1), bytearray(4098), bytearray(NUM_BYTES - 4099)]
        tier.medium.load(SECOND, A, slot, parts)
        assert failure_of(tier.medium, SECOND) is None
        assert b"".join(parts) == chunk

    def test_the_source_may_be_reused_after_its_completion(self) -> None:
        tier = self.make_tier_of(4)
        slot = reserved(tier.index, A, NUM_BYTES)
        source = bytearray(chunk_bytes(1))
        tier.medium.store(FIRST, A, slot, [source])
        assert failure_of(tier.medium, FIRST) is None
        source[:] = bytes(NUM_BYTES)
        destination = bytearray(NUM_BYTES)
        tier.medium.load(SECOND, A, slot, [destination])
        assert failure_of(tier.medium, SECOND) is None
        assert destination == chunk_bytes(1)

    def test_chunks_do_not_disturb_each_other(self) -> None:
        tier, slot = self.stored()
        other = reserved(tier.index, B, NUM_BYTES)
        tier.medium.store(SECOND, B, other, [chunk_bytes(2)])
        assert failure_of(tier.medium, SECOND) is None
        loaded = {A: bytearray(NUM_BYTES), B: bytearray(NUM_BYTES)}
        tier.medium.load(FIRST, A, slot, [loaded[A]])
        tier.medium.load(SECOND, B, other, [loaded[B]])
        assert {completion.failure for completion in finish(tier.medium)} == {None}
        assert loaded == {A: chunk_bytes(1), B: chunk_bytes(2)}

    def test_every_operation_completes_once_with_its_ticket(self) -> None:
        tier, slot = self.stored()
        tickets = [Ticket(number) for number in range(10, 20)]
        for ticket in tickets:
            tier.medium.load(ticket, A, slot, [bytearray(NUM_BYTES)])
        completions = finish(tier.medium)
        assert sorted(completion.ticket for completion in completions) == tickets
        assert {completion.failure for completion in completions} == {None}
        assert finish(tier.medium) == []

    def test_a_reported_checksum_is_that_of_the_bytes(self) -> None:
        tier = self.make_tier_of(4)
        slot = reserved(tier.index, A, NUM_BYTES)
        chunk = chunk_bytes(5)
        tier.medium.store(FIRST, A, slot, [chunk[:100], chunk[100:]])
        stored = finish(tier.medium)
        tier.medium.load(SECOND, A, slot, [bytearray(NUM_BYTES)])
        for completion in (*stored, *finish(tier.medium)):
            assert completion.failure is None
            assert completion.checksum in (None, xxhash.xxh3_128_digest(chunk))

    def test_a_chunk_that_was_never_stored_is_missing(self) -> None:
        tier = self.make_tier_of(4)
        slot = reserved(tier.index, A, NUM_BYTES)
        self._expect_failed_load(tier.medium, A, slot, FailureReason.MISSING)

    def test_bytes_of_another_key_are_not_loaded(self) -> None:
        tier, slot = self.stored()
        self._expect_failed_load(tier.medium, B, slot, FailureReason.WRONG_KEY)

    def test_a_reused_slot_belongs_to_its_new_key(self) -> None:
        tier, slot = self.stored()
        tier.medium.store(SECOND, B, slot, [chunk_bytes(2)])
        assert failure_of(tier.medium, SECOND) is None
        self._expect_failed_load(tier.medium, A, slot, FailureReason.WRONG_KEY)

    def test_one_corrupted_byte_fails_the_load(self) -> None:
        tier, slot = self.stored()
        self.corrupt(tier.medium, slot)
        self._expect_failed_load(tier.medium, A, slot, FailureReason.CHECKSUM)

    def test_a_store_of_another_size_fails(self) -> None:
        tier, slot = self.stored()
        for num_bytes in (0, NUM_BYTES - 1, NUM_BYTES + 1):
            tier.medium.store(SECOND, A, slot, [chunk_bytes(1, num_bytes)])
            failure = failure_of(tier.medium, SECOND)
            assert failure is not None
            assert failure.reason is FailureReason.IO

    def test_a_load_of_another_size_fails(self) -> None:
        tier, slot = self.stored()
        for num_bytes in (NUM_BYTES - 1, NUM_BYTES + 1):
            self._expect_failed_load(tier.medium, A, slot, FailureReason.IO, num_bytes)

    def test_a_load_into_read_only_memory_fails(self) -> None:
        tier, slot = self.stored()
        tier.medium.load(SECOND, A, slot, [bytes(NUM_BYTES)])
        failure = failure_of(tier.medium, SECOND)
        assert failure is not None
        assert failure.reason is FailureReason.IO

    def test_a_buffer_that_is_not_contiguous_fails(self) -> None:
        tier, slot = self.stored()
        tier.medium.load(SECOND, A, slot, [memoryview(bytearray(2 * NUM_BYTES))[::2]])
        failure = failure_of(tier.medium, SECOND)
        assert failure is not None
        assert failure.reason is FailureReason.IO

    def test_a_slot_without_bytes_fails(self) -> None:
        medium = self.make_tier_of(1).medium
        medium.store(FIRST, A, Slot(()), [])
        failure = failure_of(medium, FIRST)
        assert failure is not None
        assert failure.reason is FailureReason.IO

    def test_a_closed_medium_fails_every_operation(self) -> None:
        tier, slot = self.stored()
        tier.medium.close()
        tier.medium.close()
        tier.medium.store(FIRST, A, slot, [chunk_bytes(1)])
        failure = failure_of(tier.medium, FIRST)
        assert failure is not None
        assert failure.reason is FailureReason.CLOSED
        self._expect_failed_load(tier.medium, A, slot, FailureReason.CLOSED)

    def _expect_failed_load(
        self, medium: TierMedium, key: bytes, slot: Slot, reason: FailureReason, num_bytes: int = NUM_BYTES
    ) -> None:
        destination = bytearray([POISON]) * num_bytes
        medium.load(SECOND, key, slot, [destination])
        failure = failure_of(medium, SECOND)
        assert failure is not None, "wrong bytes were returned as valid"
        assert failure.reason is reason
