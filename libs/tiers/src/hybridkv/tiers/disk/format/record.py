"""The bytes of a segment's header and seal and of a record's header, as FORMAT.md describes them.

Changing a byte here changes VERSION and adds golden files. Reads and writes no file.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, TypeAlias

import xxhash

from hybridkv.tiers.disk.format.layout import (
    LARGEST_EPOCH,
    LARGEST_KEY_BYTES,
    LARGEST_NUMBER,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    is_place_of,
    is_segment_size,
)

VERSION = 1

SEGMENT_MAGIC = b"\x89HKVS\r\n\n"
SEAL_MAGIC = b"\x89HKVE\r\n\n"
RECORD_MAGIC = b"\x89HKVR\r\n\n"

Bytes: TypeAlias = bytes | bytearray | memoryview

_SEGMENT = struct.Struct("<8sHHIQQQ32s")
_SEAL = struct.Struct("<8sHHIQQQ32s")
_RECORD = struct.Struct("<8sHHIQQ32s16s")
_CHECKSUM_BYTES = 16

PAYLOAD_CHECKSUM_AT = _RECORD.size - _CHECKSUM_BYTES
"""Where it stands in a record's header."""
RECORD_HEAD_BYTES = _RECORD.size + LARGEST_KEY_BYTES + _CHECKSUM_BYTES
"""As much of a record's first page as can mean something."""
SEGMENT_HEAD_USED_BYTES = _SEGMENT.size + _CHECKSUM_BYTES


class SegmentHeader(NamedTuple):
    """Whose segment a file is."""

    rank: int
    number: int
    epoch: int
    segment_bytes: int
    namespace: bytes


class RecordHeader(NamedTuple):
    """Whose payload follows, and what it must be."""

    rank: int
    address: int
    payload_bytes: int
    namespace: bytes
    payload_checksum: bytes
    key: bytes

    @property
    def is_of(self) -> tuple[int, int, bytes]:
        """The place that it was written for."""
        return self.rank, self.address, self.namespace


def checksum(data: Bytes) -> bytes:
    """XXH3-128, seed 0, in its canonical (big-endian) byte order."""
    return xxhash.xxh3_128_digest(data)


def encode_segment(header: SegmentHeader) -> bytes:
    """The first page of a segment."""
    fields = _SEGMENT.pack(
        SEGMENT_MAGIC, VERSION, 0, header.rank, header.number, header.epoch, header.segment_bytes, header.namespace
    )
    return _page(fields)


def decode_segment(page: Bytes) -> SegmentHeader | None:
    """None when it is not whole, of another version, or says what no segment can be."""
    fields = _unpack(_SEGMENT, SEGMENT_MAGIC, page)
    if fields is None:
        return None
    rank, number, epoch, segment_bytes, namespace = fields[3:]
    if number > LARGEST_NUMBER or epoch > LARGEST_EPOCH or not is_segment_size(segment_bytes):
        return None
    return SegmentHeader(rank, number, epoch, segment_bytes, namespace)


def encode_seal(header: SegmentHeader, end_offset: int) -> bytes:
    """The second page of a segment: every record below `end_offset` was written whole, or was withdrawn."""
    fields = _SEAL.pack(SEAL_MAGIC, VERSION, 0, header.rank, header.number, header.epoch, end_offset, header.namespace)
    return _page(fields)


def decode_seal(page: Bytes, header: SegmentHeader) -> int | None:
    """`end_offset` if this is the seal of that segment."""
    fields = _unpack(_SEAL, SEAL_MAGIC, page)
    if fields is None or (fields[3], fields[4], fields[5], fields[7]) != (*header[:3], header.namespace):
        return None
    end_offset = int(fields[6])
    is_possible = SEGMENT_HEAD_BYTES <= end_offset <= header.segment_bytes and not end_offset % PAGE_BYTES
    return end_offset if is_possible else None


def encode_record(header: RecordHeader) -> bytes:
    """What stands at the beginning of a record's first page; the rest of the page is zeros."""
    body = encode_record_body(header)
    return body + checksum(body)


def encode_record_body(header: RecordHeader) -> bytes:
    """The same without its own checksum."""
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
    """None when it is not whole, of another version, or says what no record can be."""
    if len(page) < RECORD_HEAD_BYTES:
        return None
    magic, version, key_bytes, rank, address, payload_bytes, namespace, payload_checksum = _RECORD.unpack_from(page)
    if magic != RECORD_MAGIC or version != VERSION or not 0 < key_bytes <= LARGEST_KEY_BYTES:
        return None
    end = _RECORD.size + key_bytes
    if checksum(page[:end]) != bytes(page[end : end + _CHECKSUM_BYTES]):
        return None
    if not is_place_of(address, payload_bytes):
        return None
    return RecordHeader(rank, address, payload_bytes, namespace, payload_checksum, bytes(page[_RECORD.size : end]))


def _page(fields: bytes) -> bytes:
    return (fields + checksum(fields)).ljust(PAGE_BYTES, b"\0")


def _unpack(fields: struct.Struct, magic: bytes, page: Bytes) -> tuple[Any, ...] | None:
    end = fields.size + _CHECKSUM_BYTES
    if len(page) < end or bytes(page[:8]) != magic:
        return None
    found = fields.unpack_from(page)
    if found[1] != VERSION or checksum(page[: fields.size]) != bytes(page[fields.size : end]):
        return None
    return found
