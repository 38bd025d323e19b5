"""Reads the files of a disk tier using only the format."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from hybridkv.tiers.disk.format.layout import PAGE_BYTES, SEGMENT_HEAD_BYTES, record_bytes
from hybridkv.tiers.disk.format.segment import RecordHeader, decode_record


def records(segment: Path) -> Iterator[tuple[int, RecordHeader]]:
    """The offset and header of each record of a segment file."""
    data = segment.read_bytes()
    offset = SEGMENT_HEAD_BYTES
    while (header := decode_record(data[offset : offset + PAGE_BYTES])) is not None:
        yield offset, header
        offset += record_bytes(header.payload_bytes)


def segments(cache: Path, rank: int) -> list[Path]:
    return sorted(cache.glob(f"*/rank-{rank}/segment-*"))


def payload_digests(cache: Path, rank: int) -> dict[str, str]:
    """The key of each record of a rank, with a digest of its bytes."""
    digests = {}
    for segment in segments(cache, rank):
        data = segment.read_bytes()
        for offset, header in records(segment):
            payload = data[offset + PAGE_BYTES :][: header.payload_bytes]
            digests[header.key.hex()] = blake2b(payload, digest_size=16).hexdigest()
    return digests
