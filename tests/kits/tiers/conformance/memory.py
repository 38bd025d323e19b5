"""Contract of any `SealedMemory`: writes by address, reads by view, and the bytes that a seal covers."""

from __future__ import annotations

import ctypes
import threading

import xxhash

from hybridkv.tiers.contract import ExposesBytes, Failure, FailureReason, Key, SealedMemory, Slot
from kits.tiers.conformance.tier import CHUNK_BYTES, is_protocol_error

A, B = b"key a", b"key b"
NUM_CHUNKS = 8
CAPACITY_BYTES = NUM_CHUNKS * CHUNK_BYTES
SCATTERED = Slot(((1 * CHUNK_BYTES, CHUNK_BYTES), (4 * CHUNK_BYTES, CHUNK_BYTES), (6 * CHUNK_BYTES, 100)))
"""Three extents; the last one is no whole chunk."""


def reason(failure: Failure | None) -> FailureReason | None:
    return None if failure is None else failure.reason


def bytes_of(memory: SealedMemory, slot: Slot) -> bytes:
    return b"".join(bytes(view) for view in memory.views(slot))


def seal(memory: SealedMemory, key: Key, slot: Slot) -> Failure | None:
    [failure] = memory.seal_all([(key, slot)])
    return failure


def check(memory: SealedMemory, key: Key, slot: Slot) -> Failure | None:
    [failure] = memory.check_all([(key, slot)])
    return failure


class SealedMemoryConformance:
    """Derive from it and define `make_memory`."""

    def make_memory(self, capacity_bytes: int) -> SealedMemory:
        """New memory of exactly this capacity, a multiple of `CHUNK_BYTES`."""
        raise NotImplementedError

    def sealed(self, slot: Slot = SCATTERED, key: Key = A) -> SealedMemory:
        """Memory with the slot filled, each chunk with other bytes, and sealed for the key."""
        memory = self.make_memory(CAPACITY_BYTES)
        for number, view in enumerate(memory.views(slot)):
            view[:] = bytes((number + position) % 251 for position in range(len(view)))
        assert seal(memory, key, slot) is None
        return memory

    def test_memory_is_sealed_memory(self) -> None:
        memory = self.make_memory(CAPACITY_BYTES)
        assert isinstance(memory, SealedMemory) and isinstance(memory, ExposesBytes)
        assert memory.capacity_bytes == CAPACITY_BYTES

    def test_addresses_and_views_are_the_same_memory(self) -> None:
        memory = self.sealed()
        by_address = [ctypes.string_at(address, num_bytes) for address, num_bytes in memory.addresses(SCATTERED)]
        assert by_address == [bytes(view) for view in memory.views(SCATTERED)]

    def test_an_address_is_the_base_and_the_offset(self) -> None:
        memory = self.make_memory(CAPACITY_BYTES)
        expected = [(memory.base_address + offset, num_bytes) for offset, num_bytes in SCATTERED.extents]
        assert memory.addresses(SCATTERED) == expected

    def test_a_sealed_slot_passes_its_check(self) -> None:
        assert check(self.sealed(), A, SCATTERED) is None

    def test_a_slot_that_was_never_sealed_is_missing(self) -> None:
        memory = self.make_memory(CAPACITY_BYTES)
        assert reason(check(memory, A, SCATTERED)) is FailureReason.MISSING
        assert memory.sealed_checksum(A, SCATTERED) is None

    def test_a_seal_covers_every_extent(self) -> None:
        for extent, position in ((0, 0), (1, CHUNK_BYTES - 1), (2, 99)):
            memory = self.sealed()
            memory.views(SCATTERED)[extent][position] ^= 1
            assert reason(check(memory, A, SCATTERED)) is FailureReason.CHECKSUM
            memory.views(SCATTERED)[extent][position] ^= 1
            assert check(memory, A, SCATTERED) is None

    def test_bytes_in_another_order_break_the_seal(self) -> None:
        first, second, third = SCATTERED.extents
        assert reason(check(self.sealed(), A, Slot((first, third, second)))) is FailureReason.CHECKSUM

    def test_a_seal_of_another_key_does_not_pass(self) -> None:
        memory = self.sealed(key=B)
        assert reason(check(memory, A, SCATTERED)) is FailureReason.WRONG_KEY
        assert memory.sealed_checksum(A, SCATTERED) is None

    def test_a_discarded_slot_is_missing(self) -> None:
        memory = self.sealed()
        memory.discard(SCATTERED)
        memory.discard(SCATTERED)
        assert reason(check(memory, A, SCATTERED)) is FailureReason.MISSING
        assert memory.sealed_checksum(A, SCATTERED) is None

    def test_a_slot_that_is_sealed_again_belongs_to_its_new_key(self) -> None:
        memory = self.sealed()
        assert seal(memory, B, SCATTERED) is None
        assert check(memory, B, SCATTERED) is None
        assert reason(check(memory, A, SCATTERED)) is FailureReason.WRONG_KEY

    def test_a_sealed_checksum_is_that_of_the_bytes(self) -> None:
        memory = self.sealed()
        digest = xxhash.xxh3_128_digest(bytes_of(memory, SCATTERED))
        assert memory.sealed_checksum(A, SCATTERED) == digest
        memory.views(SCATTERED)[0][0] ^= 1
        assert memory.sealed_checksum(A, SCATTERED) == digest, "the checksum of the sealed bytes"

    def test_a_given_checksum_is_the_one_that_is_checked(self) -> None:
        memory = self.sealed()
        digest = xxhash.xxh3_128_digest(bytes_of(memory, SCATTERED))
        assert memory.seal_all([(A, SCATTERED)], [digest]) == [None]
        assert check(memory, A, SCATTERED) is None
        assert memory.seal_all([(A, SCATTERED)], [bytes(16)]) == [None]
        assert memory.sealed_checksum(A, SCATTERED) == bytes(16)
        assert reason(check(memory, A, SCATTERED)) is FailureReason.CHECKSUM

    def test_seals_do_not_disturb_each_other(self) -> None:
        memory, other = self.sealed(), Slot(((2 * CHUNK_BYTES, CHUNK_BYTES),))
        assert seal(memory, B, other) is None
        memory.discard(other)
        assert check(memory, A, SCATTERED) is None

    def test_a_slot_that_is_partly_reused_loses_its_seal(self) -> None:
        """The new slot starts before, at or within one of the extents, or the other way round."""
        one = CHUNK_BYTES
        for offset, num_bytes in ((0, 2 * one), (1 * one, one), (3 * one, 4 * one), (4 * one, one), (6 * one, 2 * one)):
            reused = Slot(((2 * one, one), (offset, num_bytes)))
            memory = self.sealed()
            assert memory.is_sealed(A, SCATTERED)
            assert seal(memory, B, reused) is None
            assert not memory.is_sealed(A, SCATTERED)
            assert reason(check(memory, A, SCATTERED)) in (FailureReason.MISSING, FailureReason.WRONG_KEY)
            assert memory.is_sealed(B, reused) and check(memory, B, reused) is None
            memory.discard(SCATTERED)
            assert not memory.is_sealed(B, reused)
            memory = self.sealed()
            memory.discard(reused)
            assert not memory.is_sealed(A, SCATTERED)

    def test_a_seal_is_of_its_key_and_its_extents(self) -> None:
        memory = self.sealed()
        first, second, third = SCATTERED.extents
        assert memory.is_sealed(A, SCATTERED) and not memory.is_sealed(B, SCATTERED)
        for extents in ((first,), (first, second), (first, third, second), (second, third)):
            assert not memory.is_sealed(A, Slot(extents))
        assert not memory.is_sealed(A, Slot(()))

    def test_a_slot_that_is_sealed_at_a_smaller_place_leaves_its_old_memory_free(self) -> None:
        memory, first = self.sealed(), Slot(SCATTERED.extents[:1])
        assert seal(memory, A, first) is None
        assert seal(memory, B, Slot(SCATTERED.extents[1:])) is None
        assert memory.is_sealed(A, first)

    def test_each_of_many_chunks_gets_its_own_answer(self) -> None:
        """An outside slot, an empty one, an unsealed one and one of another key, among unchanged chunks."""
        memory = self.make_memory(CAPACITY_BYTES)
        slots = [Slot(((number * CHUNK_BYTES, CHUNK_BYTES - number),)) for number in range(NUM_CHUNKS)]
        for number, slot in enumerate(slots):
            memory.views(slot)[0][:] = bytes([number]) * slot.num_bytes
        good = [(bytes([number]), slot) for number, slot in enumerate(slots[:6])]
        outside, empty = (A, Slot(((CAPACITY_BYTES, 1),))), (B, Slot(()))
        sealed = memory.seal_all([*good[:3], outside, empty, *good[3:]])
        assert [reason(failure) for failure in sealed] == [None] * 3 + [FailureReason.IO] * 2 + [None] * 3
        memory.views(slots[2])[0][-1] ^= 1
        checked = memory.check_all([outside, good[0], (A, slots[1]), good[2], empty, (A, slots[6]), *good[3:]])
        assert [reason(failure) for failure in checked] == [
            FailureReason.IO,
            None,
            FailureReason.WRONG_KEY,
            FailureReason.CHECKSUM,
            FailureReason.IO,
            FailureReason.MISSING,
            *[None] * 3,
        ]
        assert checked[3] is not None and good[2][0].hex() in checked[3].detail
        assert memory.seal_all([]) == memory.check_all([]) == []

    def test_given_checksums_stay_with_their_chunks(self) -> None:
        memory = self.make_memory(CAPACITY_BYTES)
        slots = [Slot(((number * CHUNK_BYTES, CHUNK_BYTES),)) for number in range(3)]
        chunks = [(A, slots[0]), (A, Slot(())), (B, slots[1]), (A, slots[2])]
        failures = memory.seal_all(chunks, [bytes([number]) * 16 for number in range(4)])
        assert [reason(failure) for failure in failures] == [None, FailureReason.IO, None, None]
        assert memory.sealed_checksum(A, slots[0]) == bytes([0]) * 16
        assert memory.sealed_checksum(B, slots[1]) == bytes([2]) * 16
        assert memory.sealed_checksum(A, slots[2]) == bytes([3]) * 16

    def test_a_slot_outside_the_memory_is_never_touched(self) -> None:
        memory = self.sealed()
        for extent in ((-1, 10), (0, 0), (CAPACITY_BYTES - 5, 6), (1 << 40, 1)):
            outside = Slot(((0, 16), extent))
            assert reason(seal(memory, A, outside)) is FailureReason.IO
            assert reason(check(memory, A, outside)) is FailureReason.IO
            for use in (memory.addresses, memory.views, memory.discard):
                assert is_protocol_error(lambda use=use, outside=outside: use(outside))  # type: ignore[misc]
        assert check(memory, A, SCATTERED) is None

    def test_a_slot_without_extents_is_invalid(self) -> None:
        memory, empty = self.make_memory(CAPACITY_BYTES), Slot(())
        assert reason(seal(memory, A, empty)) is FailureReason.IO
        assert reason(check(memory, A, empty)) is FailureReason.IO
        for use in (memory.addresses, memory.views, memory.discard):
            assert is_protocol_error(lambda use=use: use(empty))  # type: ignore[misc]

    def test_closed_memory_fails_every_call(self) -> None:
        memory = self.sealed()
        memory.close()
        memory.close()
        assert reason(seal(memory, A, SCATTERED)) is FailureReason.CLOSED
        assert reason(check(memory, A, SCATTERED)) is FailureReason.CLOSED
        assert memory.sealed_checksum(A, SCATTERED) is None and not memory.is_sealed(A, SCATTERED)
        for use in (memory.addresses, memory.views, memory.discard):
            assert is_protocol_error(lambda use=use: use(SCATTERED))  # type: ignore[misc]

    def test_a_copy_thread_and_the_main_thread_may_use_it_concurrently(self) -> None:
        memory, rounds = self.make_memory(CAPACITY_BYTES), 64
        failures: list[Failure] = []
        start = threading.Barrier(2)

        def work(numbers: range) -> None:
            start.wait()
            for turn in range(rounds):
                for number in numbers:
                    key, slot = bytes([number, turn]), Slot(((number * CHUNK_BYTES, CHUNK_BYTES),))
                    memory.discard(slot)
                    memory.views(slot)[0][:] = bytes([turn]) * CHUNK_BYTES
                    found = seal(memory, key, slot) or check(memory, key, slot)
                    failures.extend([found] if found is not None else [])

        thread = threading.Thread(target=work, args=(range(NUM_CHUNKS // 2, NUM_CHUNKS),))
        thread.start()
        work(range(NUM_CHUNKS // 2))
        thread.join()
        assert not failures
        for number in range(NUM_CHUNKS):
            slot = Slot(((number * CHUNK_BYTES, CHUNK_BYTES),))
            assert check(memory, bytes([number, rounds - 1]), slot) is None
