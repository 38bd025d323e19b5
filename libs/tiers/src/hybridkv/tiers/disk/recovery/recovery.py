"""Recovery: the segments, the records and their LRU order that a start finds on disk.

A record is found if its header is whole and names this address; if it is known to be whole (its segment is sealed, a
snapshot or change lists it, or its payload is read now and matches); if every rank has it at the same address; and if
it is not withdrawn. Of several records of one key the last written counts. A snapshot is read from an index that goes
on working, so it may contain effects of later changes: the record with the higher address counts, whichever is
listed first. Changes nothing on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import count
from typing import NamedTuple

import numpy as np

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.files.namespace import NamespaceFiles
from hybridkv.tiers.disk.format import changes, snapshot
from hybridkv.tiers.disk.format.changes import Change, Committed, Gone, Relocated, Reserved, Used
from hybridkv.tiers.disk.format.layout import (
    ADDRESS_BITS,
    CHANGES_NAME,
    EPOCH_NAME,
    JOURNAL_NAME,
    LARGEST_EPOCH,
    LARGEST_FIRST_NUMBER,
    LARGEST_SEGMENT_BYTES,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    SNAPSHOT_NAME,
    number_of,
    offset_of,
    record_bytes,
)
from hybridkv.tiers.disk.format.snapshot import Snapshot
from hybridkv.tiers.disk.format.withdrawals import (
    JournalEntry,
    Withdrawals,
    decode_epoch,
    decode_journal,
    num_journal_entries,
)
from hybridkv.tiers.disk.index.found import FoundRecord, FoundRecords
from hybridkv.tiers.disk.options import LARGEST_CHANGES_BYTES, LARGEST_JOURNAL_BYTES
from hybridkv.tiers.disk.recovery.scanner import (
    FoundSegment,
    Frontier,
    NoHeader,
    Row,
    SegmentSearch,
    epochs_in,
    next_free_number,
    read_headers,
    search_all,
    searches_behind,
    sort_out,
)
from hybridkv.tiers.files.directory import LARGEST_SMALL_FILE_BYTES, is_fatal_at_open

logger = logging.getLogger(__name__)


def frontier_of(saved: Snapshot, changes: Iterable[Change]) -> Frontier:
    """Frontier after these changes."""
    next_address, pending = saved.next_address, set(saved.pending)
    for change in changes:
        if isinstance(change, Reserved):
            pending.add(change.address)
            next_address = max(next_address, change.address + record_bytes(change.payload_bytes))
        elif isinstance(change, Relocated):
            pending.discard(change.new_address)
        elif isinstance(change, (Committed, Gone)):
            pending.discard(change.address)
    return Frontier(
        max(saved.next_number, number_of(next_address) + bool(offset_of(next_address))),
        max(saved.scan_from, number_of(next_address)),
        next_address,
        frozenset(pending),
    )


def keys_at(saved: Snapshot, changes: Iterable[Change]) -> dict[int, Key]:
    """Keys of the records that these changes name by address, and that the snapshot lists: few of a large one."""
    wanted = {change.address for change in changes}
    addresses = np.asarray(saved.addresses, dtype=np.uint64)
    places = np.flatnonzero(np.isin(addresses, np.fromiter(wanted, dtype=np.uint64, count=len(wanted))))
    return {int(addresses[place]): saved.keys[place] for place in places.tolist()}


def replay(records: FoundRecords, key_at: dict[int, Key], changes: Iterable[Change]) -> set[Key]:
    """Bring the records of a snapshot up to date. Returns the keys of records that moved.

    Records in deleted segments must be included: they may have been moved before.
    """
    placed: set[Key] = set()
    for change in changes:
        if isinstance(change, Used):
            key = key_at.get(change.address)
            if key is not None and key in records:
                records.use(key)
        elif isinstance(change, Committed):
            before = records.get(change.key)
            if before is None or before.address <= change.address:
                records.put(FoundRecord(change.key, change.address, change.payload_bytes))
                key_at[change.address] = change.key
                placed.add(change.key)
        elif isinstance(change, Relocated):
            key = key_at.pop(change.address, None)
            record = records.get(key) if key is not None else None
            if record is not None and record.address == change.address:
                records.replace(record._replace(address=change.new_address))
                key_at[change.new_address] = record.key
                placed.add(record.key)
        elif isinstance(change, Gone):
            key = key_at.pop(change.address, None)
            record = records.get(key) if key is not None else None
            if record is not None and record.address == change.address:
                records.remove(record.key)
    return placed


def keep_those_in(end_of: Mapping[int, int], records: FoundRecords, doubtful: Iterable[Key]) -> None:
    """Drop doubtful records that lie outside of the present segments. `end_of`: their sizes."""
    for key in doubtful:
        record = records.get(key)
        if record is None:
            continue
        end_offset = offset_of(record.address) + record_bytes(record.payload_bytes)
        if end_offset > end_of.get(number_of(record.address), 0):
            records.remove(key)


EPOCHS_AHEAD = 1 << 32
"""Jump if the epoch is lost and some segment's epoch is unknown: more than a cache is ever cleared."""


class FoundStore(NamedTuple):
    """Result of `recover`."""

    epoch: int
    is_new_epoch: bool
    """The epoch must be written."""
    segments: list[FoundSegment]
    useless: list[int]
    """Segments to delete: earlier epochs, other versions, damaged, or not on every rank."""
    unavailable: list[int]
    """Segments with a file that could not be opened. Their contents are unknown; they are left alone."""
    records: FoundRecords
    """Least recently used first."""
    next_number: int
    withdrawals: list[JournalEntry]
    num_scanned_segments: int
    """Segments with records to read."""
    num_changes: int
    """Changes read beside the snapshot."""
    resume_at: changes.Decoded | None
    """End of the file of changes, if it and the snapshot name exactly the found records."""
    is_restarted: bool = False
    """Addresses are given out a second time."""


def recover(namespace: NamespaceFiles, max_metadata_bytes: int, max_records: int) -> FoundStore:
    """Read the store. An unreadable file counts as damaged; of a snapshot, at most `max_records` records are read.

    `OSError` if a directory cannot be read or a file is not ours.
    """
    headers = read_headers(namespace)
    epoch, is_new_epoch = _read_epoch(namespace, headers)
    segments, useless, unavailable = sort_out(headers, epoch)
    named = _read_names(namespace, epoch, segments, _MetadataBounds(max_metadata_bytes, max_records))
    withdrawals = _read_journal(namespace, max_metadata_bytes)
    next_number = max(
        next_free_number(headers, epoch),
        max((number_of(entry.bound) + 1 for entry in withdrawals), default=0),
        named.frontier.next_number if named.frontier is not None else 0,
    )
    if next_number > LARGEST_FIRST_NUMBER:
        return _restart_numbers(namespace, headers, epoch)
    searches = [SegmentSearch(segment, (), SEGMENT_HEAD_BYTES) for segment in segments]
    if named.frontier is not None:
        searches = searches_behind(named.frontier, segments)
    num_searched = _add_found(namespace, searches, named.records)
    num_withdrawn = _remove_withdrawn(named.records, withdrawals)
    is_all_named = not num_searched and not num_withdrawn
    return FoundStore(
        epoch,
        is_new_epoch,
        segments,
        useless,
        unavailable,
        named.records,
        next_number,
        withdrawals,
        num_searched,
        named.num_changes,
        named.resume_at if is_all_named else None,
    )


def _restart_numbers(namespace: NamespaceFiles, headers: dict[int, Row], epoch: int) -> FoundStore:
    """Drop everything, and number segments from 0."""
    logger.warning("%s: the numbers of segments are used up; beginning anew, without what was stored", namespace.path)
    unavailable = [number for number, row in headers.items() if NoHeader.UNAVAILABLE in row]
    useless = [number for number in headers if number not in unavailable]
    new_epoch = _unused_epoch(headers, epoch)
    return FoundStore(new_epoch, True, [], useless, unavailable, FoundRecords(), 0, [], 0, 0, None, is_restarted=True)


def _read_metadata(namespace: NamespaceFiles, name: str, max_bytes: int = LARGEST_SMALL_FILE_BYTES) -> bytes | None:
    """None if the file does not exist; empty, which counts as damaged, if it cannot be read."""
    try:
        return namespace.directory.read_file(name, max_bytes)
    except OSError as error:
        if is_fatal_at_open(error):
            raise
        logger.warning("%s/%s cannot be read: %s", namespace.path, name, error)
        return b""


def _read_epoch(namespace: NamespaceFiles, headers: dict[int, Row]) -> tuple[int, bool]:
    data = _read_metadata(namespace, EPOCH_NAME)
    epoch = None if data is None else decode_epoch(data, namespace.digest)
    if epoch is not None:
        return epoch, False
    if data is None and not headers:
        return 0, True
    logger.warning("%s: the epoch is lost: what is stored may have been cleared", namespace.path)
    return _unused_epoch(headers, 0), True


def _unused_epoch(headers: dict[int, Row], epoch: int) -> int:
    """A later epoch that no segment has."""
    used = {epoch, *epochs_in(headers.values())}
    is_known = all(NoHeader.UNAVAILABLE not in row for row in headers.values())
    following = max(used) + (1 if is_known else EPOCHS_AHEAD)
    return following if following <= LARGEST_EPOCH else next(number for number in count() if number not in used)


class _MetadataBounds(NamedTuple):
    """Limits of metadata that is read. With these options a store writes no more."""

    file_bytes: int
    num_records: int


class _Named(NamedTuple):
    """Records that snapshot and changes list."""

    records: FoundRecords
    frontier: Frontier | None
    """None: any segment may hold other records."""
    num_changes: int
    resume_at: changes.Decoded | None


def _read_names(namespace: NamespaceFiles, epoch: int, segments: list[FoundSegment], bounds: _MetadataBounds) -> _Named:
    data = _read_metadata(namespace, SNAPSHOT_NAME, bounds.file_bytes)
    saved = None if data is None else snapshot.decode(data, namespace.digest, bounds.num_records)
    if data is not None and saved is None:
        logger.warning("%s: the snapshot is damaged; reading every segment", namespace.path)
    if data is None or saved is None or saved.epoch != epoch:
        return _Named(FoundRecords(), None, 0, None)
    since = _read_changes(namespace, snapshot.checksum_of(data), bounds.file_bytes)
    end_of = {segment.number: segment.segment_bytes for segment in segments}
    records, doubtful = _named(saved, end_of)
    if since is not None and since.changes:
        doubtful |= replay(records, keys_at(saved, since.changes), since.changes)
    keep_those_in(end_of, records, doubtful)
    if since is None:
        return _Named(records, frontier_of(saved, ()), 0, None)
    frontier = frontier_of(saved, since.changes)
    return _Named(records, frontier, len(since.changes), since if since.is_whole and not frontier.pending else None)


def _read_changes(namespace: NamespaceFiles, base: bytes, max_bytes: int) -> changes.Decoded | None:
    """Changes after the snapshot with this checksum, as far as they are readable."""
    data = _read_metadata(namespace, CHANGES_NAME, min(max_bytes, LARGEST_CHANGES_BYTES))
    since = None if data is None else changes.decode(data, namespace.digest, base)
    if since is not None and not since.is_whole:
        logger.info("%s: the last changes are not whole; reading what is newer", namespace.path)
    return since


def _read_journal(namespace: NamespaceFiles, max_bytes: int) -> list[JournalEntry]:
    data = _read_metadata(namespace, JOURNAL_NAME, min(max_bytes, LARGEST_JOURNAL_BYTES))
    found = [] if data is None else decode_journal(data, namespace.digest)
    if found is None:
        logger.warning("%s: the quarantine journal is damaged; loads verify anyway", namespace.path)
        return []
    num_damaged = 0 if data is None else num_journal_entries(data) - len(found)
    if num_damaged:
        logger.warning(
            "%s: %d entries of the quarantine journal are damaged; loads verify anyway", namespace.path, num_damaged
        )
    return found


def _add_found(namespace: NamespaceFiles, searches: list[SegmentSearch], records: FoundRecords) -> int:
    """Add the unlisted records on disk, the last written last. Returns the number of segments read."""
    num_searched = 0
    for rows in search_all(namespace, searches):
        num_searched += rows is not None
        for found in rows or ():
            before = records.get(found.key)
            if before is None or before.address < found.address:
                records.put(found)
    return num_searched


def _remove_withdrawn(records: FoundRecords, withdrawals: list[JournalEntry]) -> int:
    """Returns the number of removed records."""
    if not withdrawals:
        return 0
    withdrawn = Withdrawals(len(withdrawals) + 1)
    for entry in withdrawals:
        withdrawn.add(entry)
    covered = [record.key for record in records.in_order() if withdrawn.covers(record.key, record.address)]
    for key in covered:
        records.remove(key)
    return len(covered)


def _named(saved: snapshot.Snapshot, end_of: dict[int, int]) -> tuple[FoundRecords, set[Key]]:
    """Records of a snapshot, and the keys of those outside of the present segments."""
    addresses = np.asarray(saved.addresses, dtype=np.uint64)
    sizes = np.asarray(saved.payload_bytes, dtype=np.uint64)
    page = np.uint64(PAGE_BYTES)
    numbers, inverse = np.unique(addresses >> np.uint64(ADDRESS_BITS), return_inverse=True)
    ends = np.array([end_of.get(number, 0) for number in numbers.tolist()], dtype=np.uint64)[inverse]
    offsets = addresses & np.uint64(LARGEST_SEGMENT_BYTES - 1)
    fits = sizes <= np.uint64(LARGEST_SEGMENT_BYTES)
    fits &= offsets + page + (sizes + page - np.uint64(1)) // page * page <= ends
    return FoundRecords(saved.keys, addresses, sizes), {saved.keys[place] for place in np.flatnonzero(~fits).tolist()}
