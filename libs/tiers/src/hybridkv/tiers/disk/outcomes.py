"""What came of the index's file work, applied to its tables. Decides nothing about what is next."""

from __future__ import annotations

import errno
from collections.abc import Callable

from hybridkv.tiers.contract import FailureReason, Key
from hybridkv.tiers.disk.counts import DiskTally
from hybridkv.tiers.disk.layout import number_of
from hybridkv.tiers.disk.namespace import TakenError
from hybridkv.tiers.disk.options import DiskOptions, DiskSizes
from hybridkv.tiers.disk.quarantine import Quarantine
from hybridkv.tiers.disk.records import Record, RecordTable
from hybridkv.tiers.disk.rests import Rests
from hybridkv.tiers.disk.segment_files import Move
from hybridkv.tiers.disk.segments import Segment, SegmentTable, Stage
from hybridkv.tiers.disk.work import (
    Append,
    Copy,
    Create,
    Drop,
    DropError,
    Files,
    Job,
    Log,
    Outcome,
    Restore,
    Rewrite,
    Save,
    Seal,
    WriteEpoch,
)
from hybridkv.tiers.ledger import State

STUCK_SHARE = 16
"""Of so many segments one may be left that cannot be deleted, while others give up their place for it. No more, where
perhaps none can be deleted: each costs the chunks of another one."""
MOST_STUCK_SEGMENTS = 8

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Outcomes:
    """Holds beside the tables what the index knows of its files."""

    def __init__(
        self,
        options: DiskOptions,
        sizes: DiskSizes,
        segments: SegmentTable,
        records: RecordTable,
        files: Files,
        clock: Callable[[], float],
    ) -> None:
        self._sizes = sizes
        self._segments = segments
        self._records = records
        self._files = files
        self.tally = DiskTally()
        self.rests = Rests(files.namespace.root.path, options.retry_interval_s, clock, self.tally)
        self.withdrawn = Quarantine(options.max_quarantined)
        self.epoch = 0
        self.is_epoch_written = True
        self.is_snapshot_owed = False
        """The last one could not be written, or nothing may follow it any more."""
        self.is_lost = False
        """Something that should be on disk is not: perhaps the directory was removed."""
        self.is_taken = False
        """Another engine has the namespace or had it: no file work is done any more, and nothing is stored."""
        self._is_full = False
        """There was no room for the last segment that should have been made."""
        self._dropped_bytes = 0
        """Since then, on all ranks."""
        count = sizes.data_bytes // (sizes.num_ranks * sizes.segment_bytes)
        self._most_stuck = min(max(count // STUCK_SHARE, 1), MOST_STUCK_SEGMENTS)

    @property
    def helps_to_drop(self) -> bool:
        """False when as much was deleted as a segment needs, and the file system still has no room for one."""
        return self._dropped_bytes < self._sizes.segment_bytes * self._sizes.num_ranks

    def withdraw(self, record: Record) -> None:
        """Remember across restarts that this record may not be offered."""
        num_forgotten = self.withdrawn.add(record, self._segments.next_address)
        self.tally.add("withdrawals_forgotten", num_forgotten)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Never offer what is stored under this key again. False when nothing is."""
        record = self._records.withdraw(key)
        if record is None:
            return False
        self.tally.quarantine(reason)
        self.withdraw(record)
        return True

    def apply(self, outcome: Outcome) -> None:
        """The tables, now that this job ended."""
        job, error = outcome.job, outcome.error
        stuck = self._end_drop(job, error) if isinstance(job, Drop) else ()
        self._note(type(job), error, stuck)
        is_done = error is None
        if isinstance(job, Create):
            self._end_create(job, error)
        elif isinstance(job, Copy):
            self.end_copy(job, outcome.value)
        elif isinstance(job, Seal):
            if is_done and job.number in self._segments.by_number:
                self._segments.by_number[job.number].is_sealed = True
                self._segments.refile(self._segments.by_number[job.number])
        elif isinstance(job, (Append, Rewrite)):
            if not is_done:
                self.withdrawn.failed(job)
        elif isinstance(job, WriteEpoch):
            self.is_epoch_written = self.is_epoch_written or (is_done and job.epoch == self.epoch)
        elif isinstance(job, (Save, Log)):
            self._end_save_or_log(job, outcome)
        elif isinstance(job, Restore):
            self._end_restore(job, outcome)

    def _note(self, kind: type[Job], error: Exception | None, stuck: tuple[int, ...]) -> None:
        """`stuck`: what failed is these segments alone, and others may be tried."""
        if error is None:
            self.rests.succeeded(kind, is_all_well=kind is not Drop or not self._segments.stuck)
            return
        self.rests.failed(kind, error, stuck)
        self.is_lost = self.is_lost or getattr(error, "errno", None) in _GONE
        if isinstance(error, TakenError):
            self._end_storing()

    def _end_storing(self) -> None:
        self.is_taken = True
        self._records.log.close()
        self._segments.close_open()
        self._segments.ready.clear()
        self._segments.limit_bytes = 0

    def _end_create(self, job: Create, error: Exception | None) -> None:
        segments = self._segments
        if error is not None:
            segments.allocated_bytes -= job.segment_bytes * self._sizes.num_ranks
            self._is_full = getattr(error, "errno", None) in _FULL
            if self._is_full:
                segments.limit_bytes = segments.allocated_bytes
            return
        self._is_full, self._dropped_bytes = False, 0
        segment = Segment(job.number, job.segment_bytes, job.epoch)
        if job.epoch != self.epoch:
            segment.stage = Stage.FULL
        segments.add(segment)
        self.tally.add("segments_created")
        deleted, self._files.segments.num_deleted_namespaces = self._files.segments.num_deleted_namespaces, 0
        self.tally.add("namespaces_deleted", deleted)

    def _end_drop(self, job: Drop, error: Exception | None) -> tuple[int, ...]:
        """The segments that could not be deleted and rest each for itself: none where more could not than may."""
        left: tuple[int, ...] = () if error is None else job.numbers
        if isinstance(error, DropError):
            left = error.left
        stage = Stage.STUCK if self._may_be_stuck(left, error) else Stage.FULL
        for number in job.numbers:
            segment = self._segments.by_number[number]
            segment.stage = stage
            self._segments.num_leaving -= 1
            if number in left:
                self._segments.refile(segment)
            else:
                self._segments.remove(segment)
                self.rests.forget(number)
                self._dropped_bytes += segment.segment_bytes * self._sizes.num_ranks * self._is_full
                self.tally.add("segments_dropped")
        if len(left) < len(job.numbers):
            self.rests.end(Create)
            self.rests.end(WriteEpoch)
        return left if stage is Stage.STUCK else ()

    def _may_be_stuck(self, left: tuple[int, ...], error: Exception | None) -> bool:
        """Whether these may be left alone. Not where it is plain that nothing can be deleted."""
        is_theirs = isinstance(error, DropError) and error.errno != errno.EROFS
        return is_theirs and len(self._segments.stuck) + len(left) <= self._most_stuck

    def end_copy(self, job: Copy, value: object) -> None:
        """`value`: what the copy gave back, None when it broke off."""
        copied: list[tuple[Move, FailureReason | None]] = value if isinstance(value, list) else []
        for move in job.moves:
            self._segments.release(move.new_address, is_writing=True)
        if not copied or any(reason is not None for _, reason in copied):
            for move in job.moves:
                target = self._segments.of(move.new_address)
                target.may_be_sealed = False
                self._segments.refile(target)
        moved = [move for move, reason in copied if self._is_moved(move, reason)]
        for move in set(job.moves).difference(moved):
            self._records.log.gone(move.new_address)
        source = self._segments.by_number[job.number]
        source.is_moving = False
        self._segments.refile(source)

    def _is_moved(self, move: Move, reason: FailureReason | None) -> bool:
        """Whether the record lies where it was copied to, from now on."""
        record = self._records.by_key.get(move.key)
        if record is None or record.address != move.old_address:
            return False
        if reason is not None:
            self.quarantine(move.key, reason)
            return False
        if record.state is not State.COMMITTED or record.num_pins:
            return False
        self._records.move(record, move.new_address)
        self.tally.add("moved_records")
        self.tally.add("moved_bytes", record.cost * self._sizes.num_ranks)
        return True

    def _end_save_or_log(self, job: Save | Log, outcome: Outcome) -> None:
        if isinstance(job, Log):
            # A file that somebody removed does not come back by itself.
            is_gone = getattr(outcome.error, "errno", None) == errno.ENOENT
            self.is_snapshot_owed = self.is_snapshot_owed or is_gone or outcome.value is True
            return
        is_written = outcome.value is True
        if is_written:
            self.rests.end(Log)
        self.tally.add("snapshots", int(is_written))
        # One of an epoch that is over speaks for nothing.
        self.is_snapshot_owed = not is_written or job.epoch != self.epoch

    def _end_restore(self, job: Restore, outcome: Outcome) -> None:
        value = outcome.value
        if outcome.error is not None:
            # Directories without an epoch: what is made in them now would be of an unknown one.
            self.is_epoch_written = self.is_epoch_written and not self._files.namespace.is_anew
            return
        self.is_lost = False
        if not isinstance(value, set):
            return
        self.is_epoch_written = self.is_epoch_written or job.epoch == self.epoch
        self.withdrawn.lost()
        self._records.log.give_up()
        self.is_snapshot_owed = True
        self._segments.close_open()
        for segment in self._segments.by_number.values():
            if segment.number not in value:
                self._lose(segment)

    def _lose(self, segment: Segment) -> None:
        """Its files are gone."""
        if segment.stage is Stage.READY:
            self._segments.ready.remove(segment)
        if segment.stage in (Stage.READY, Stage.UNAVAILABLE, Stage.STUCK):
            segment.stage = Stage.FULL
        segment.may_be_sealed = False
        for key in segment.keys:
            record = self._records.by_key.get(key)
            if record is not None and number_of(record.address) == segment.number:
                self._records.withdraw(key)
        self._segments.refile(segment)
