"""The bytes of a snapshot of the index: which records there are, least recently used first. FORMAT.md describes them.

It only saves time: every record it names is verified when it is loaded, and without it the segments are read. Reads and
writes no file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format import VERSION, checksum

SNAPSHOT_MAGIC = b"\x89HKVI\r\n\n"
_HEAD = struct.Struct("<8sHHI32sQQQQQ")
_CHECKSUM_BYTES = 16


class Snapshot(NamedTuple):
    """The committed records of a namespace at one moment."""

    epoch: int
    scan_from: int
    """Segments with this number or a higher one may hold records that are not named here."""
    next_number: int
    """No segment had this number or a higher one."""
    keys: Sequence[Key]
    addresses: Sequence[int]
    payload_bytes: Sequence[int]


def encode(snapshot: Snapshot, namespace: bytes) -> bytes:
    blob = b"".join(snapshot.keys)
    head = _HEAD.pack(
        SNAPSHOT_MAGIC,
        VERSION,
        0,
        0,
        namespace,
        snapshot.epoch,
        snapshot.scan_from,
        snapshot.next_number,
        len(snapshot.keys),
        len(blob),
    )
    body = b"".join(
        (
            head,
            np.array(snapshot.addresses, dtype="<u8").tobytes(),
            np.array(snapshot.payload_bytes, dtype="<u8").tobytes(),
            np.array([len(key) for key in snapshot.keys], dtype="<u2").tobytes(),
            blob,
        )
    )
    return body + checksum(body)


def decode(data: bytes, namespace: bytes) -> Snapshot | None:
    """None when it is damaged, another namespace's or of another version."""
    if len(data) < _HEAD.size + _CHECKSUM_BYTES:
        return None
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    magic, version, _, _, owner, epoch, scan_from, next_number, count, blob_bytes = _HEAD.unpack_from(data)
    if magic != SNAPSHOT_MAGIC or version != VERSION or owner != namespace:
        return None
    if len(body) != _HEAD.size + 18 * count + blob_bytes or checksum(body) != data[-_CHECKSUM_BYTES:]:
        return None
    at = _HEAD.size
    addresses = np.frombuffer(data, "<u8", count, at).tolist()
    payload_bytes = np.frombuffer(data, "<u8", count, at + 8 * count).tolist()
    ends = np.frombuffer(data, "<u2", count, at + 16 * count).cumsum(dtype=np.uint64) + np.uint64(at + 18 * count)
    stops = ends.tolist()
    starts = [at + 18 * count, *stops[:-1]]
    keys = [data[start:stop] for start, stop in zip(starts, stops, strict=False)] if count else []
    return Snapshot(epoch, scan_from, next_number, keys, addresses, payload_bytes)
