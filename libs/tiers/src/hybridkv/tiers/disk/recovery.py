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
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk import epoch as epoch_file
from hybridkv.tiers.disk import journal, snapshot
from hybridkv.tiers.disk.directory import Directory
from hybridkv.tiers.disk.format import (
    RECORD_HEAD_BYTES,
    RECORD_MAGIC,
    SEGMENT_HEAD_USED_BYTES,
    RecordHeader,
    checksum,
    decode_record,
    decode_seal,
    decode_segment,
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
from hybridkv.tiers.disk.names import EPOCH_NAME, JOURNAL_NAME, SNAPSHOT_NAME, segment_name, segment_number
from hybridkv.tiers.disk.namespace import Namespace

logger = logging.getLogger(__name__)

SEARCH_BYTES = 1 << 18
"""Read at once while looking for the next record behind a place where none is."""
SCAN_THREADS = 8
"""Segments that are read side by side: where a record begins is known when the one before was read, so one reader
would wait for the device most of the time."""
_MAGIC_NUMBER = np.frombuffer(RECORD_MAGIC, "<u8")[0]


class FoundSegment(NamedTuple):
    """A segment that every rank has, of the present epoch."""

    number: int
    segment_bytes: int
    end_offset: int
    """Behind its last record, or the segment's size where that is not known."""
    is_sealed: bool


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
    records: list[FoundRecord]
    """Least recently used first."""
    next_number: int
    withdrawals: list[journal.Withdrawal]
    num_scanned_segments: int


def recover(namespace: Namespace, max_metadata_bytes: int) -> Found:
    """Read what is there. `OSError` when the directory itself cannot be read."""
    headers = _read_headers(namespace)
    epoch, is_new_epoch = _read_epoch(namespace, headers)
    segments, useless = _sort_out(namespace, headers, epoch)
    saved = _read_snapshot(namespace, epoch, max_metadata_bytes)
    withdrawals = _read_journal(namespace, max_metadata_bytes)
    scan_from = saved.scan_from if saved else 0
    scanned = [segment for segment in segments if segment.number >= scan_from]
    records = _merge(namespace, segments, scanned, saved, withdrawals)
    numbers = [number + 1 for number in headers]
    numbers += [number_of(entry.bound) + 1 for entry in withdrawals]
    next_number = max([saved.next_number if saved else 0, *numbers], default=0)
    return Found(epoch, is_new_epoch, segments, useless, records, next_number, withdrawals, len(scanned))


class _Header(NamedTuple):
    """What one rank's file of a segment says."""

    epoch: int
    segment_bytes: int
    end_offset: int | None


def _read_headers(namespace: Namespace) -> dict[int, list[_Header | None]]:
    found: dict[int, list[_Header | None]] = {}
    for rank, directory in enumerate(namespace.ranks):
        for name in directory.list():
            number = segment_number(name)
            if number is not None:
                row = found.setdefault(number, [None] * namespace.num_ranks)
                row[rank] = _read_header(directory, rank, number, namespace.digest)
    return dict(sorted(found.items()))


def _read_header(directory: Directory, rank: int, number: int, digest: bytes) -> _Header | None:
    fd = directory.open_file(segment_name(number), os.O_RDONLY)
    try:
        try:
            page = _read(directory, fd, 0, PAGE_BYTES + SEGMENT_HEAD_USED_BYTES)
        except OSError as error:
            logger.warning("%s of rank %d cannot be read: %s", segment_name(number), rank, error)
            return None
        header = decode_segment(page)
        if header is None or (header.rank, header.number, header.namespace) != (rank, number, digest):
            return None
        if directory.io.stat(fd).st_size < header.segment_bytes:
            return None
        return _Header(header.epoch, header.segment_bytes, decode_seal(page[PAGE_BYTES:], header))
    finally:
        directory.io.close(fd)


def _read_epoch(namespace: Namespace, headers: dict[int, list[_Header | None]]) -> tuple[int, bool]:
    data = namespace.directory.read_file(EPOCH_NAME)
    epoch = None if data is None else epoch_file.decode(data, namespace.digest)
    if epoch is not None:
        return epoch, False
    seen = [header.epoch for row in headers.values() for header in row if header is not None]
    if not seen:
        return 0, True
    logger.warning("%s: the epoch is lost: what is stored may have been cleared", namespace.directory.path)
    return max(seen) + 1, True


def _sort_out(
    namespace: Namespace, headers: dict[int, list[_Header | None]], epoch: int
) -> tuple[list[FoundSegment], list[int]]:
    good, useless = [], []
    for number, row in headers.items():
        whole = [header for header in row if header is not None and header.epoch == epoch]
        if len(whole) < namespace.num_ranks:
            useless.append(number)
            continue
        ends = [header.end_offset for header in whole]
        size = min(header.segment_bytes for header in whole)
        end = max((end for end in ends if end is not None), default=size)
        good.append(FoundSegment(number, size, min(end, size), None not in ends))
    return good, useless


def _read_snapshot(namespace: Namespace, epoch: int, max_bytes: int) -> snapshot.Snapshot | None:
    data = namespace.directory.read_file(SNAPSHOT_NAME, max_bytes)
    saved = None if data is None else snapshot.decode(data, namespace.digest)
    if data is not None and saved is None:
        logger.warning("%s: the snapshot is damaged; reading every segment", namespace.directory.path)
    return saved if saved is not None and saved.epoch == epoch else None


def _read_journal(namespace: Namespace, max_bytes: int) -> list[journal.Withdrawal]:
    data = namespace.directory.read_file(JOURNAL_NAME, max_bytes)
    found = [] if data is None else journal.decode(data, namespace.digest)
    if found is None:
        logger.warning("%s: the quarantine journal is damaged; loads verify anyway", namespace.directory.path)
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
    with ThreadPoolExecutor(SCAN_THREADS, "hybridkv-scan") as pool:
        yield from pool.map(lambda segment: _scan_segment(namespace, segment, known), segments)


def _scan_segment(namespace: Namespace, segment: FoundSegment, known: set[int]) -> list[FoundRecord]:
    """The records that every rank has at the same address."""
    common: dict[FoundRecord, None] | None = None
    for rank, directory in enumerate(namespace.ranks):
        fd = directory.open_file(segment_name(segment.number), os.O_RDONLY)
        try:
            directory.io.advise_random(fd)
            mine = dict.fromkeys(
                FoundRecord(header.key, header.address, header.payload_bytes)
                for header in _headers_in(directory, fd, segment)
                if (header.rank, header.namespace) == (rank, namespace.digest)
                and (segment.is_sealed or header.address in known or _is_whole(directory, fd, header))
            )
        except OSError as error:
            logger.warning("%s of rank %d cannot be read: %s", segment_name(segment.number), rank, error)
            return []
        finally:
            directory.io.close(fd)
        common = mine if common is None else {record: None for record in common if record in mine}
    return list(common or {})


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
        window = _read(directory, fd, offset, min(SEARCH_BYTES, segment.end_offset - offset))
        words = np.frombuffer(window[: len(window) // PAGE_BYTES * PAGE_BYTES], "<u8")[:: PAGE_BYTES // 8]
        places = np.flatnonzero(words == _MAGIC_NUMBER)
        if len(places):
            return offset + int(places[0]) * PAGE_BYTES
        offset += max(len(window), PAGE_BYTES)
    return segment.end_offset


def _is_whole(directory: Directory, fd: int, header: RecordHeader) -> bool:
    payload = _read(directory, fd, offset_of(header.address) + PAGE_BYTES, header.payload_bytes)
    return len(payload) == header.payload_bytes and checksum(payload) == header.payload_checksum


def _read(directory: Directory, fd: int, offset: int, num_bytes: int) -> bytes:
    """As much as there is."""
    data = memoryview(bytearray(num_bytes))
    done = 0
    while done < num_bytes:
        got = directory.io.preadv(fd, [data[done:]], offset + done)
        if not got:
            break
        done += got
    return bytes(data[:done])
