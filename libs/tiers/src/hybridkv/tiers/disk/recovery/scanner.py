"""Scan of segment files at a start: reads the header of each file, and finds records that are neither in the snapshot
nor in the change log.

Changes nothing on disk.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash

from hybridkv.tiers.disk.files.namespace import NamespaceFiles
from hybridkv.tiers.disk.format.layout import (
    LARGEST_FIRST_NUMBER,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    address_of,
    number_of,
    offset_of,
    record_bytes,
    segment_name,
    segment_number,
)
from hybridkv.tiers.disk.format.segment import (
    RECORD_HEAD_BYTES,
    RECORD_MAGIC,
    SEGMENT_HEAD_USED_BYTES,
    RecordHeader,
    decode_record,
    decode_seal,
    decode_segment,
)
from hybridkv.tiers.disk.index.found import FoundRecord
from hybridkv.tiers.errors import is_shortage
from hybridkv.tiers.files.directory import Directory, is_fatal_at_open, read_at
from hybridkv.tiers.threads import DaemonPool

logger = logging.getLogger(__name__)

SEARCH_BYTES = 1 << 18
"""Bytes of one read in the search for the next record."""
PIECE_BYTES = 1 << 20
"""Bytes of one read of a payload. Bounded, because a header may contain any size."""
MAX_PAYLOAD_HOLE_BYTES = 1 << 26
"""Most bytes of holes in a payload. A payload with more bytes of holes counts as damaged."""
SCAN_THREADS = 8
"""Segments read in parallel. The address of a record is known only after the read of the previous record, so a single
reader mostly waits for the device."""
_ZEROS = memoryview(bytes(PIECE_BYTES))
_MAGIC_NUMBER = np.frombuffer(RECORD_MAGIC, "<u8")[0]


class FoundSegment(NamedTuple):
    """Segment of the present epoch that exists on every rank."""

    number: int
    segment_bytes: int
    end_offset: int
    """End of the last record; the segment's size if unknown."""
    is_sealed: bool


class FoundHeader(NamedTuple):
    """Header of one rank's file of a segment, and the end of its last record."""

    epoch: int
    segment_bytes: int
    end_offset: int | None


class NoHeader(enum.Enum):
    """Reason for a missing header."""

    USELESS = "missing, damaged, or of another cache or version"
    UNAVAILABLE = "the file could not be opened at this start"


Row: TypeAlias = Sequence[FoundHeader | NoHeader]
"""Headers of one segment, by rank."""


class SortedSegments(NamedTuple):
    """Good segments, and the numbers of useless and unavailable ones."""

    good: list[FoundSegment]
    useless: list[int]
    unavailable: list[int]


def read_headers(namespace: NamespaceFiles) -> dict[int, Row]:
    """Headers by segment number, in order. `OSError` if a directory cannot be read, a file is not this user's own, or
    this process is short of a resource."""
    found: dict[int, list[FoundHeader | NoHeader]] = {}
    for rank, directory in enumerate(namespace.ranks):
        for name in directory.list():
            number = segment_number(name)
            if number is not None:
                row = found.setdefault(number, [NoHeader.USELESS] * namespace.num_ranks)
                row[rank] = _read_header(directory, rank, number, namespace.digest)
    return dict(sorted(found.items()))


def _read_header(directory: Directory, rank: int, number: int, digest: bytes) -> FoundHeader | NoHeader:
    try:
        fd = directory.open_file(segment_name(number), os.O_RDONLY)
    except OSError as error:
        if is_fatal_at_open(error):
            raise
        logger.warning("%s of rank %d cannot be opened: %s", segment_name(number), rank, error)
        return NoHeader.UNAVAILABLE
    try:
        page = read_at(directory.io, fd, 0, PAGE_BYTES + SEGMENT_HEAD_USED_BYTES)
        header = decode_segment(page)
        if header is None or (header.rank, header.number, header.namespace) != (rank, number, digest):
            return NoHeader.USELESS
        if directory.io.stat(fd).st_size != header.segment_bytes:
            return NoHeader.USELESS
        return FoundHeader(header.epoch, header.segment_bytes, decode_seal(page[PAGE_BYTES:], header))
    except OSError as error:
        if is_fatal_at_open(error):
            raise
        logger.warning("%s of rank %d cannot be read: %s", segment_name(number), rank, error)
        return NoHeader.USELESS
    finally:
        directory.io.close(fd)


def epochs_in(rows: Iterable[Row]) -> list[int]:
    """Epochs of all headers."""
    return [header.epoch for row in rows for header in row if isinstance(header, FoundHeader)]


def next_free_number(rows: dict[int, Row], epoch: int) -> int:
    """Segment number above all used segment numbers.

    Ignores files without a valid header. Also ignores a segment of another epoch with a very high number: it may be a
    remainder of an index that restarted its numbers.
    """
    made = [
        number
        for number, row in rows.items()
        for header in row
        if isinstance(header, FoundHeader) and (header.epoch == epoch or number < LARGEST_FIRST_NUMBER)
    ]
    return max(made, default=-1) + 1


def sort_out(rows: dict[int, Row], epoch: int) -> SortedSegments:
    """Divide segments into good, useless and unavailable ones. A good one has a header of this epoch on every rank."""
    found = SortedSegments([], [], [])
    for number, row in rows.items():
        whole = [header for header in row if isinstance(header, FoundHeader) and header.epoch == epoch]
        if NoHeader.UNAVAILABLE in row:
            found.unavailable.append(number)
        elif len(whole) < len(row):
            found.useless.append(number)
        else:
            ends = [header.end_offset for header in whole]
            size = min(header.segment_bytes for header in whole)
            end = max((end for end in ends if end is not None), default=size)
            found.good.append(FoundSegment(number, size, min(end, size), None not in ends))
    return found


class Frontier(NamedTuple):
    """Limit of the listed records: unlisted records are at or after the limit, or at pending addresses."""

    next_number: int
    """Upper bound, exclusive, of the segment numbers in the snapshot and the changes."""
    scan_from: int
    """First segment that may hold unlisted records. In the segment of `next_address`, only from `next_address` on."""
    next_address: int
    """Upper bound of the addresses of known records, exclusive."""
    pending: frozenset[int]
    """Addresses of records whose writes had not ended."""


class SegmentSearch(NamedTuple):
    """Parts of one segment to search."""

    segment: FoundSegment
    offsets: tuple[int, ...]
    """Offsets of records whose writes had not ended."""
    start: int
    """The search covers these records, and the range from this offset to the segment's `end_offset`."""


def searches_from(frontier: Frontier, segments: Sequence[FoundSegment]) -> list[SegmentSearch]:
    """Searches for unlisted records at and after the frontier."""
    pending: dict[int, list[int]] = {}
    for address in sorted(frontier.pending):
        pending.setdefault(number_of(address), []).append(offset_of(address))
    first_offset = max(offset_of(frontier.next_address), SEGMENT_HEAD_BYTES)
    searches = []
    for segment in segments:
        start = SEGMENT_HEAD_BYTES
        if segment.number < frontier.scan_from:
            start = segment.end_offset
        elif segment.number == number_of(frontier.next_address):
            start = first_offset
        offsets = tuple(offset for offset in pending.get(segment.number, ()) if offset < start)
        if offsets or start < segment.end_offset:
            searches.append(SegmentSearch(segment, offsets, start))
    return searches


def search_all(namespace: NamespaceFiles, searches: Sequence[SegmentSearch]) -> Iterator[list[FoundRecord] | None]:
    """Records found by each search, in order; None if no bytes were written in the searched range."""
    search_one = partial(_search, namespace)
    if len(searches) <= SCAN_THREADS:
        yield from map(search_one, searches)
        return
    with DaemonPool(SCAN_THREADS, "hybridkv-scan") as pool:
        try:
            found = pool.map(search_one, searches)
        except RuntimeError as error:
            if not is_shortage(error):
                raise
            logger.warning("%s: one segment is read after the other", error)
            found = map(search_one, searches)
        yield from found


def _search(namespace: NamespaceFiles, search: SegmentSearch) -> list[FoundRecord] | None:
    """Records that every rank has at the same address. None if no bytes were written in the searched range."""
    common: dict[FoundRecord, None] | None = None
    is_read = False
    for rank, directory in enumerate(namespace.ranks):
        try:
            mine = _search_file(directory, rank, search, namespace.digest)
        except OSError as error:
            if is_fatal_at_open(error):
                raise
            logger.warning("%s of rank %d cannot be read: %s", segment_name(search.segment.number), rank, error)
            return []
        is_read |= mine is not None
        common = mine or {} if common is None else {record: None for record in common if record in (mine or {})}
    return list(common or {}) if is_read else None


def _search_file(
    directory: Directory, rank: int, search: SegmentSearch, digest: bytes
) -> dict[FoundRecord, None] | None:
    """Records in one rank's file. None if no bytes were written in the searched range."""
    segment = search.segment
    fd = directory.open_file(segment_name(segment.number), os.O_RDONLY)
    try:
        if not search.offsets and directory.io.next_data(fd, search.start) >= segment.end_offset:
            return None
        directory.io.advise_random(fd)
        file = _File(directory, fd, segment)
        return dict.fromkeys(
            FoundRecord(header.key, header.address, header.payload_bytes)
            for header in _headers_in(file, search)
            if (header.rank, header.namespace) == (rank, digest) and (segment.is_sealed or file.is_whole(header))
        )
    finally:
        directory.io.close(fd)


def _headers_in(file: _File, search: SegmentSearch) -> Iterator[RecordHeader]:
    """Each whole record header that has the address where it was read. Skips overlapping records."""
    behind = 0
    for offset in search.offsets:
        header = file.header_at(offset) if offset >= behind else None
        if header is not None:
            yield header
            behind = offset + record_bytes(header.payload_bytes)
    offset = search.start
    while offset < search.segment.end_offset:
        header = file.header_at(offset)
        if header is None:
            offset = file.next_record(offset + PAGE_BYTES)
            continue
        yield header
        offset += record_bytes(header.payload_bytes)


class _File:
    """One rank's open file of a segment. Keeps the last read window, to avoid most second reads."""

    def __init__(self, directory: Directory, fd: int, segment: FoundSegment) -> None:
        self._directory = directory
        self._fd = fd
        self._segment = segment
        self._window = b""
        """Pages read in the search for a record."""
        self._window_at = 0

    def header_at(self, offset: int) -> RecordHeader | None:
        at = offset - self._window_at
        if 0 <= at < len(self._window):
            page = self._window[at : at + RECORD_HEAD_BYTES]
        else:
            page = read_at(self._directory.io, self._fd, offset, RECORD_HEAD_BYTES)
        header = decode_record(page)
        return header if header is not None and self._is_at(header, offset) else None

    def _is_at(self, header: RecordHeader, offset: int) -> bool:
        fits = offset + record_bytes(header.payload_bytes) <= self._segment.segment_bytes
        return fits and header.address == address_of(self._segment.number, offset)

    def next_record(self, offset: int) -> int:
        """Offset of the next page that begins with the magic number of a record, at or after `offset`. The end of the
        segment if there is none."""
        while offset < self._segment.end_offset:
            if not self._window_at <= offset < self._window_at + len(self._window):
                offset = self._move_window(offset)
            first_page = (offset - self._window_at) // PAGE_BYTES
            words = np.frombuffer(self._window, "<u8")[:: PAGE_BYTES // 8][first_page:]
            places = np.flatnonzero(words == _MAGIC_NUMBER)
            if len(places):
                return offset + int(places[0]) * PAGE_BYTES
            offset = self._window_at + max(len(self._window), PAGE_BYTES)
        return self._segment.end_offset

    def _move_window(self, offset: int) -> int:
        """Read the window at `offset`, or at the next written page. Returns its offset."""
        end_offset = self._segment.end_offset
        written = self._directory.io.next_data(self._fd, offset) // PAGE_BYTES * PAGE_BYTES
        offset = max(offset, min(written, end_offset))
        data = read_at(self._directory.io, self._fd, offset, min(SEARCH_BYTES, end_offset - offset))
        self._window, self._window_at = data[: len(data) // PAGE_BYTES * PAGE_BYTES], offset
        return offset

    def is_whole(self, header: RecordHeader) -> bool:
        """True if the payload matches the checksum in its header. Does not read holes, and treats them as zeros: some
        file systems store written zeros as holes."""
        io, digest = self._directory.io, xxhash.xxh3_128()
        piece = memoryview(bytearray(min(header.payload_bytes, PIECE_BYTES)))
        offset = offset_of(header.address) + PAGE_BYTES
        end_offset, hole_bytes = offset + header.payload_bytes, 0
        while offset < end_offset:
            written = min(io.next_data(self._fd, offset), end_offset)
            hole_bytes += max(written - offset, 0)
            if hole_bytes > MAX_PAYLOAD_HOLE_BYTES:
                return False
            while offset < written:
                digest.update(_ZEROS[: written - offset])
                offset += min(len(_ZEROS), written - offset)
            if offset < end_offset:
                done = io.preadv(self._fd, [piece[: end_offset - offset]], offset)
                if not done:
                    return False
                digest.update(piece[:done])
                offset += done
        return digest.digest() == header.payload_checksum
