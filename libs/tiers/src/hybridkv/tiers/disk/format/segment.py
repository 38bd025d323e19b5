"""The bytes of a segment's first two pages, its header and its seal, as FORMAT.md describes them.

Reads and writes no file.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from hybridkv.tiers.disk.format.checksum import CHECKSUM_BYTES, VERSION, Bytes, checksum
from hybridkv.tiers.disk.format.layout import (
    LARGEST_EPOCH,
    LARGEST_NUMBER,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    is_segment_size,
)

SEGMENT_MAGIC = b"\x89HKVS\r\n\n"
SEAL_MAGIC = b"\x89HKVE\r\n\n"

_SEGMENT = struct.Struct("<8sHHIQQQ32s")
_SEAL = struct.Struct("<8sHHIQQQ32s")

SEGMENT_HEAD_USED_BYTES = _SEGMENT.size + CHECKSUM_BYTES


class SegmentHeader(NamedTuple):
    """Whose segment a file is."""

    rank: int
    number: int
    epoch: int
    segment_bytes: int
    namespace: bytes


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
