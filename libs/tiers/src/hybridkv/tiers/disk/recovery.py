"""What an opening finds on disk: which segments, which records, in which order of use.

A record is found when its header is whole and says this place, when the record was written whole (its segment is
sealed, or a snapshot names it, or its payload is read now and agrees), when every rank has it at the same address, and
when nobody withdrew it. Of several with one key the last written counts. Changes nothing on disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk import epoch as epoch_file
from hybridkv.tiers.disk import journal, snapshot
from hybridkv.tiers.disk.directory import LARGEST_SMALL_FILE_BYTES, Directory, stops_an_opening
from hybridkv.tiers.disk.format import (
    RECORD_HEAD_BYTES,
    RECORD_MAGIC,
    RecordHeader,
    checksum,
    decode_record,
)
from hybridkv.tiers.disk.layout import (
    ADDRESS_BITS,
    LARGEST_SEGMENT_BYTES,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    address_of,
    number_of,
    offset_of,
    record_bytes,
)
from hybridkv.tiers.disk.names import EPOCH_NAME, JOURNAL_NAME, SNAPSHOT_NAME, segment_name
from hybridkv.tiers.disk.namespace import Namespace
from hybridkv.tiers.disk.segment_headers import FoundSegment, NoHeader, Row, epochs_in, read_at, read_headers, sort_out

logger = logging.getLogger(__name__)

SEARCH_BYTES = 1 << 18
"""Read at once while looking for the next record behind a place where none is."""
SCAN_THREADS = 8
"""Segments that are read side by side where there are more: where a record begins is known when the one before was
read, so one reader would wait for the device most of the time."""
EPOCHS_AHEAD = 1 << 32
"""Where the epoch is lost beside a segment of an unknown one: further than anybody ever clears a cache."""
_MAGIC_NUMBER = np.frombuffer(RECORD_MAGIC, "<u8")[0]


class FoundRecord(NamedTuple):
    """A record that may be offered."""

    key: Key
    address: int
    payload_bytes: int


class Found(NamedTuple):
    """Everything."""

    epoch: int
    is_new_epoch: bool
    """The epoch has to be written down."""
    segments: list[FoundSegment]
    useless: list[int]
    """Segments to be deleted: older epochs, other versions, damaged, or not on every rank."""
    unavailable: list[int]
    """Segments of which nothing is known, because a file of theirs could not be opened. Left alone."""
    records: list[FoundRecord]
    """Least recently used first."""
    next_number: int
    withdrawals: list[journal.Withdrawal]
    num_scanned_segments: int


def recover(namespace: Namespace, max_metadata_bytes: int) -> Found:
    """Read what is there, a file that cannot be read as a damaged one.

    `OSError` when a directory cannot be read or a file is not ours.
    """
    headers = read_headers(namespace)
    epoch, is_new_epoch = _read_epoch(namespace, headers)
    segments, useless, unavailable = sort_out(headers, epoch)
    saved = _read_snapshot(namespace, epoch, max_metadata_bytes)
    withdrawals = _read_journal(namespace, max_metadata_bytes)
    scan_from = saved.scan_from if saved else 0
    scanned = [segment for segment in segments if segment.number >= scan_from]
    records = _merge(namespace, segments, scanned, saved, withdrawals)
    numbers = [number + 1 for number in headers]
    numbers += [number_of(entry.bound) + 1 for entry in withdrawals]
    next_number = max([saved.next_number if saved else 0, *numbers], default=0)
    return Found(epoch, is_new_epoch, segments, useless, unavailable, records, next_number, withdrawals, len(scanned))


def _read_metadata(namespace: Namespace, name: str, max_bytes: int = LARGEST_SMALL_FILE_BYTES) -> bytes | None:
    """None when there is no such file, nothing, which is as damaged, when it cannot be read."""
    try:
        return namespace.directory.read_file(name, max_bytes)
    except OSError as error:
        if stops_an_opening(error):
            raise
        logger.warning("%s/%s cannot be read: %s", namespace.path, name, error)
        return b""


def _read_epoch(namespace: Namespace, headers: dict[int, Row]) -> tuple[int, bool]:
    data = _read_metadata(namespace, EPOCH_NAME)
    epoch = None if data is None else epoch_file.decode(data, namespace.digest)
    if epoch is not None:
        return epoch, False
    if data is None and not headers:
        return 0, True
    logger.warning("%s: the epoch is lost: what is stored may have been cleared", namespace.path)
    is_known = all(NoHeader.UNAVAILABLE not in row for row in headers.values())
    return max(epochs_in(headers.values()), default=0) + (1 if is_known else EPOCHS_AHEAD), True


def _read_snapshot(namespace: Namespace, epoch: int, max_bytes: int) -> snapshot.Snapshot | None:
    data = _read_metadata(namespace, SNAPSHOT_NAME, max_bytes)
    saved = None if data is None else snapshot.decode(data, namespace.digest)
    if data is not None and saved is None:
        logger.warning("%s: the snapshot is damaged; reading every segment", namespace.path)
    return saved if saved is not None and saved.epoch == epoch else None


def _read_journal(namespace: Namespace, max_bytes: int) -> list[journal.Withdrawal]:
    data = _read_metadata(namespace, JOURNAL_NAME, max_bytes)
    found = [] if data is None else journal.decode(data, namespace.digest)
    if found is None:
        logger.warning("%s: the quarantine journal is damaged; loads verify anyway", namespace.path)
        return []
    return found


def _merge(
    namespace: Namespace,
    segments: list[FoundSegment],
    scanned: list[FoundSegment],
    saved: snapshot.Snapshot | None,
    withdrawals: list[journal.Withdrawal],
) -> list[FoundRecord]:
    records = {} if saved is None else _named(saved, segments)
    known = {record.address for record in records.values()} if scanned else set()
    next_address, pending = (saved.next_address, set(saved.pending)) if saved is not None else (0, set())
    for segment_records in _scan(namespace, scanned, known):
        for found in segment_records:
            if found.address < next_address and found.address not in pending and found.address not in known:
                continue  # it was evicted or withdrawn before the snapshot
            before = records.get(found.key)
            if before is None or before.address < found.address:
                records.pop(found.key, None)
                records[found.key] = found
    withdrawn = journal.Withdrawals(len(withdrawals) + 1)
    for entry in withdrawals:
        withdrawn.add(entry)
    if not withdrawals:
        return list(records.values())
    return [record for record in records.values() if not withdrawn.covers(record.key, record.address)]


def _named(saved: snapshot.Snapshot, segments: list[FoundSegment]) -> dict[Key, FoundRecord]:
    """The records of a snapshot that lie in segments that are still there."""
    addresses = np.asarray(saved.addresses, dtype=np.uint64)
    sizes = np.asarray(saved.payload_bytes, dtype=np.uint64)
    page = np.uint64(PAGE_BYTES)
    numbers, inverse = np.unique(addresses >> np.uint64(ADDRESS_BITS), return_inverse=True)
    end_of = {segment.number: segment.segment_bytes for segment in segments}
    ends = np.array([end_of.get(number, 0) for number in numbers.tolist()], dtype=np.uint64)[inverse]
    offsets = addresses & np.uint64(LARGEST_SEGMENT_BYTES - 1)
    fits = sizes <= np.uint64(LARGEST_SEGMENT_BYTES)
    fits &= offsets + page + (sizes + page - np.uint64(1)) // page * page <= ends
    rows = map(FoundRecord, saved.keys, addresses.tolist(), sizes.tolist())
    if fits.all():
        return dict(zip(saved.keys, rows, strict=True))
    return {row.key: row for row, is_there in zip(rows, fits.tolist(), strict=True) if is_there}


def _scan(namespace: Namespace, segments: list[FoundSegment], known: set[int]) -> Iterator[list[FoundRecord]]:
    """The records of each segment, in the order of the segments."""
    scan = partial(_scan_segment, namespace, known)
    if len(segments) <= SCAN_THREADS:
        yield from map(scan, segments)
        return
    with ThreadPoolExecutor(SCAN_THREADS, "hybridkv-scan") as pool:
        yield from pool.map(scan, segments)


def _scan_segment(namespace: Namespace, known: set[int], segment: FoundSegment) -> list[FoundRecord]:
    """The records that every rank has at the same address."""
    common: dict[FoundRecord, None] | None = None
    for rank, directory in enumerate(namespace.ranks):
        try:
            mine = _scan_file(directory, rank, segment, namespace.digest, known)
        except OSError as error:
            if stops_an_opening(error):
                raise
            logger.warning("%s of rank %d cannot be read: %s", segment_name(segment.number), rank, error)
            return []
        common = mine if common is None else {record: None for record in common if record in mine}
    return list(common or {})


def _scan_file(
    directory: Directory, rank: int, segment: FoundSegment, digest: bytes, known: set[int]
) -> dict[FoundRecord, None]:
    fd = directory.open_file(segment_name(segment.number), os.O_RDONLY)
    try:
        directory.io.advise_random(fd)
        return dict.fromkeys(
            FoundRecord(header.key, header.address, header.payload_bytes)
            for header in _headers_in(directory, fd, segment)
            if (header.rank, header.namespace) == (rank, digest)
            and (segment.is_sealed or header.address in known or _is_whole(directory, fd, header))
        )
    finally:
        directory.io.close(fd)


def _headers_in(directory: Directory, fd: int, segment: FoundSegment) -> Iterator[RecordHeader]:
    """Every whole record header of the segment that was written for the place where it stands."""
    offset = SEGMENT_HEAD_BYTES
    buffer = memoryview(bytearray(RECORD_HEAD_BYTES))
    while offset < segment.end_offset:
        done = directory.io.preadv(fd, [buffer], offset)
        header = decode_record(buffer) if done == RECORD_HEAD_BYTES else None
        if header is None or not _is_at(header, segment, offset):
            offset = _next_record(directory, fd, segment, offset + PAGE_BYTES)
            continue
        yield header
        offset += record_bytes(header.payload_bytes)


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
