"""Chores that write snapshots of the index, and changes since the last snapshot: a start then scans fewer segments."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.format import snapshot
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, SNAPSHOT_NAME, address_of, number_of
from hybridkv.tiers.disk.index.change_log import Cut, SnapshotCancelledError
from hybridkv.tiers.disk.index.snapshot_source import WalkedSource
from hybridkv.tiers.disk.maintenance.chore import (
    AnyDueChore,
    Chore,
    ChoreKind,
    DueChore,
    Ending,
    StoreFiles,
    StoreState,
)
from hybridkv.tiers.disk.maintenance.compaction import SegmentCopier
from hybridkv.tiers.disk.maintenance.withdrawals import JournalWriter
from hybridkv.tiers.disk.options import SNAPSHOT_ENTRY_BYTES
from hybridkv.tiers.yielding import trim_heap


@dataclass(frozen=True, slots=True)
class Log(Chore[bool]):
    """Appends the changes since the last batch to the file of changes."""

    def run(self, files: StoreFiles) -> bool:
        """Append. True if a snapshot should be written."""
        return files.changes.append(files.namespace.directory)

    def fail(self, files: StoreFiles) -> None:
        """Allow the next batch."""
        files.changes.batch_failed()


class ChangeWriter(ChoreKind[Log, bool]):
    """Writes batches of changes. Runs in addition to other chores."""

    def __init__(self, state: StoreState) -> None:
        super().__init__(state)
        self._log = state.records.log
        self._file = state.files.changes
        self._due_s = state.clock()

    @property
    def has_work(self) -> bool:
        """True if changes wait and may be written now."""
        is_behind = self._log.has_changes or self._file.has_unwritten
        return is_behind and not self._state.is_taken_over and not self._state.retries.is_backing_off(Log)

    def plan(self) -> AnyDueChore | None:
        return DueChore(self, Log()) if self.has_work else None

    def delay_s(self) -> float:
        """Seconds until the next batch is due."""
        return max(self._due_s - self._state.clock(), 0.0)

    def planned(self, delay_s: float) -> None:
        """Set the due time of the following batch: a batch was scheduled after this delay."""
        self._due_s = self._state.clock() + delay_s + self._state.options.changes_interval_s

    def apply(self, chore: Log, ending: Ending[bool]) -> None:
        # A new snapshot recreates a removed file.
        is_gone = getattr(ending.error, "errno", None) == errno.ENOENT
        self._state.is_snapshot_wanted = self._state.is_snapshot_wanted or is_gone or ending.value is True


@dataclass(frozen=True, slots=True)
class Save(Chore[bool]):
    """Writes a snapshot of at most `max_bytes`, then a new file of changes. If not all records fit, keeps the most
    recently used records."""

    epoch: int
    scan_from: int
    next_number: int
    next_address: int
    pending: tuple[int, ...]
    source: WalkedSource
    max_bytes: int
    cut: Cut
    """Position in the change log at planning."""

    def run(self, files: StoreFiles) -> bool:
        """Write the snapshot. False if it was cancelled."""
        try:
            self._write(files)
        except SnapshotCancelledError:
            return False
        finally:
            trim_heap()
        return True

    def fail(self, files: StoreFiles) -> None:
        """Cancel the cut: later changes need not wait for this snapshot."""
        self.cut.is_cancelled = True

    def _write(self, files: StoreFiles) -> None:
        directory, digest = files.namespace.directory, files.namespace.digest
        encoding = self._encoding(digest)
        directory.write_pieces(SNAPSHOT_NAME, self._wanted(encoding.pieces(), files.namespace), files.syncs)
        files.changes.begin(directory, digest, encoding.checksum, self.cut)

    def _encoding(self, namespace: bytes) -> snapshot.Encoding:
        numbers = (self.epoch, self.scan_from, self.next_number, self.next_address, self.pending)
        found = self.source.committed(self.cut)
        while True:
            saved = snapshot.Snapshot(*numbers, found.keys, found.addresses, found.payload_bytes)
            encoding = snapshot.Encoding(saved, namespace)
            if encoding.num_bytes <= self.max_bytes or not found.keys:
                return encoding
            found = found.last((len(found.keys) - 1) // 2)

    def _wanted(self, pieces: Iterator[bytes], namespace: Namespace) -> Iterator[bytes]:
        namespace.require_own()  # check again: encoding and writing take long
        for piece in pieces:
            self.cut.require_wanted()
            yield piece
        namespace.require_own()


class SnapshotWriter(ChoreKind[Save, bool]):
    """Writes snapshots regularly and at the end. A snapshot lists running copies of `copier` as pending. Each snapshot
    drops withdrawals below the oldest segment from `journal`."""

    def __init__(self, state: StoreState, copier: SegmentCopier, journal: JournalWriter) -> None:
        super().__init__(state)
        self._copier = copier
        self._journal = journal
        self._max_bytes = PAGE_BYTES + SNAPSHOT_ENTRY_BYTES * state.sizes.max_records
        self._cut: Cut | None = None
        """Cut of the last planned snapshot."""
        self._last_s = state.clock()
        self._generation = -1
        """Generation of the records in the last planned snapshot."""

    @property
    def due_s(self) -> float:
        """Time at which the next snapshot is due."""
        return self._last_s + self._state.options.snapshot_interval_s

    def plan(self) -> AnyDueChore | None:
        state = self._state
        if state.retries.is_backing_off(Save):
            return None
        is_due = state.clock() >= self.due_s
        is_news = self._generation != state.records.generation
        is_wanted = state.is_snapshot_wanted or (is_due and is_news)
        if is_wanted and self._may_save():
            return self._due(number_of(state.segments.next_address))
        self._last_s = state.clock() if is_due else self._last_s
        return None

    def plan_last(self) -> AnyDueChore | None:
        """Chore for the last snapshot. No records may be appended after this call."""
        return self._due(self._state.segments.next_number) if self._may_save() else None

    def cancel(self) -> None:
        """Cancel the planned or running snapshot, if there is one."""
        if self._cut is not None:
            self._cut.is_cancelled = True

    def forget_last(self) -> None:
        """Cancel the last snapshot, and treat all records as changed."""
        self.cancel()
        self._generation = -1

    def _may_save(self) -> bool:
        """False while the contents of a segment are unknown: a record that the snapshot lacks counts as dead."""
        epoch = self._state.epoch
        return all(segment.epoch != epoch for segment in self._state.segments.unavailable.values())

    def _due(self, next_written: int) -> AnyDueChore:
        """Chore for a snapshot of the present records. Begins the walk over the records, and cuts the change log.
        `next_written`: number of the first segment that records may be appended to."""
        state, segments, records = self._state, self._state.segments, self._state.records
        scan_from = min([next_written, *segments.being_written])
        copied = [relocation.new_address for relocation in self._copier.copying]
        pending = [*(record.address for record in records.reserved()), *copied]
        self._journal.drop_below(address_of(min(segments.by_number, default=segments.next_number), 0))
        self._last_s = state.clock()
        self._generation = records.generation
        numbers = (state.epoch, scan_from, segments.next_number, segments.next_address)
        source = records.source()
        self._cut = records.log.cut()
        return DueChore(self, Save(*numbers, tuple(pending), source, self._max_bytes, self._cut))

    def refused(self, chore: Save) -> None:
        chore.cut.is_cancelled = True

    def apply(self, chore: Save, ending: Ending[bool]) -> None:
        state, is_written = self._state, ending.value is True
        if is_written:
            state.retries.end_early(Log)
        state.tally.add("snapshots", int(is_written))
        # A start does not read a snapshot of an earlier epoch.
        state.is_snapshot_wanted = not is_written or chore.epoch != state.epoch
