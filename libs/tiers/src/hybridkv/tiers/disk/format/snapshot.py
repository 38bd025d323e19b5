"""Byte format of a snapshot of the index: its records, least recently used first. See FORMAT.md.

Without a snapshot, a start reads the segments, does not know the LRU order, and may offer evicted records again; loads
verify every record. A snapshot of a million records has more than 50 MB, so it is encoded in pieces. Reads and writes
no file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.layout import (
    END_ADDRESS,
    LARGEST_EPOCH,
    LARGEST_KEY_BYTES,
    LARGEST_NUMBER,
    LARGEST_SEGMENT_BYTES,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    VERSION,
    address_of,
    checksum,
)
from hybridkv.tiers.yielding import pieces

SNAPSHOT_MAGIC = b"\x89HKVI\r\n\n"
_HEAD = struct.Struct("<8sHHI32sQQQQQQQ")
_CHECKSUM_BYTES = 16
_NUMBERS_AT_A_TIME = 1 << 15

Numbers: TypeAlias = npt.NDArray[np.uint64]


class Snapshot(NamedTuple):
    """Committed records of a namespace. May contain effects of changes that were made while the records were copied
    from the index."""

    epoch: int
    scan_from: int
    """First segment number with possibly unlisted records: segments with this or a higher number may hold records that
    the snapshot lacks."""
    next_number: int
    """Upper bound of segment numbers, exclusive."""
    next_address: int
    """Upper bound of record addresses, exclusive. A record below it that is neither listed nor pending is dead."""
    pending: Sequence[int]
    """Addresses of records that were still being written."""
    keys: Sequence[Key]
    addresses: Sequence[int] | Numbers
    payload_bytes: Sequence[int] | Numbers


class Encoding:
    """Encoder of a snapshot, in pieces: only one piece is in memory at a time."""

    def __init__(self, snapshot: Snapshot, namespace: bytes) -> None:
        self._snapshot = snapshot
        self._namespace = namespace
        self._key_bytes = _lengths(snapshot.keys)
        self._blob_bytes = int(self._key_bytes.sum(dtype=np.int64))
        self.checksum = b""
        """Checksum that identifies this snapshot. Empty until the last piece was taken."""

    @property
    def num_bytes(self) -> int:
        numbers = 8 * len(self._snapshot.pending) + 18 * len(self._snapshot.keys)
        return _HEAD.size + numbers + self._blob_bytes + _CHECKSUM_BYTES

    def pieces(self) -> Iterator[bytes]:
        """All pieces in order. Call it once."""
        digest = xxhash.xxh3_128()
        for piece in self._fields():
            digest.update(piece)
            yield piece
        self.checksum = digest.digest()
        yield self.checksum

    def _fields(self) -> Iterator[bytes]:
        snapshot = self._snapshot
        yield _HEAD.pack(
            SNAPSHOT_MAGIC,
            VERSION,
            0,
            0,
            self._namespace,
            snapshot.epoch,
            snapshot.scan_from,
            snapshot.next_number,
            snapshot.next_address,
            len(snapshot.pending),
            len(snapshot.keys),
            self._blob_bytes,
        )
        for column in (snapshot.pending, snapshot.addresses, snapshot.payload_bytes):
            for start in range(0, len(column), _NUMBERS_AT_A_TIME):
                yield np.asarray(column[start : start + _NUMBERS_AT_A_TIME], dtype="<u8").tobytes()
        yield self._key_bytes.tobytes()
        for part in pieces(len(snapshot.keys)):
            yield b"".join(snapshot.keys[part])


def _lengths(keys: Sequence[Key]) -> npt.NDArray[np.uint16]:
    lengths = np.empty(len(keys), dtype="<u2")
    for part in pieces(len(keys)):
        lengths[part] = list(map(len, keys[part]))
    return lengths


def checksum_of(data: bytes) -> bytes:
    """Checksum at the end of a snapshot; identifies the snapshot."""
    return data[-_CHECKSUM_BYTES:]


def decode(data: bytes, namespace: bytes, max_records: int = 1 << 32) -> Snapshot | None:
    """Decode a snapshot. None if it is damaged, belongs to another namespace, has another version, or has impossible
    values.

    With more than `max_records` records, leaves out the least recently used records.
    """
    if len(data) < _HEAD.size + _CHECKSUM_BYTES:
        return None
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    magic, version, _, _, owner, epoch, scan_from, next_number, *rest = _HEAD.unpack_from(data)
    next_address, pending_count, count, blob_bytes = rest
    if magic != SNAPSHOT_MAGIC or version != VERSION or owner != namespace:
        return None
    if (
        len(body) != _HEAD.size + 8 * pending_count + 18 * count + blob_bytes
        or checksum(body) != data[-_CHECKSUM_BYTES:]
    ):
        return None
    pending = np.frombuffer(data, "<u8", pending_count, _HEAD.size)
    at = _HEAD.size + 8 * pending_count
    addresses = np.frombuffer(data, "<u8", count, at)
    payload_bytes = np.frombuffer(data, "<u8", count, at + 8 * count)
    key_bytes = np.frombuffer(data, "<u2", count, at + 16 * count)
    if not (
        _is_possible_end(epoch, scan_from, next_number, next_address)
        and pending_count <= max_records
        and _are_places(pending, np.ones_like(pending))
        and _are_places(addresses, payload_bytes)
        and _are_keys(key_bytes, blob_bytes)
    ):
        return None
    kept = slice(max(count - max_records, 0), count)
    first = at + 18 * count + int(key_bytes[: kept.start].sum(dtype=np.int64))
    stops = (key_bytes[kept].cumsum(dtype=np.int64) + first).tolist()
    keys = [data[start:stop] for start, stop in pairwise([first, *stops])]
    # Arrays, because a million integer objects would double the time. Copies, so that `data` can be freed.
    columns = (pending.tolist(), keys, addresses[kept].copy(), payload_bytes[kept].copy())
    return Snapshot(epoch, scan_from, next_number, next_address, *columns)


def _is_possible_end(epoch: int, scan_from: int, next_number: int, next_address: int) -> bool:
    """True if these numbers are possible in a store."""
    are_numbers = epoch <= LARGEST_EPOCH and scan_from <= next_number <= LARGEST_NUMBER + 1
    return are_numbers and next_address <= address_of(next_number, 0) and not next_address % PAGE_BYTES


def _are_places(addresses: Numbers, payload_bytes: Numbers) -> bool:
    """True if `is_place_of` is true for all pairs."""
    last_page = np.uint64(LARGEST_SEGMENT_BYTES - PAGE_BYTES)
    offsets = addresses & np.uint64(LARGEST_SEGMENT_BYTES - 1)
    are = (addresses < np.uint64(END_ADDRESS)) & (addresses & np.uint64(PAGE_BYTES - 1) == 0)
    are &= (offsets >= np.uint64(SEGMENT_HEAD_BYTES)) & (payload_bytes > 0)
    are &= payload_bytes <= last_page - np.minimum(offsets, last_page)
    return bool(are.all())


def _are_keys(key_bytes: npt.NDArray[np.uint16], blob_bytes: int) -> bool:
    """True if these key lengths are valid and their sum is `blob_bytes`."""
    are = (key_bytes > 0) & (key_bytes <= LARGEST_KEY_BYTES)
    return bool(are.all()) and int(key_bytes.sum(dtype=np.int64)) == blob_bytes
