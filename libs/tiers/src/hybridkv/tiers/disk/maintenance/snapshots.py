"""Writes snapshots of the index, and the changes since the last one, so that a start need not scan every segment."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.format import snapshot
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, SNAPSHOT_NAME, address_of, number_of
from hybridkv.tiers.disk.index.change_log import Cut, GivenUpError
from hybridkv.tiers.disk.index.snapshot_source import WalkedSource
from hybridkv.tiers.disk.maintenance.chore import AnyPiece, Chore, Ending, Files, Kind, Piece, StoreState
from hybridkv.tiers.disk.maintenance.compaction import SegmentCopier
from hybridkv.tiers.disk.maintenance.withdrawals import JournalWriter
from hybridkv.tiers.disk.options import SNAPSHOT_ENTRY_BYTES
from hybridkv.tiers.yielding import give_back_freed


@dataclass(frozen=True, slots=True)
class Log(Chore[bool]):
    """Write down what happened since the last snapshot, as far as that was not done yet."""

    def run(self, files: Files) -> bool:
        """Whether a snapshot is wanted instead."""
        return files.changes.append(files.namespace.directory)

    def fail(self, files: Files) -> None:
        """Another one may be written."""
        files.changes.miss()


class ChangeWriter(Kind[Log, bool]):
    """Its chores wait for their time beside the pieces that go one by one, where the janitor can wait."""

    def __init__(self, state: StoreState) -> None:
        super().__init__(state)
        self._log = state.records.log
        self._file = state.files.changes
        self._due_s = state.clock()

    @property
    def has_news(self) -> bool:
        """Whether something happened that is not written down and may be now."""
        is_behind = self._log.is_waiting or self._file.has_unwritten
        return is_behind and not self._state.is_taken and not self._state.retries.is_resting(Log)

    def plan(self) -> AnyPiece | None:
        return Piece(self, Log()) if self.has_news else None

    def delay_s(self) -> float:
        """Until the next batch is due."""
        return max(self._due_s - self._state.clock(), 0.0)

    def planned(self, delay_s: float) -> None:
        """A batch will be written after so many seconds."""
        self._due_s = self._state.clock() + delay_s + self._state.options.changes_interval_s

    def apply(self, chore: Log, ending: Ending[bool]) -> None:
        # A file that somebody removed does not come back by itself.
        is_gone = getattr(ending.error, "errno", None) == errno.ENOENT
        self._state.is_snapshot_owed = self._state.is_snapshot_owed or is_gone or ending.value is True


@dataclass(frozen=True, slots=True)
class Save(Chore[bool]):
    """A snapshot of at most `max_bytes`: of the most recently used records, if it cannot name all."""

    epoch: int
    scan_from: int
    next_number: int
    next_address: int
    pending: tuple[int, ...]
    source: WalkedSource
    max_bytes: int
    cut: Cut
    """Where the index was when this was planned."""

    def run(self, files: Files) -> bool:
        """Whether it was written; not when it was not wanted any more."""
        try:
            self._write(files)
        except GivenUpError:
            return False
        finally:
            give_back_freed()
        return True

    def fail(self, files: Files) -> None:
        """Nothing waits for it any more."""
        self.cut.is_cancelled = True

    def _write(self, files: Files) -> None:
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
        namespace.require_own()  # it took a while to get here, and does until the last one is written
        for piece in pieces:
            self.cut.require_wanted()
            yield piece
        namespace.require_own()


class SnapshotWriter(Kind[Save, bool]):
    """Names also what is being copied (`copier`), and lets `journal` forget what no segment can hold any more."""

    def __init__(self, state: StoreState, copier: SegmentCopier, journal: JournalWriter) -> None:
        super().__init__(state)
        self._copier = copier
        self._journal = journal
        self._max_bytes = PAGE_BYTES + SNAPSHOT_ENTRY_BYTES * state.sizes.max_records
        self._cut: Cut | None = None
        """Of the last one that was planned."""
        self._last_s = state.clock()
        self._generation = -1
        """Of the records, then."""

    @property
    def due_s(self) -> float:
        """When the next one is."""
        return self._last_s + self._state.options.snapshot_interval_s

    def plan(self) -> AnyPiece | None:
        state = self._state
        if state.retries.is_resting(Save):
            return None
        is_due = state.clock() >= self.due_s
        is_news = self._generation != state.records.generation
        if not (state.is_snapshot_owed or (is_due and is_news)):
            return None
        if self._may_save():
            return self._piece(number_of(state.segments.next_address))
        self._last_s = state.clock() if is_due else self._last_s
        return None

    def plan_last(self) -> AnyPiece | None:
        """When nothing will be appended any more."""
        return self._piece(self._state.segments.next_number) if self._may_save() else None

    def give_up(self) -> None:
        """Do not wait for the one that is being written, if there is one."""
        if self._cut is not None:
            self._cut.is_cancelled = True

    def forget_last(self) -> None:
        """The last one speaks for nothing any more."""
        self.give_up()
        self._generation = -1

    def _may_save(self) -> bool:
        """Not while nobody knows what lies in a segment: what a snapshot does not name is taken for dead."""
        epoch = self._state.epoch
        return all(segment.epoch != epoch for segment in self._state.segments.unavailable.values())

    def _piece(self, next_written: int) -> AnyPiece:
        """The records that are offered now, and from where on there may be more when this is read.

        `next_written`: the first segment that anything will be appended to.
        """
        state, segments, records = self._state, self._state.segments, self._state.records
        scan_from = min([next_written, *segments.written])
        copied = [relocation.new_address for relocation in self._copier.copying]
        pending = [*(record.address for record in records.reserved()), *copied]
        self._journal.keep(address_of(min(segments.by_number, default=segments.next_number), 0))
        self._last_s = state.clock()
        self._generation = records.generation
        numbers = (state.epoch, scan_from, segments.next_number, segments.next_address)
        source = records.source()
        self._cut = records.log.cut()
        return Piece(self, Save(*numbers, tuple(pending), source, self._max_bytes, self._cut))

    def refused(self, chore: Save) -> None:
        chore.cut.is_cancelled = True

    def apply(self, chore: Save, ending: Ending[bool]) -> None:
        state, is_written = self._state, ending.value is True
        if is_written:
            state.retries.end(Log)
        state.tally.add("snapshots", int(is_written))
        # One of an epoch that is over speaks for nothing.
        state.is_snapshot_owed = not is_written or chore.epoch != state.epoch
