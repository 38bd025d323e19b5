"""Byte format of a segment file: header, seal, and the header of each record. See FORMAT.md.

Reads and writes no file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.disk.format.layout import (
    CHECKSUM_BYTES,
    LARGEST_EPOCH,
    LARGEST_KEY_BYTES,
    LARGEST_NUMBER,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    VERSION,
    Bytes,
    checksum,
    checksum_of,
    is_place_of,
    is_segment_size,
)

SEGMENT_MAGIC = b"\x89HKVS\r\n\n"
SEAL_MAGIC = b"\x89HKVE\r\n\n"

_SEGMENT = struct.Struct("<8sHHIQQQ32s")
_SEAL = struct.Struct("<8sHHIQQQ32s")

SEGMENT_HEAD_USED_BYTES = _SEGMENT.size + CHECKSUM_BYTES


class SegmentHeader(NamedTuple):
    """First page of a segment, decoded."""

    rank: int
    number: int
    epoch: int
    segment_bytes: int
    namespace: bytes


def encode_segment(header: SegmentHeader) -> bytes:
    """First page of a segment."""
    fields = _SEGMENT.pack(
        SEGMENT_MAGIC, VERSION, 0, header.rank, header.number, header.epoch, header.segment_bytes, header.namespace
    )
    return _page(fields)


def decode_segment(page: Bytes) -> SegmentHeader | None:
    """Header of a segment. None if the page is damaged, has another version, or has impossible values."""
    fields = _unpack(_SEGMENT, SEGMENT_MAGIC, page)
    if fields is None:
        return None
    rank, number, epoch, segment_bytes, namespace = fields[3:]
    if number > LARGEST_NUMBER or epoch > LARGEST_EPOCH or not is_segment_size(segment_bytes):
        return None
    return SegmentHeader(rank, number, epoch, segment_bytes, namespace)


def encode_seal(header: SegmentHeader, end_offset: int) -> bytes:
    """Second page of a segment: every record below `end_offset` is whole or withdrawn."""
    fields = _SEAL.pack(SEAL_MAGIC, VERSION, 0, header.rank, header.number, header.epoch, end_offset, header.namespace)
    return _page(fields)


def decode_seal(page: Bytes, header: SegmentHeader) -> int | None:
    """`end_offset` of a seal; None if the page is not a valid seal of this segment."""
    fields = _unpack(_SEAL, SEAL_MAGIC, page)
    if fields is None or (fields[3], fields[4], fields[5], fields[7]) != (*header[:3], header.namespace):
        return None
    end_offset = int(fields[6])
    is_possible = SEGMENT_HEAD_BYTES <= end_offset <= header.segment_bytes and not end_offset % PAGE_BYTES
    return end_offset if is_possible else None


def _page(fields: bytes) -> bytes:
    return (fields + checksum(fields)).ljust(PAGE_BYTES, b"\0")


def _unpack(fields: struct.Struct, magic: bytes, page: Bytes) -> tuple[Any, ...] | None:
    end = fields.size + CHECKSUM_BYTES
    if len(page) < end or bytes(page[:8]) != magic:
        return None
    found = fields.unpack_from(page)
    if found[1] != VERSION or checksum(page[: fields.size]) != bytes(page[fields.size : end]):
        return None
    return found


RECORD_MAGIC = b"\x89HKVR\r\n\n"

_RECORD = struct.Struct("<8sHHIQQ32s16s")

PAYLOAD_CHECKSUM_AT = _RECORD.size - CHECKSUM_BYTES
"""Offset of the payload's checksum in a record's header."""
RECORD_HEAD_BYTES = _RECORD.size + LARGEST_KEY_BYTES + CHECKSUM_BYTES
"""Size of the longest record header. Zeros fill the rest of the record's first page."""


class RecordHeader(NamedTuple):
    """Header of a record, decoded."""

    rank: int
    address: int
    payload_bytes: int
    namespace: bytes
    payload_checksum: bytes
    key: bytes

    @property
    def owner(self) -> tuple[int, int, bytes]:
        """Rank, address and namespace that the record was written for."""
        return self.rank, self.address, self.namespace


def encode_record(header: RecordHeader) -> bytes:
    """Bytes of a record's header. The caller fills the rest of the page with zeros."""
    body = encode_record_body(header)
    return body + checksum(body)


def encode_record_body(header: RecordHeader) -> bytes:
    """Bytes of a record's header without the checksum of the header."""
    fields = _RECORD.pack(
        RECORD_MAGIC,
        VERSION,
        len(header.key),
        header.rank,
        header.address,
        header.payload_bytes,
        header.namespace,
        header.payload_checksum,
    )
    return fields + header.key


def decode_record(page: Bytes) -> RecordHeader | None:
    """Header of a record. None if the header is damaged, has another version, or has impossible values."""
    if len(page) < RECORD_HEAD_BYTES:
        return None
    magic, version, key_bytes, rank, address, payload_bytes, namespace, payload_checksum = _RECORD.unpack_from(page)
    if magic != RECORD_MAGIC or version != VERSION or not 0 < key_bytes <= LARGEST_KEY_BYTES:
        return None
    end = _RECORD.size + key_bytes
    if checksum(page[:end]) != bytes(page[end : end + CHECKSUM_BYTES]):
        return None
    if not is_place_of(address, payload_bytes):
        return None
    return RecordHeader(rank, address, payload_bytes, namespace, payload_checksum, bytes(page[_RECORD.size : end]))


def verify(expected: RecordHeader, page: bytes, payload: Sequence[memoryview]) -> tuple[Failure | None, bytes | None]:
    """Compare the header of a read record with the expected header, and the payload with the checksum in its header.

    Returns the failure, or the payload's checksum. Does not use `expected.payload_checksum`.
    """
    found = decode_record(page)
    if found is None:
        if not any(page):
            return Failure(FailureReason.MISSING, f"nothing was stored at {expected.address}"), None
        detail = f"the header at {expected.address} is damaged or of another version"
        return Failure(FailureReason.CHECKSUM, detail), None
    if found.owner != expected.owner:
        detail = f"the record at {expected.address} was written for another place: {found.rank}, {found.address}"
        return Failure(FailureReason.WRONG_KEY, detail), None
    if found.key != expected.key:
        return Failure(FailureReason.WRONG_KEY, f"expected {expected.key.hex()}, got {found.key.hex()}"), None
    if found.payload_bytes != expected.payload_bytes:
        detail = f"expected {expected.payload_bytes} bytes of {expected.key.hex()}, got {found.payload_bytes}"
        return Failure(FailureReason.CHECKSUM, detail), None
    payload_checksum = checksum_of(payload)
    if payload_checksum != found.payload_checksum:
        detail = f"the bytes of {expected.key.hex()} are not those that were stored"
        return Failure(FailureReason.CHECKSUM, detail), None
    return None, payload_checksum
