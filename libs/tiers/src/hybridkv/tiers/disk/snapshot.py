"""The bytes of a snapshot of the index: which records there are, least recently used first. FORMAT.md describes them.

It only saves time: every record it names is verified when it is loaded, and without it the segments are read. Reads and
writes no file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format import VERSION, checksum

SNAPSHOT_MAGIC = b"\x89HKVI\r\n\n"
_HEAD = struct.Struct("<8sHHI32sQQQQQQQ")
_CHECKSUM_BYTES = 16
_KEYS_AT_A_TIME = 2048

Numbers: TypeAlias = npt.NDArray[np.uint64]


class Snapshot(NamedTuple):
    """The committed records of a namespace at one moment."""

    epoch: int
    scan_from: int
    """Segments with this number or a higher one may hold records that are not named here."""
    next_number: int
    """No segment had this number or a higher one."""
    next_address: int
    """No record had this address or a higher one. A record below it that is not named here, nor pending, is dead."""
    pending: Sequence[int]
    """Addresses of records that were being written."""
    keys: Sequence[Key]
    addresses: Sequence[int] | Numbers
    payload_bytes: Sequence[int] | Numbers


def encode(snapshot: Snapshot, namespace: bytes) -> bytes:
    # In pieces, so that no other thread waits long for this one.
    parts = [snapshot.keys[at : at + _KEYS_AT_A_TIME] for at in range(0, len(snapshot.keys), _KEYS_AT_A_TIME)]
    blob = b"".join([b"".join(part) for part in parts])
    key_bytes = b"".join([np.array(list(map(len, part)), dtype="<u2").tobytes() for part in parts])
    head = _HEAD.pack(
        SNAPSHOT_MAGIC,
        VERSION,
        0,
        0,
        namespace,
        snapshot.epoch,
        snapshot.scan_from,
        snapshot.next_number,
        snapshot.next_address,
        len(snapshot.pending),
        len(snapshot.keys),
        len(blob),
    )
    body = b"".join(
        (
            head,
            np.array(snapshot.pending, dtype="<u8").tobytes(),
            np.asarray(snapshot.addresses, dtype="<u8").tobytes(),
            np.asarray(snapshot.payload_bytes, dtype="<u8").tobytes(),
            key_bytes,
            blob,
        )
    )
    return body + checksum(body)


def checksum_of(data: bytes) -> bytes:
    """What tells this snapshot from every other one."""
    return data[-_CHECKSUM_BYTES:]


def decode(data: bytes, namespace: bytes) -> Snapshot | None:
    """None when it is damaged, another namespace's or of another version."""
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
    pending = np.frombuffer(data, "<u8", pending_count, _HEAD.size).tolist()
    at = _HEAD.size + 8 * pending_count
    addresses = np.frombuffer(data, "<u8", count, at).tolist()
    payload_bytes = np.frombuffer(data, "<u8", count, at + 8 * count).tolist()
    first = at + 18 * count
    stops = (np.frombuffer(data, "<u2", count, at + 16 * count).cumsum(dtype=np.int64) + first).tolist()
    keys = [data[start:stop] for start, stop in zip([first, *stops[:-1]], stops, strict=bool(count))]
    return Snapshot(epoch, scan_from, next_number, next_address, pending, keys, addresses, payload_bytes)
