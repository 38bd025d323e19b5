"""Record: one chunk of one rank in a pack, a header followed by the bytes.

Header and seal bind the bytes to key, rank, object and offset, so that a record at another place is rejected.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.tiers.contract import Failure, FailureReason, Key
from hybridkv.tiers.object.format.seals import SEAL_BYTES, Seals

MAGIC = b"hkvpart1"
LARGEST_KEY_BYTES = 64
_CHECKSUM_BYTES = 16
_HEAD = struct.Struct(f"<8sHHIQ{_CHECKSUM_BYTES}s{LARGEST_KEY_BYTES}s24x")
"""Magic, rank, size of the key, zero, size of the chunk, XXH3-128 of the chunk, the key, zeros."""
HEADER_BYTES = _HEAD.size + SEAL_BYTES
assert HEADER_BYTES == 160


class PartPlace(NamedTuple):
    """Place of one rank's part of a chunk.

    Args:
        object_name: name of the pack, with the rank.
        rank: the rank.
        offset: offset of the header in the object, in bytes.

    """

    object_name: str
    rank: int
    offset: int

    def words(self) -> bytes:
        """Bytes of this place that the seal covers."""
        return f"{self.object_name}@{self.offset}".encode()


def encode_header(
    seals: Seals, place: PartPlace, key: Key, checksum: bytes, num_bytes: int, views: Sequence[memoryview]
) -> bytes:
    """Encode the header of a chunk.

    Args:
        seals: seals of the fleet.
        place: place of the record.
        key: at most `LARGEST_KEY_BYTES`.
        checksum: XXH3-128 of the bytes.
        num_bytes: size of the chunk.
        views: the bytes.

    """
    head = _HEAD.pack(MAGIC, place.rank, len(key), 0, num_bytes, checksum, key)
    return head + seals.of(head, place.words(), views=views)


class RecordHead(NamedTuple):
    """Fields of a header.

    Args:
        rank: rank of the part.
        key: key of the chunk.
        num_bytes: size of the chunk.
        checksum: XXH3-128 of the chunk.
    """

    rank: int
    key: Key
    num_bytes: int
    checksum: bytes


def parse_header(header: bytes) -> RecordHead | None:
    """Fields of a header, without a check of its seal. None if no record begins here."""
    if len(header) < HEADER_BYTES:
        return None
    magic, rank, key_bytes, _, num_bytes, checksum, key = _HEAD.unpack_from(header)
    return RecordHead(rank, key[:key_bytes], num_bytes, checksum) if magic == MAGIC else None


def check_header(header: bytes, place: PartPlace, key: Key, num_bytes: int) -> bytes | Failure:
    """Check that a header belongs to a chunk. Returns the expected checksum, or a failure. The seal is checked later,
    with the bytes, by `check_seal`."""
    if len(header) < HEADER_BYTES:
        return Failure(FailureReason.MISSING, f"{place.object_name} ends before {place.offset}")
    magic, rank, key_bytes, _, stored_bytes, checksum, stored_key = _HEAD.unpack_from(header)
    if magic != MAGIC:
        return Failure(FailureReason.CHECKSUM, f"no chunk begins in {place.object_name} at {place.offset}")
    if stored_key[:key_bytes] != key or rank != place.rank or stored_bytes != num_bytes:
        return Failure(FailureReason.WRONG_KEY, f"another chunk lies in {place.object_name} at {place.offset}")
    return bytes(checksum)


def check_seal(seals: Seals, header: bytes, place: PartPlace, views: Sequence[memoryview]) -> Failure | None:
    """Check the seal of a header. A keyed seal also covers the bytes. None if the seal is valid."""
    head, seal = header[: _HEAD.size], header[_HEAD.size : HEADER_BYTES]
    if seals.is_valid(seal, head, place.words(), views=views):
        return None
    return Failure(
        FailureReason.CHECKSUM, f"the seal in {place.object_name} at {place.offset} is not that of this chunk"
    )
