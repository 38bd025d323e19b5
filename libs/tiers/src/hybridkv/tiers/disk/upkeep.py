"""Keeps empty segments ready and the metadata on disk true: decides which piece of file work is next, and starts it.

One piece at a time is on its way. What fails rests for a while and is tried again; nothing raises for what the system
says. Everything here runs in the index's thread, but for `_execute`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk import epoch as epoch_file
from hybridkv.tiers.disk.change_log import Cut
from hybridkv.tiers.disk.compaction import Compaction
from hybridkv.tiers.disk.janitor import Janitor
from hybridkv.tiers.disk.layout import PAGE_BYTES, address_of, number_of
from hybridkv.tiers.disk.options import SNAPSHOT_ENTRY_BYTES, DiskOptions, DiskSizes
from hybridkv.tiers.disk.outcomes import Outcomes
from hybridkv.tiers.disk.records import Record, RecordTable
from hybridkv.tiers.disk.segment_files import Move
from hybridkv.tiers.disk.segments import Segment, SegmentTable, Stage
from hybridkv.tiers.disk.snapshot_source import Source
from hybridkv.tiers.disk.work import (
    Append,
    Copy,
    Create,
    Drop,
    Files,
    Job,
    Log,
    Outcome,
    Restore,
    Rewrite,
    Save,
    Seal,
    WriteEpoch,
    run,
)
from hybridkv.tiers.leftovers import Leftovers

MAX_JOBS_IN_A_ROW = 64
"""That one call starts, where jobs end before they are given back."""

_MAKES_ROOM = (Create, Drop, Copy, Restore)


class Upkeep:
    """The file work of one index."""

    def __init__(
        self,
        options: DiskOptions,
        sizes: DiskSizes,
        segments: SegmentTable,
        records: RecordTable,
        files: Files,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._sizes = sizes
        self._segments = segments
        self._records = records
        self._files = files
        self._clock = clock
        self._compaction = Compaction(segments, records, options.compaction_share)
        self._ended: deque[Outcome] = deque()
        self._has_ended = threading.Event()
        self._num_running = 0
        self._num_making_room = 0
        """Of those."""
        self._copying: tuple[Move, ...] = ()
        self._cut: Cut | None = None
        """Of the last snapshot that was started."""
        self._snapshot_s = clock()
        self._snapshot_generation = -1
        self._changes_due_s = self._snapshot_s
        self._writes_changes = False
        self._look_again_s = self._snapshot_s
        self._looked_at = -1
        self.state = Outcomes(options, sizes, segments, records, files, clock)
        self.janitor: Janitor | None = None

    def begin(self, needs_snapshot: bool) -> None:
        """From now on write down what happens; behind a new snapshot, where the one on disk does not say all."""
        self._writes_changes = True
        self.state.is_snapshot_owed = needs_snapshot
        self.run()

    def run(self) -> None:
        """Apply what ended and start what is to be done next."""
        self.write_changes()
        for _ in range(MAX_JOBS_IN_A_ROW):
            self.collect()
            if self._num_running:
                return
            self._looked_at = self._segments.revision
            if not self._start(self._choose()):
                due_s = self._snapshot_s + self._options.snapshot_interval_s
                self._look_again_s = min(due_s, self.state.rests.next_end_s)
                return

    @property
    def makes_room(self) -> bool:
        """Whether file work that ends with more room is on its way, or due behind other work that is."""
        return self._num_making_room > 0 or (self._num_running > 0 and self._is_room_due())

    def _is_room_due(self) -> bool:
        """Whether `_choose` would come to such work. Changes nothing that is stored, as choosing it may."""
        if self.state.is_taken:
            return False
        is_resting = self.state.rests.is_resting
        self._raise_limit()
        if self.state.is_lost and not is_resting(Restore):
            return True
        if self._choose_drop() is not None:
            return True
        if not self.state.is_epoch_written and is_resting(WriteEpoch):
            return False
        if self._choose_create() is not None and not is_resting(Create):
            return True
        return self._may_copy() and self._compaction.cheapest() is not None

    @property
    def owes_epoch(self) -> bool:
        """Whether the last `start_epoch` is not on disk and this engine may still write it there."""
        return not self.state.is_epoch_written and not self.state.is_taken

    def run_if_needed(self) -> None:
        """As `run`, but cheap where nothing happened that calls for work."""
        self.write_changes()
        has_news = self._ended or self.state.withdrawn.has_pending or self._segments.revision != self._looked_at
        if has_news or self._clock() >= self._look_again_s:
            self.run()

    def collect(self) -> None:
        """Apply what ended."""
        while self._ended:
            outcome = self._ended.popleft()
            self._num_running -= not (isinstance(outcome.job, Log) and outcome.job.is_beside)
            self._num_making_room -= isinstance(outcome.job, _MAKES_ROOM)
            if isinstance(outcome.job, Copy):
                self._copying = ()
            self.state.apply(outcome)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that is due was done or failed. False when `timeout_s` passed first."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._has_ended.clear()
            self.run()
            if not self._num_running and not self._start(self._choose_log()):
                return True
            left_s = deadline_s - time.monotonic()
            if not self._has_ended.wait(max(left_s, 0.0)) or left_s < 0:
                return False

    def withdraw(self, record: Record) -> None:
        """Remember across restarts that this record may not be offered."""
        self.state.withdraw(record)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Never offer what is stored under this key again. False when nothing is."""
        return self.state.quarantine(key, reason)

    def start_epoch(self, then: Callable[[], None]) -> bool:
        """Nothing that is on disk now may be offered again.

        Writes that down before anything that waits here is started, and calls `then`, in any thread, when it is
        written or failed. False when that cannot be started.
        """
        self.give_up_snapshot()
        self.state.epoch = epoch_file.after(self.state.epoch)
        self.state.is_epoch_written = False
        self._segments.close_open()
        while self._segments.ready:
            segment = self._segments.ready.popleft()
            segment.stage = Stage.FULL
            self._segments.refile(segment)
        self._snapshot_generation = -1
        self._records.log.give_up()
        self.state.is_snapshot_owed = True
        return self._submit(WriteEpoch(self.state.epoch), then)

    def finish(self) -> None:
        """Write down what happened since the last snapshot, and then a new one.

        The next opening then reads one file. Without the new one, for which there may be no time, the changes say the
        same. An epoch that could not be written yet is tried once more, resting or not; nothing was stored in it.
        """
        self.give_up_snapshot()
        if self.state.is_taken:
            return
        self._segments.close_open()
        self.collect()
        self._start(self._choose_epoch())
        self._start(self.state.withdrawn.job())
        if self.state.is_epoch_written:
            self._write_last()
        self._records.log.close()

    def _write_last(self) -> None:
        self._start(self._choose_log())
        for segment in list(self._segments.sealable.values()):
            if segment.epoch == self.state.epoch:
                self._start(self._seal(segment))
        if self._may_save():
            self._start(self._save(is_last=True))

    def give_up_snapshot(self) -> None:
        """Do not wait for the one that is being written, if there is one."""
        if self._cut is not None:
            self._cut.is_cancelled = True

    def free(self, leftovers: Leftovers) -> None:
        """Behind the file work that was started before, which may still read them.

        Where the janitor takes no more, they go when nobody reads them any more, in one step.
        """
        if self.janitor is not None:
            self.janitor.submit(leftovers.free)

    # What is to be done next.

    def _choose(self) -> Job | None:
        if self.state.is_taken:
            return None
        is_resting = self.state.rests.is_resting
        self._raise_limit()
        for choose in (*self._clearing(), *self._storing()):
            job = choose()
            if job is not None and not is_resting(type(job)):
                return job
        return None

    def _raise_limit(self) -> None:
        """What the file system had no room for may be tried again, once it has rested."""
        if not self.state.rests.is_resting(Create):
            self._segments.limit_bytes = self._sizes.data_bytes

    def _clearing(self) -> tuple[Callable[[], Job | None], ...]:
        return self._choose_restore, self._choose_epoch, self.state.withdrawn.job, self._choose_drop

    def _storing(self) -> tuple[Callable[[], Job | None], ...]:
        """What names the epoch. Not before that is on disk: the next start would delete what is of an unknown one."""
        if not self.state.is_epoch_written:
            return ()
        return self._choose_create, self._choose_copy, self._choose_seal, self._choose_save

    def _choose_restore(self) -> Job | None:
        return Restore(self.state.epoch) if self.state.is_lost else None

    def _choose_epoch(self) -> Job | None:
        return None if self.state.is_epoch_written else WriteEpoch(self.state.epoch)

    def _choose_drop(self) -> Job | None:
        is_resting = self.state.rests.is_resting
        # What rests may be long, and is asked for again and again.
        if is_resting(Drop):
            return None
        stuck = [number for number in self._segments.stuck if not is_resting(number)]
        numbers = (*(segment.number for segment in self._compaction.dead()), *stuck)
        return Drop(numbers) if numbers else None

    def _choose_create(self) -> Job | None:
        if len(self._segments.ready) >= self._sizes.ready_segments or not self._segments.creatable:
            return None
        sizes = self._sizes
        added_bytes = sizes.segment_bytes * sizes.num_ranks
        own_bytes = self._segments.allocated_bytes + added_bytes + sizes.metadata_bytes
        return Create(self._segments.free_number(), self.state.epoch, sizes.segment_bytes, own_bytes)

    def _may_copy(self) -> bool:
        """Whether it is time for a segment to give up its place, if one can be found."""
        segments = self._segments
        if len(segments.ready) + segments.creatable + segments.num_leaving >= self._sizes.kept_segments:
            return False
        is_resting = self.state.rests.is_resting
        if is_resting(Copy) or is_resting(Drop) or (segments.creatable and is_resting(Create)):
            return False
        return self.state.helps_to_drop

    def _choose_copy(self) -> Job | None:
        segments = self._segments
        if not self._may_copy():
            return None
        if not segments.ready and not segments.creatable:
            return self._give_up_one()
        victim = self._compaction.victim()
        if victim is None:
            return None
        if not victim.live_bytes:
            return self._choose_drop()
        moves = self._compaction.moves(victim)
        if not moves:
            return self._give_up_one()
        victim.is_moving = True
        self._segments.refile(victim)
        return Copy(victim.number, moves)

    def _give_up_one(self) -> Job | None:
        """Nothing can be copied anywhere: evict the segment that costs least."""
        victim = self._compaction.cheapest()
        if victim is not None:
            self._compaction.empty(victim)
        return self._choose_drop()

    def _choose_seal(self) -> Job | None:
        if self.state.withdrawn.has_pending:
            return None
        sealable = self._segments.sealable
        while sealable:
            segment = next(iter(sealable.values()))
            if segment.epoch == self.state.epoch:
                return self._seal(segment)
            del sealable[segment.number]  # of an epoch that is over
        return None

    def _seal(self, segment: Segment) -> Seal:
        return Seal(segment.number, segment.epoch, segment.end_offset)

    def write_changes(self) -> None:
        """See to it that what happened is written down soon, also when nobody calls any more."""
        log = self._records.log
        if self._files.changes.has_unwritten:
            self.collect()  # what failed rests, and nobody may have said so yet
        if log.is_scheduled or not self._has_changes():
            return
        now_s = self._clock()
        if self.janitor is None or (now_s < self._changes_due_s and not self.janitor.can_wait):
            return
        delay_s = max(self._changes_due_s - now_s, 0.0)
        log.is_scheduled = True
        if self.janitor.submit_later(partial(self._execute, Log(is_beside=True), None), delay_s):
            self._changes_due_s = now_s + delay_s + self._options.changes_interval_s
        else:
            log.is_scheduled = False

    def _has_changes(self) -> bool:
        """Whether something happened that is not written down and may be now."""
        is_behind = self._records.log.is_waiting or self._files.changes.has_unwritten
        may_write = self._writes_changes and not self.state.is_taken
        return is_behind and may_write and not self.state.rests.is_resting(Log)

    def _choose_log(self) -> Job | None:
        return Log(is_beside=False) if self._has_changes() else None

    def _choose_save(self) -> Job | None:
        if self.state.rests.is_resting(Save):
            return None
        is_due = self._clock() >= self._snapshot_s + self._options.snapshot_interval_s
        is_news = self._snapshot_generation != self._records.generation
        is_owed = self.state.is_snapshot_owed and self._writes_changes
        if not (is_owed or (is_due and is_news)):
            return None
        if self._may_save():
            return self._save()
        self._snapshot_s = self._clock() if is_due else self._snapshot_s
        return None

    def _may_save(self) -> bool:
        """Not while nobody knows what lies in a segment: what a snapshot does not name is taken for dead."""
        return all(segment.epoch != self.state.epoch for segment in self._segments.unavailable.values())

    def _save(self, is_last: bool = False) -> Save:
        """The records that are offered now, and from where on there may be more when this is read.

        `is_last`: nothing will be appended any more.
        """
        segments = self._segments
        first = segments.next_number if is_last else number_of(segments.next_address)
        first = min([first, *segments.written])
        copied = [move.new_address for move in self._copying]
        pending = [*(record.address for record in self._records.reserved_now.values()), *copied]
        self.state.withdrawn.keep(address_of(min(segments.by_number, default=segments.next_number), 0))
        self._snapshot_s = self._clock()
        self._snapshot_generation = self._records.generation
        max_bytes = PAGE_BYTES + SNAPSHOT_ENTRY_BYTES * self._sizes.max_records
        next_address = segments.next_address
        source = Source(self._records.by_key, [segment.keys for segment in segments.by_number.values()])
        numbers = (self.state.epoch, first, segments.next_number, next_address)
        return Save(*numbers, tuple(pending), source, max_bytes, self._records.log.cut())

    # Starting it.

    def _start(self, job: Job | None) -> bool:
        if job is None:
            return False
        if isinstance(job, Save):
            self._cut = job.cut
        if not self._submit(job):
            if isinstance(job, Copy):
                self.state.end_copy(job, None)
            elif isinstance(job, Save):
                job.cut.is_cancelled = True
            return False
        if isinstance(job, (Append, Rewrite)):
            self.state.withdrawn.started(job)
        elif isinstance(job, Copy):
            self._copying = job.moves
        elif isinstance(job, Create):
            self._segments.take_number()
            self._segments.allocated_bytes += job.segment_bytes * self._sizes.num_ranks
        elif isinstance(job, Drop):
            for number in job.numbers:
                segment = self._segments.by_number[number]
                segment.stage = Stage.LEAVING
                self._segments.refile(segment)
            self._segments.num_leaving += len(job.numbers)
        return True

    def _submit(self, job: Job, then: Callable[[], None] | None = None) -> bool:
        makes_room = isinstance(job, _MAKES_ROOM)
        self._num_running += 1
        self._num_making_room += makes_room
        if self.janitor is not None and self.janitor.submit(partial(self._execute, job, then)):
            return True
        self._num_running -= 1
        self._num_making_room -= makes_room
        return False

    def _execute(self, job: Job, then: Callable[[], None] | None) -> None:
        """In the janitor's thread."""
        self._ended.append(run(job, self._files))
        self._has_ended.set()
        if then is not None:
            then()
