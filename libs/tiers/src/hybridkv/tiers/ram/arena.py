"""Arena of the RAM tier: one buffer. A `RamIndex`, maybe in another process, divides the buffer into slots.

Each slot is sealed with its key, its extents and the XXH3-128 checksum of its bytes. `check_all` compares the key and
the checksum: a reused, torn or corrupted slot is a failed load, never wrong bytes. `is_sealed` compares key and extents
only: it detects a slot that was reused as a whole or in part. The arena copies nothing: a copy engine uses the
`addresses`.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.contract import Failure, FailureReason, Key, Slot
from hybridkv.tiers.digests import DIGEST_BYTES, records_digest
from hybridkv.tiers.errors import TierConfigurationError, TierProtocolError
from hybridkv.tiers.ram.sizes import count_granules

DEFAULT_GRANULE_BYTES = 64 * 1024

Bytes = npt.NDArray[np.uint8]


class _SlotSeal(NamedTuple):
    key: Key
    checksum: bytes
    extents: tuple[tuple[int, int], ...]


class RamArena:
    """`SealedMemory` in host RAM. Threads may use the arena at the same time, on distinct slots.

    Extents of slots start at multiples of `granule_bytes`, like the extents of a `RamIndex`. Otherwise slots can share
    a granule, and the arena may keep a stale seal of an overlapped slot.

    Args:
        capacity_bytes: size, rounded down to whole granules; the same as in the `RamIndex`.
        granule_bytes: size of a granule; the same as in the `RamIndex`.
        buffer: memory to use, for example pinned memory: uint8, one-dimensional, contiguous, writable, at least the
            rounded capacity. It must outlive the arena. None: the arena maps memory, page-aligned; the system
            commits a page at its first write.
        digest_threads: number of threads for checksums.
    """

    def __init__(
        self,
        capacity_bytes: int,
        granule_bytes: int = DEFAULT_GRANULE_BYTES,
        buffer: Bytes | None = None,
        digest_threads: int = 1,
    ) -> None:
        self._capacity_bytes = count_granules(capacity_bytes, granule_bytes) * granule_bytes
        self._buffer = _map_memory(self._capacity_bytes) if buffer is None else _checked(buffer, self._capacity_bytes)
        self._base_address = int(self._buffer.ctypes.data)
        self._digest_threads = digest_threads
        self._is_closed = False
        self._granule_bytes = granule_bytes
        self._seals: dict[int, _SlotSeal] = {}
        """Seals by the first offset of the slot. Readers take no lock: each reads one item."""
        self._owners = np.zeros(self._capacity_bytes // granule_bytes, dtype=np.int64)
        """For each granule, 1 + the first offset of the last slot sealed there; 0 for none. The seal of that slot may
        be removed already. The system commits this memory at the first write."""
        self._changes = threading.Lock()
        """Protects changes of seals and owners."""

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def base_address(self) -> int:
        """Address of offset 0. Register this memory, of `capacity_bytes`, with a copy engine."""
        return self._base_address

    def addresses(self, slot: Slot) -> list[tuple[int, int]]:
        """(address, num_bytes) of each extent, valid until `close`.

        `TierProtocolError` if the slot is not in the arena, or the arena is closed.
        """
        self._require(slot)
        return [(self._base_address + offset, num_bytes) for offset, num_bytes in slot.extents]

    def views(self, slot: Slot) -> list[memoryview]:
        """One writable view for each extent. Same errors as `addresses`."""
        self._require(slot)
        return [self._buffer[offset : offset + num_bytes].data for offset, num_bytes in slot.extents]

    def seal_all(
        self, chunks: Sequence[tuple[Key, Slot]], checksums: Sequence[bytes] | None = None
    ) -> list[Failure | None]:
        """Record key and checksum of the current bytes of each slot. One result for each chunk; None is success.

        Removes the seals of other, overlapping slots. Reads the bytes once, unless the caller passes `checksums`: the
        XXH3-128 of each chunk.
        """
        buffer = self._buffer
        failures = [self._why_not_use(slot) for _, slot in chunks]
        usable = [number for number, failure in enumerate(failures) if failure is None]
        if checksums is None:
            joined = self._checksums(buffer, [chunks[number][1] for number in usable])
            taken = [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]
        else:
            taken = [checksums[number] for number in usable]
        with self._changes:
            for number, checksum in zip(usable, taken, strict=True):
                key, slot = chunks[number]
                self._remove_overlapping(slot)
                for granules in self._granules(slot):
                    self._owners[granules] = slot.first_offset + 1
                self._seals[slot.first_offset] = _SlotSeal(key, checksum, slot.extents)
        return failures

    def sealed_checksum(self, key: Key, slot: Slot) -> bytes | None:
        """XXH3-128 of the chunk sealed for `key` at the first offset of the slot; None if no chunk is sealed there."""
        seal = self._seals.get(slot.first_offset)
        return seal.checksum if seal is not None and seal.key == key else None

    def is_sealed(self, key: Key, slot: Slot) -> bool:
        """True if exactly these extents are sealed for `key`, and no overlapping slot was sealed or discarded
        afterwards. Does not read the chunk."""
        seal = self._seals.get(slot.first_offset) if slot.extents else None
        return seal is not None and seal.key == key and seal.extents == slot.extents

    def check_all(self, chunks: Sequence[tuple[Key, Slot]]) -> list[Failure | None]:
        """Check that each slot holds the bytes sealed for its key. One result for each chunk; None is success."""
        buffer = self._buffer
        found = [self._sealed(key, slot) for key, slot in chunks]
        failures = [one if isinstance(one, Failure) else None for one in found]
        usable = [number for number, failure in enumerate(failures) if failure is None]
        present = self._checksums(buffer, [chunks[number][1] for number in usable])
        sealed = [one for one in found if isinstance(one, bytes)]
        if present == b"".join(sealed):
            return failures
        for start, number, checksum in zip(range(0, len(present), DIGEST_BYTES), usable, sealed, strict=True):
            if present[start : start + DIGEST_BYTES] != checksum:
                detail = f"the bytes of {chunks[number][0].hex()} are not those that were stored"
                failures[number] = Failure(FailureReason.CHECKSUM, detail)
        return failures

    def discard(self, slot: Slot) -> None:
        """Remove the seals of a slot and of overlapping slots, so `check_all` returns MISSING. Call it before a slot
        is overwritten."""
        self._require(slot)
        with self._changes:
            self._remove_overlapping(slot)

    def close(self) -> None:
        """Release the memory. Stop the copy engine first: it holds addresses of this memory."""
        self._is_closed = True
        with self._changes:
            self._seals.clear()
        self._buffer = np.empty(0, dtype=np.uint8)

    def _sealed(self, key: Key, slot: Slot) -> bytes | Failure:
        """Sealed checksum of the slot, or the failure if the slot has none for this key."""
        failure = self._why_not_use(slot)
        if failure is not None:
            return failure
        sealed = self._seals.get(slot.first_offset)
        if sealed is None:
            return Failure(FailureReason.MISSING, f"nothing is stored at offset {slot.first_offset}")
        if sealed.key != key:
            return Failure(FailureReason.WRONG_KEY, f"expected {key.hex()}, got {sealed.key.hex()}")
        return sealed.checksum

    def _remove_overlapping(self, slot: Slot) -> None:
        """Remove the seals of all slots that share bytes with this slot. The caller holds `_changes`."""
        first_offsets = {slot.first_offset}
        for granules in self._granules(slot):
            first_offsets.update(owner - 1 for owner in set(self._owners[granules].tolist()) if owner)
        for first_offset in first_offsets:
            seal = self._seals.get(first_offset)
            if seal is not None and _overlap(seal.extents, slot.extents):
                del self._seals[first_offset]

    def _granules(self, slot: Slot) -> Iterator[slice]:
        size = self._granule_bytes
        for offset, num_bytes in slot.extents:
            yield slice(offset // size, (offset + num_bytes - 1) // size + 1)

    def _checksums(self, buffer: Bytes, slots: Sequence[Slot]) -> bytes:
        """XXH3-128 of each slot, concatenated. The caller must read `self._buffer` before the check that the arena is
        open: the reference keeps the memory mapped even if `close` runs meanwhile."""
        extents = np.fromiter(chain.from_iterable(chain.from_iterable([slot.extents for slot in slots])), np.int64)
        ends = np.cumsum([len(slot.extents) for slot in slots], dtype=np.int64)
        addresses = extents[::2] + buffer.ctypes.data
        return records_digest(self._digest_threads)(addresses, extents[1::2].copy(), ends)

    def _why_not_use(self, slot: Slot) -> Failure | None:
        if self._is_closed:
            return Failure(FailureReason.CLOSED, "the arena is closed")
        if not slot.extents:
            return Failure(FailureReason.IO, "the slot has no extents")
        for offset, num_bytes in slot.extents:
            if offset < 0 or num_bytes <= 0 or offset + num_bytes > self._capacity_bytes:
                detail = f"extent ({offset}, {num_bytes}) is not in the arena of {self._capacity_bytes} bytes"
                return Failure(FailureReason.IO, detail)
        return None

    def _require(self, slot: Slot) -> None:
        failure = self._why_not_use(slot)
        if failure is not None:
            raise TierProtocolError(str(failure))


def _overlap(extents: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(
        offset < other + other_bytes and other < offset + num_bytes
        for offset, num_bytes in extents
        for other, other_bytes in others
    )


def _map_memory(num_bytes: int) -> Bytes:
    try:
        # Private: the default is shared memory, which is tmpfs and rarely gets transparent huge pages.
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise TierConfigurationError(
            "capacity_bytes", f"memory that this host can map ({error})", num_bytes, hint="give the tier less memory"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, dtype=np.uint8)


def _checked(buffer: Bytes, num_bytes: int) -> Bytes:
    shape = f"{buffer.dtype}{list(buffer.shape)}"
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous or not buffer.flags.writeable:
        raise TierConfigurationError("buffer", "a writable, contiguous, one-dimensional array of uint8", shape)
    if buffer.nbytes < num_bytes:
        raise TierConfigurationError("buffer", f"at least {num_bytes} bytes", buffer.nbytes)
    return buffer[:num_bytes]
