"""Recovery: finds the segments, the records and their LRU order on disk at a start. Changes nothing on disk.

A record is found in one of two ways:

- Listed: the snapshot, or a change after it, lists the record. The record must lie inside a segment that has a header
  of the present epoch on every rank. Its bytes are not read here: loads verify them.
- Searched: the record is read from a segment. Its header must be whole and contain the address where it was read. The
  segment must have its seal page on every rank, or the payload must match its checksum. Every rank must have the record
  at the same address.

Withdrawn records are dropped. Of several records of one key, the last written record counts: the one with the highest
address. The order of entries in the snapshot and the changes does not show which record was written last: a snapshot is
written while the index continues to work, so it may already contain the effect of a change that is replayed after it.
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
    searches_from,
    sort_out,
)
from hybridkv.tiers.files.directory import LARGEST_SMALL_FILE_BYTES, is_fatal_at_open

logger = logging.getLogger(__name__)


def frontier_of(saved: Snapshot, changes: Iterable[Change]) -> Frontier:
    """Frontier after a snapshot and these changes: the place up to which they list the records on disk."""
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
    """Keys by address, only for the addresses in these changes. A snapshot may have far more records."""
    wanted = {change.address for change in changes}
    addresses = np.asarray(saved.addresses, dtype=np.uint64)
    places = np.flatnonzero(np.isin(addresses, np.fromiter(wanted, dtype=np.uint64, count=len(wanted))))
    return {int(addresses[place]): saved.keys[place] for place in places.tolist()}


def replay(records: FoundRecords, key_at: dict[int, Key], changes: Iterable[Change]) -> set[Key]:
    """Apply changes to the records of a snapshot. Returns the keys of records with a new address.

    `records` must include records in deleted segments: the changes may move these records to other segments.
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


def drop_missing(end_of: Mapping[int, int], records: FoundRecords, doubtful: Iterable[Key]) -> None:
    """Drop doubtful records that are outside of the present segments. `end_of`: sizes of the segments by number."""
    for key in doubtful:
        record = records.get(key)
        if record is None:
            continue
        end_offset = offset_of(record.address) + record_bytes(record.payload_bytes)
        if end_offset > end_of.get(number_of(record.address), 0):
            records.remove(key)


EPOCHS_AHEAD = 1 << 32
"""Increase of the epoch if recovery begins a new epoch while the epoch of a segment is unknown. Each clear of a cache
increases the epoch by 1, and no cache is cleared so many times."""


class FoundStore(NamedTuple):
    """Result of `recover`."""

    epoch: int
    is_new_epoch: bool
    """True if the epoch must be written."""
    segments: list[FoundSegment]
    useless: list[int]
    """Segments to delete: of another epoch or version, damaged, or not on every rank."""
    unavailable: list[int]
    """Segments with a file that could not be opened. Their contents are unknown; this start does not touch them."""
    records: FoundRecords
    """Least recently used first."""
    next_number: int
    withdrawals: list[JournalEntry]
    num_scanned_segments: int
    """Number of segments that were searched for records."""
    num_changes: int
    """Number of changes read after the snapshot."""
    resume_at: changes.Decoded | None
    """File of changes to continue. None if the file is missing or damaged, a listed write had not ended, a listed
    record is withdrawn, or a segment has unlisted bytes."""
    is_restarted: bool = False
    """True if segment numbers restart from 0, so that addresses are assigned again."""


def recover(namespace: NamespaceFiles, max_metadata_bytes: int, max_records: int) -> FoundStore:
    """Read the store. Reads at most `max_records` records of a snapshot.

    A file counts as damaged if it cannot be read. A segment with a file that cannot be opened counts as unavailable,
    and is left alone.

    `OSError` if a directory cannot be read, a file is not this user's own, or this process is short of a resource.
    """
    headers = read_headers(namespace)
    epoch, is_new_epoch = _read_epoch(namespace, headers)
    segments, useless, unavailable = sort_out(headers, epoch)
    listed = _read_listed(namespace, epoch, segments, _MetadataBounds(max_metadata_bytes, max_records))
    withdrawals = _read_journal(namespace, max_metadata_bytes)
    next_number = max(
        next_free_number(headers, epoch),
        max((number_of(entry.bound) + 1 for entry in withdrawals), default=0),
        listed.frontier.next_number if listed.frontier is not None else 0,
    )
    if next_number > LARGEST_FIRST_NUMBER:
        return _restart_numbers(namespace, headers, epoch)
    searches = [SegmentSearch(segment, (), SEGMENT_HEAD_BYTES) for segment in segments]
    if listed.frontier is not None:
        searches = searches_from(listed.frontier, segments)
    num_searched = _add_found(namespace, searches, listed.records)
    num_withdrawn = _remove_withdrawn(listed.records, withdrawals)
    is_all_listed = not num_searched and not num_withdrawn
    return FoundStore(
        epoch,
        is_new_epoch,
        segments,
        useless,
        unavailable,
        listed.records,
        next_number,
        withdrawals,
        num_searched,
        listed.num_changes,
        listed.resume_at if is_all_listed else None,
    )


def _restart_numbers(namespace: NamespaceFiles, headers: dict[int, Row], epoch: int) -> FoundStore:
    """Result without records: the index numbers segments from 0 again."""
    logger.warning("%s: the numbers of segments are used up; beginning anew, without what was stored", namespace.path)
    unavailable = [number for number, row in headers.items() if NoHeader.UNAVAILABLE in row]
    useless = [number for number in headers if number not in unavailable]
    new_epoch = _unused_epoch(headers, epoch)
    return FoundStore(new_epoch, True, [], useless, unavailable, FoundRecords(), 0, [], 0, 0, None, is_restarted=True)


def _read_metadata(namespace: NamespaceFiles, name: str, max_bytes: int = LARGEST_SMALL_FILE_BYTES) -> bytes | None:
    """Contents of a metadata file. None if the file does not exist or is too large. Empty, which counts as damaged, if
    it cannot be read."""
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
    logger.warning(
        "%s: the epoch file is lost or damaged: stored chunks may be from before a reset, so they are dropped",
        namespace.path,
    )
    return _unused_epoch(headers, 0), True


def _unused_epoch(headers: dict[int, Row], epoch: int) -> int:
    """Epoch that no segment has; larger than all known epochs if possible."""
    used = {epoch, *epochs_in(headers.values())}
    is_known = all(NoHeader.UNAVAILABLE not in row for row in headers.values())
    following = max(used) + (1 if is_known else EPOCHS_AHEAD)
    return following if following <= LARGEST_EPOCH else next(number for number in count() if number not in used)


class _MetadataBounds(NamedTuple):
    """Limits for reading metadata files. A tier that has these limits in its options never writes more."""

    file_bytes: int
    num_records: int


class _Listed(NamedTuple):
    """Records that the snapshot and the changes list."""

    records: FoundRecords
    frontier: Frontier | None
    """Limit of the listed records, for the search for other records. None: every segment may hold unlisted records."""
    num_changes: int
    resume_at: changes.Decoded | None


def _read_listed(
    namespace: NamespaceFiles, epoch: int, segments: list[FoundSegment], bounds: _MetadataBounds
) -> _Listed:
    data = _read_metadata(namespace, SNAPSHOT_NAME, bounds.file_bytes)
    saved = None if data is None else snapshot.decode(data, namespace.digest, bounds.num_records)
    if data is not None and saved is None:
        logger.warning("%s: the snapshot is damaged; reading every segment", namespace.path)
    if data is None or saved is None or saved.epoch != epoch:
        return _Listed(FoundRecords(), None, 0, None)
    since = _read_changes(namespace, snapshot.checksum_of(data), bounds.file_bytes)
    end_of = {segment.number: segment.segment_bytes for segment in segments}
    records, doubtful = _records_of_snapshot(saved, end_of)
    if since is not None and since.changes:
        doubtful |= replay(records, keys_at(saved, since.changes), since.changes)
    drop_missing(end_of, records, doubtful)
    if since is None:
        return _Listed(records, frontier_of(saved, ()), 0, None)
    frontier = frontier_of(saved, since.changes)
    return _Listed(records, frontier, len(since.changes), since if since.is_whole and not frontier.pending else None)


def _read_changes(namespace: NamespaceFiles, base: bytes, max_bytes: int) -> changes.Decoded | None:
    """Changes after the snapshot with this checksum, up to the first damage. None without a file for this snapshot."""
    data = _read_metadata(namespace, CHANGES_NAME, min(max_bytes, LARGEST_CHANGES_BYTES))
    since = None if data is None else changes.decode(data, namespace.digest, base)
    if since is not None and not since.is_whole:
        logger.info(
            "%s: the end of the file of changes is damaged; searching the segments for later records", namespace.path
        )
    return since


def _read_journal(namespace: NamespaceFiles, max_bytes: int) -> list[JournalEntry]:
    data = _read_metadata(namespace, JOURNAL_NAME, min(max_bytes, LARGEST_JOURNAL_BYTES))
    found = [] if data is None else decode_journal(data, namespace.digest)
    if found is None:
        logger.warning(
            "%s: the journal of withdrawn records (%s) is damaged; withdrawn records may return, but loads "
            "verify their bytes",
            namespace.path,
            JOURNAL_NAME,
        )
        return []
    num_damaged = 0 if data is None else num_journal_entries(data) - len(found)
    if num_damaged:
        logger.warning(
            "%s: %d entries of the journal of withdrawn records (%s) are damaged; withdrawn records may return, but "
            "loads verify their bytes",
            namespace.path,
            num_damaged,
            JOURNAL_NAME,
        )
    return found


def _add_found(namespace: NamespaceFiles, searches: list[SegmentSearch], records: FoundRecords) -> int:
    """Add the unlisted records on disk, in the order of their writes. Returns the number of segments read."""
    num_searched = 0
    for rows in search_all(namespace, searches):
        num_searched += rows is not None
        for found in rows or ():
            before = records.get(found.key)
            if before is None or before.address < found.address:
                records.put(found)
    return num_searched


def _remove_withdrawn(records: FoundRecords, withdrawals: list[JournalEntry]) -> int:
    """Remove withdrawn records. Returns the number of removed records."""
    if not withdrawals:
        return 0
    withdrawn = Withdrawals(len(withdrawals) + 1)
    for entry in withdrawals:
        withdrawn.add(entry)
    covered = [record.key for record in records.in_order() if withdrawn.covers(record.key, record.address)]
    for key in covered:
        records.remove(key)
    return len(covered)


def _records_of_snapshot(saved: snapshot.Snapshot, end_of: dict[int, int]) -> tuple[FoundRecords, set[Key]]:
    """Records of a snapshot, and the keys of records outside of the present segments."""
    addresses = np.asarray(saved.addresses, dtype=np.uint64)
    sizes = np.asarray(saved.payload_bytes, dtype=np.uint64)
    page = np.uint64(PAGE_BYTES)
    numbers, inverse = np.unique(addresses >> np.uint64(ADDRESS_BITS), return_inverse=True)
    ends = np.array([end_of.get(number, 0) for number in numbers.tolist()], dtype=np.uint64)[inverse]
    offsets = addresses & np.uint64(LARGEST_SEGMENT_BYTES - 1)
    fits = sizes <= np.uint64(LARGEST_SEGMENT_BYTES)
    fits &= offsets + page + (sizes + page - np.uint64(1)) // page * page <= ends
    return FoundRecords(saved.keys, addresses, sizes), {saved.keys[place] for place in np.flatnonzero(~fits).tolist()}
