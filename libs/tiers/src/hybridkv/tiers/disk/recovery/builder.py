"""Builder of a disk index: recovers a store, and builds the tables of the index from the found records."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.files.other_files import log_differences, log_unknown_files, remove_leftovers
from hybridkv.tiers.disk.files.segment_files import SegmentFiles
from hybridkv.tiers.disk.format.layout import JOURNAL_NAME
from hybridkv.tiers.disk.index.change_log import ChangeLog, ChangesFile
from hybridkv.tiers.disk.index.records import RecordTable
from hybridkv.tiers.disk.index.segments import Segment, SegmentStage, SegmentTable
from hybridkv.tiers.disk.maintenance.chore import Epoch, StoreFiles, StoreState, Tables, run
from hybridkv.tiers.disk.maintenance.compaction import Compaction
from hybridkv.tiers.disk.maintenance.maintenance import Chores
from hybridkv.tiers.disk.maintenance.withdrawals import WriteEpoch
from hybridkv.tiers.disk.options import FEWEST_SEGMENTS, DiskOptions, DiskSizes, Fsync
from hybridkv.tiers.disk.recovery.recovery import FoundStore, recover
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.files.directory import directory_error
from hybridkv.tiers.yielding import trim_heap

logger = logging.getLogger(__name__)


class OpenedStore(NamedTuple):
    """State and file work of an opened store."""

    state: StoreState
    chores: Chores


def build_store(
    namespace: Namespace,
    fingerprint: Fingerprint,
    options: DiskOptions,
    sizes: DiskSizes,
    clock: Callable[[], float],
) -> OpenedStore:
    """Build the tables and do the file work that is due. `TierConfigurationError` if the directory cannot be read or
    the tables are too large; then closes the namespace."""
    with _without_garbage_collection():
        opened = _build_store(namespace, fingerprint, options, sizes, clock)
    trim_heap()
    opened.state.records.make_room(0, 0)
    opened.chores.run_before_open()
    return opened


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: no object built here is garbage, and repeated collections take longer than the
    build."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _build_store(
    namespace: Namespace,
    fingerprint: Fingerprint,
    options: DiskOptions,
    sizes: DiskSizes,
    clock: Callable[[], float],
) -> OpenedStore:
    started_s = time.monotonic()
    found = _recover(namespace, fingerprint, sizes)
    log = ChangeLog()
    segments = _segment_table(sizes, found)
    try:
        records = RecordTable(segments, log, sizes)
    except TierConfigurationError:
        namespace.close()
        raise
    records.restore(found.records)
    _shrink(segments, records, options, sizes)
    syncs = options.fsync is not Fsync.NONE
    changes = ChangesFile(log, options, sizes.changes_bytes, clock, found.resume_at)
    files = StoreFiles(namespace, SegmentFiles(namespace, options.capacity_bytes, syncs), changes, syncs)
    state = StoreState(options, sizes, Tables(segments, records), files, _write_epoch(files, found), clock)
    try:
        files.segments.make_room(segments.allocated_bytes + sizes.metadata_bytes)
    except OSError as error:
        logger.warning("%s: %s", namespace.root.path, error)
    logger.info(
        "disk tier in %s: index of at most %d records takes at most %.1f MiB; now %d records, %.1f MiB of %.1f MiB "
        "used, opened in %.2f s (%d of %d segments and %d changes read)",
        namespace.path,
        records.max_keys,
        records.max_index_bytes / 2**20,
        records.num_keys,
        records.used_bytes / 2**20,
        sizes.usable_bytes / 2**20,
        time.monotonic() - started_s,
        found.num_scanned_segments,
        len(found.segments),
        found.num_changes,
    )
    return OpenedStore(state, Chores(state, found.withdrawals))


def _recover(namespace: Namespace, fingerprint: Fingerprint, sizes: DiskSizes) -> FoundStore:
    """Recover the store. If it has no segments, log how the most similar other cache differs. Log unknown files, and
    remove half-written files."""
    try:
        found = recover(namespace, sizes.metadata_bytes, sizes.max_records)
        if not found.segments:
            log_differences(namespace, fingerprint)
        log_unknown_files(namespace)
        remove_leftovers(namespace.directory)
    except OSError as error:
        namespace.close()
        raise directory_error(namespace.root.path, error) from error
    return found


def _segment_table(sizes: DiskSizes, found: FoundStore) -> SegmentTable:
    table = SegmentTable(sizes, found.next_number)
    for number, segment_bytes, end_offset, is_sealed in found.segments:
        segment = Segment(number, segment_bytes, found.epoch)
        segment.stage = SegmentStage.FULL
        segment.end_offset = end_offset
        segment.is_sealed = is_sealed
        # An unsealed segment may hold a torn record.
        segment.may_be_sealed = is_sealed
        table.add(segment)
        table.allocated_bytes += segment_bytes * sizes.num_ranks
    for number in (*found.useless, *found.unavailable):
        segment = Segment(number, sizes.segment_bytes, found.epoch)
        segment.stage = SegmentStage.FULL
        segment.may_be_sealed = False
        table.add(segment)
        table.allocated_bytes += segment.segment_bytes * sizes.num_ranks
    for number in found.unavailable:
        table.by_number[number].stage = SegmentStage.UNAVAILABLE
        table.refile(table.by_number[number])
    return table


def _shrink(segments: SegmentTable, records: RecordTable, options: DiskOptions, sizes: DiskSizes) -> None:
    """Evict whole segments if the capacity is smaller than before.

    First evicts segments that are too large for this capacity, because too few other segments fit beside them. Then
    evicts segments with the smallest share of live bytes.
    """
    compaction = Compaction(segments, records)
    left_bytes = segments.allocated_bytes - sum(s.segment_bytes for s in segments.dead.values()) * sizes.num_ranks
    largest_bytes = sizes.data_bytes // (FEWEST_SEGMENTS * sizes.num_ranks)
    living = [segment for segment in segments.by_number.values() if segment.live_bytes]
    best_first = sorted(
        living, key=lambda s: (s.segment_bytes > largest_bytes, -s.live_bytes / s.segment_bytes, s.segment_bytes)
    )
    while left_bytes > segments.limit_bytes and best_first:
        segment = best_first.pop()
        compaction.empty(segment)
        left_bytes -= segment.segment_bytes * sizes.num_ranks
    # Limits the bytes that one compaction evicts.
    segments.largest_bytes = max([sizes.segment_bytes, *(segment.segment_bytes for segment in best_first)])


def _write_epoch(files: StoreFiles, found: FoundStore) -> Epoch:
    is_written = not found.is_new_epoch or run(WriteEpoch(found.epoch), files).is_success
    if found.is_restarted and is_written:
        # Segment numbers start again, so new records get addresses of old records. Old journal entries would withdraw
        # the new records.
        with contextlib.suppress(OSError):
            files.namespace.directory.remove_file(JOURNAL_NAME)
    return Epoch(found.epoch, is_written)
