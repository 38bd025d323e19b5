"""Looks for records that nobody named, in the segments where there may be some."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.disk.directory import Directory, stops_an_opening
from hybridkv.tiers.disk.format import RECORD_HEAD_BYTES, RECORD_MAGIC, RecordHeader, checksum, decode_record
from hybridkv.tiers.disk.layout import (
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    address_of,
    number_of,
    offset_of,
    record_bytes,
)
from hybridkv.tiers.disk.names import segment_name
from hybridkv.tiers.disk.namespace import Namespace
from hybridkv.tiers.disk.replay import FoundRecord, Frontier
from hybridkv.tiers.disk.segment_headers import FoundSegment, read_at
from hybridkv.tiers.shortage import is_shortage

logger = logging.getLogger(__name__)

SEARCH_BYTES = 1 << 18
"""Read at once while looking for the next record behind a place where none is."""
SCAN_THREADS = 8
"""Segments that are read side by side where there are more: where a record begins is known when the one before was
read, so one reader would wait for the device most of the time."""
_MAGIC_NUMBER = np.frombuffer(RECORD_MAGIC, "<u8")[0]


class Search(NamedTuple):
    """Where to look in one segment."""

    segment: FoundSegment
    offsets: tuple[int, ...]
    """Of records that were being written."""
    start: int
    """Everything from this offset on."""


def searches_behind(frontier: Frontier, segments: Sequence[FoundSegment]) -> list[Search]:
    """What was not named when the last thing that is known happened."""
    pending: dict[int, list[int]] = {}
    for address in sorted(frontier.pending):
        pending.setdefault(number_of(address), []).append(offset_of(address))
    first_offset = max(offset_of(frontier.next_address), SEGMENT_HEAD_BYTES)
    searches = []
    for segment in segments:
        start = SEGMENT_HEAD_BYTES
        if segment.number < frontier.first_number:
            start = segment.end_offset
        elif segment.number == number_of(frontier.next_address):
            start = first_offset
        offsets = tuple(offset for offset in pending.get(segment.number, ()) if offset < start)
        if offsets or start < segment.end_offset:
            searches.append(Search(segment, offsets, start))
    return searches


def search_all(namespace: Namespace, searches: Sequence[Search]) -> Iterator[list[FoundRecord] | None]:
    """What is found by each, in their order; None where nothing was ever written."""
    search_one = partial(_search, namespace)
    if len(searches) <= SCAN_THREADS:
        yield from map(search_one, searches)
        return
    with ThreadPoolExecutor(SCAN_THREADS, "hybridkv-scan") as pool:
        try:
            found = pool.map(search_one, searches)
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            logger.warning("%s: one segment is read after the other", error)
            found = map(search_one, searches)
        yield from found


def _search(namespace: Namespace, search: Search) -> list[FoundRecord] | None:
    """The records that every rank has at the same address."""
    common: dict[FoundRecord, None] | None = None
    is_read = False
    for rank, directory in enumerate(namespace.ranks):
        try:
            mine = _search_file(directory, rank, search, namespace.digest)
        except OSError as error:
            if stops_an_opening(error):
                raise
            logger.warning("%s of rank %d cannot be read: %s", segment_name(search.segment.number), rank, error)
            return []
        is_read |= mine is not None
        common = mine or {} if common is None else {record: None for record in common if record in (mine or {})}
    return list(common or {}) if is_read else None


def _search_file(directory: Directory, rank: int, search: Search, digest: bytes) -> dict[FoundRecord, None] | None:
    """None when nothing was written where this looks."""
    segment = search.segment
    fd = directory.open_file(segment_name(segment.number), os.O_RDONLY)
    try:
        if not search.offsets and directory.io.next_data(fd, search.start) >= segment.end_offset:
            return None
        directory.io.advise_random(fd)
        return dict.fromkeys(
            FoundRecord(header.key, header.address, header.payload_bytes)
            for header in _headers_in(directory, fd, search)
            if (header.rank, header.namespace) == (rank, digest)
            and (segment.is_sealed or _is_whole(directory, fd, header))
        )
    finally:
        directory.io.close(fd)


def _headers_in(directory: Directory, fd: int, search: Search) -> Iterator[RecordHeader]:
    """Every whole record header that was written for the place where it stands."""
    segment = search.segment
    for offset in search.offsets:
        header = _header_at(directory, fd, segment, offset)
        if header is not None:
            yield header
    offset = search.start
    while offset < segment.end_offset:
        header = _header_at(directory, fd, segment, offset)
        if header is None:
            offset = _next_record(directory, fd, segment, offset + PAGE_BYTES)
            continue
        yield header
        offset += record_bytes(header.payload_bytes)


def _header_at(directory: Directory, fd: int, segment: FoundSegment, offset: int) -> RecordHeader | None:
    page = bytearray(RECORD_HEAD_BYTES)
    done = directory.io.preadv(fd, [memoryview(page)], offset)
    header = decode_record(page) if done == RECORD_HEAD_BYTES else None
    return header if header is not None and _is_at(header, segment, offset) else None


def _is_at(header: RecordHeader, segment: FoundSegment, offset: int) -> bool:
    fits = offset + record_bytes(header.payload_bytes) <= segment.segment_bytes and header.payload_bytes > 0
    return fits and header.address == address_of(segment.number, offset)


def _next_record(directory: Directory, fd: int, segment: FoundSegment, offset: int) -> int:
    """Where the next page begins that looks like a record, at `offset` or behind it."""
    while offset < segment.end_offset:
        written = directory.io.next_data(fd, offset) // PAGE_BYTES * PAGE_BYTES
        offset = max(offset, min(written, segment.end_offset))
        window = read_at(directory, fd, offset, min(SEARCH_BYTES, segment.end_offset - offset))
        words = np.frombuffer(window[: len(window) // PAGE_BYTES * PAGE_BYTES], "<u8")[:: PAGE_BYTES // 8]
        places = np.flatnonzero(words == _MAGIC_NUMBER)
        if len(places):
            return offset + int(places[0]) * PAGE_BYTES
        offset += max(len(window), PAGE_BYTES)
    return segment.end_offset


def _is_whole(directory: Directory, fd: int, header: RecordHeader) -> bool:
    payload = read_at(directory, fd, offset_of(header.address) + PAGE_BYTES, header.payload_bytes)
    return len(payload) == header.payload_bytes and checksum(payload) == header.payload_checksum
