"""Maintenance of a store: plans the file work that is due, runs one chore at a time, and applies its result.

Failed work is retried after a backoff. Raises no `OSError`. Only `Dispatcher._execute` runs outside of the index's
thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from hybridkv.tiers.disk.format.withdrawals import JournalEntry
from hybridkv.tiers.disk.maintenance.chore import AnyDueChore, ChoreKind, DueChore, Ending, StoreFiles, StoreState, run
from hybridkv.tiers.disk.maintenance.compaction import SegmentCopier
from hybridkv.tiers.disk.maintenance.janitor import ThreadJanitor
from hybridkv.tiers.disk.maintenance.segment_chores import Restorer, SegmentDropper, SegmentMaker, SegmentSealer
from hybridkv.tiers.disk.maintenance.snapshots import ChangeWriter, Log, SnapshotWriter
from hybridkv.tiers.disk.maintenance.withdrawals import EpochWriter, JournalWriter, WriteEpoch

MAX_CHORES_IN_A_ROW = 64
"""Limit of chores that one call of `Chores.run_before_open` or `Maintenance.run` starts."""


class Chores:
    """All kinds of file work of one index, in order of priority.

    Args:
        found: entries that recovery read from the quarantine journal. Each withdraws the records of one key.
    """

    def __init__(self, state: StoreState, found: Iterable[JournalEntry]) -> None:
        self._state = state
        self.epoch = EpochWriter(state)
        self.journal = JournalWriter(state, found)
        self.changes = ChangeWriter(state)
        self._restorer = Restorer(state, self.journal)
        self._maker = SegmentMaker(state)
        self._dropper = SegmentDropper(state, self._maker)
        self.copier = SegmentCopier(state, self._maker, self._dropper, self.journal)
        self.sealer = SegmentSealer(state, self.journal)
        self.snapshot = SnapshotWriter(state, self.copier, self.journal)
        self._before_epoch: tuple[ChoreKind[Any, Any], ...] = (self._restorer, self.epoch, self.journal, self._dropper)
        self._after_epoch: tuple[ChoreKind[Any, Any], ...] = (self._maker, self.copier, self.sealer)
        """Chores that write into segments of the present epoch. They wait until the epoch is on disk: after a crash
        before that, the old epoch is valid again, and the next start deletes segments of other epochs."""

    def run_before_open(self) -> None:
        """Do the work that is due before the index opens, in the calling thread. Writes no snapshots and no changes:
        the open index does."""
        for _ in range(MAX_CHORES_IN_A_ROW):
            due = self._next(self._after_epoch)
            if due is None:
                return
            ending = run(due.chore, self._state.files)
            due.started()
            due.ended(ending)

    def next(self) -> AnyDueChore | None:
        """First due chore that does not back off. Snapshots have the lowest priority. Planning may evict records, see
        `ChoreKind.plan`."""
        return self._next((*self._after_epoch, self.snapshot))

    def _next(self, storing: tuple[ChoreKind[Any, Any], ...]) -> AnyDueChore | None:
        state = self._state
        if state.is_taken_over:
            return None
        self._maker.raise_limit()
        for kind in (*self._before_epoch, *(storing if state.is_epoch_written else ())):
            due = kind.plan()
            if due is not None and not state.retries.is_backing_off(type(due.chore)):
                return due
        return None

    @property
    def is_room_due(self) -> bool:
        """True if a chore that makes room is due. Unlike `next`, plans no copy and evicts nothing."""
        state = self._state
        if state.is_taken_over:
            return False
        self._maker.raise_limit()
        if self._restorer.is_due or self._dropper.plan() is not None:
            return True
        if not state.is_epoch_written and state.retries.is_backing_off(WriteEpoch):
            return False
        if self._maker.plan() is not None and not self._maker.is_backing_off:
            return True
        return self.copier.is_due


class EndedChore(NamedTuple):
    """A chore with its result."""

    due: AnyDueChore
    ending: Ending[Any]
    is_delayed: bool


class Dispatcher:
    """Submits chores to a janitor, and keeps their results. Only `_execute` runs in another thread."""

    def __init__(self, janitor: ThreadJanitor, files: StoreFiles) -> None:
        self._janitor: ThreadJanitor | None = janitor
        self._files = files
        self._has_ended = threading.Event()
        self.ended: deque[EndedChore] = deque()
        """Results for `take_ended`."""
        self.num_running = 0
        """Number of submitted chores with a result that `take_ended` has not returned, without chores of
        `start_delayed`."""
        self.num_making_room = 0
        """Number of these chores that make room."""

    def start(self, due: AnyDueChore, then: Callable[[], None] | None = None) -> bool:
        """Submit a chore. False if the janitor refuses it. `then` is called in any thread after the chore has run."""
        self.num_running += 1
        self.num_making_room += due.kind.makes_room
        if self._janitor is not None and self._janitor.submit(partial(self._execute, due, False, then)):
            return True
        self.num_running -= 1
        self.num_making_room -= due.kind.makes_room
        return False

    def start_delayed(self, due: AnyDueChore, delay_s: float) -> bool:
        """Run a chore after a delay, in addition to a running chore. Not counted in `num_running`. False if the janitor
        refuses the chore."""
        return self._janitor is not None and self._janitor.submit_later(
            partial(self._execute, due, True, None), delay_s
        )

    def take_ended(self) -> EndedChore:
        """Remove and return the first result. The chore no longer counts as running."""
        outcome = self.ended.popleft()
        if not outcome.is_delayed:
            self.num_running -= 1
            self.num_making_room -= outcome.due.kind.makes_room
        return outcome

    def clear_ended_event(self) -> None:
        """Reset the event of `wait_for_ended`: only chores that end from now on set the event."""
        self._has_ended.clear()

    def wait_for_ended(self, timeout_s: float) -> bool:
        """Wait until a chore ends. False if `timeout_s` passed first."""
        return self._has_ended.wait(timeout_s)

    def stop(self) -> None:
        """Start no more chores: the janitor was closed."""
        self._janitor = None

    def _execute(self, due: AnyDueChore, is_delayed: bool, then: Callable[[], None] | None) -> None:
        """Runs in the janitor's thread."""
        self.ended.append(EndedChore(due, run(due.chore, self._files), is_delayed))
        self._has_ended.set()
        if then is not None:
            then()


class Maintenance:
    """File work of one index."""

    def __init__(self, state: StoreState, chores: Chores, janitor: ThreadJanitor) -> None:
        self.state = state
        self._chores = chores
        self._segments = state.segments
        self._log = state.records.log
        self._changes_file = state.files.changes
        self._dispatcher = Dispatcher(janitor, state.files)
        self._ended = self._dispatcher.ended
        self._next_run_s = state.clock()
        self._seen_revision = -1
        self._next_missing_check_s = -math.inf

    def run(self) -> None:
        """Schedule the next batch of changes, apply results, and start the next chore if none is running. Planning the
        chore may evict records."""
        self.schedule_changes()
        for _ in range(MAX_CHORES_IN_A_ROW):
            self.collect()
            if self._dispatcher.num_running:
                return
            self._seen_revision = self._segments.revision
            now_s = self.state.clock()
            if not self._start(self._chores.next()):
                self._next_run_s = min(self._chores.snapshot.due_s, self.state.retries.next_retry_s(now_s))
                return

    def schedule_missing_file_check(self) -> None:
        """Make a check for missing files due, at most once in a `retry_interval_s`. Called if a store or load failed,
        maybe because its file is missing."""
        now_s = self.state.clock()
        if now_s >= self._next_missing_check_s:
            self._next_missing_check_s = now_s + self.state.options.retry_interval_s
            self.state.may_lack_files = True

    @property
    def makes_room(self) -> bool:
        """True if a chore that makes room is running, or is due after the running chore."""
        work = self._dispatcher
        return work.num_making_room > 0 or (work.num_running > 0 and self._chores.is_room_due)

    @property
    def has_unwritten_epoch(self) -> bool:
        """True if the present epoch is not on disk and this engine may still write it."""
        return not self.state.is_epoch_written and not self.state.is_taken_over

    def run_if_needed(self) -> None:
        """`run` if there may be work. Cheap otherwise."""
        if not self._log.is_scheduled or self._changes_file.has_unwritten:
            self.schedule_changes()
        has_work = self._ended or self._chores.journal.has_pending or self._segments.revision != self._seen_revision
        if has_work or self.state.clock() >= self._next_run_s:
            self.run()

    def collect(self) -> None:
        """Apply the results of ended chores to the tables."""
        while self._ended:
            outcome = self._dispatcher.take_ended()
            outcome.due.ended(outcome.ending)

    def schedule_changes(self) -> None:
        """Schedule the next batch of changes, so that the batch is written even without further calls."""
        if self._changes_file.has_unwritten:
            self.collect()  # a write failed; its result, if not applied yet, starts the backoff
        writer = self._chores.changes
        if self._log.is_scheduled or not writer.has_work:
            return
        delay_s = writer.delay_s()
        self._log.is_scheduled = True
        if self._dispatcher.start_delayed(DueChore(writer, Log()), delay_s):
            writer.planned(delay_s)
        else:
            self._log.is_scheduled = False

    def drain(self, timeout_s: float) -> bool:
        """Wait until all due work is done or failed. False if `timeout_s` passed first."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._dispatcher.clear_ended_event()
            self.run()
            if not self._dispatcher.num_running and not self._start(self._chores.changes.plan()):
                return True
            left_s = deadline_s - time.monotonic()
            if not self._dispatcher.wait_for_ended(max(left_s, 0.0)) or left_s < 0:
                return False

    def start_epoch(self, then: Callable[[], None]) -> bool:
        """Begin a new epoch: once it is on disk, no start offers a record that is on disk now.

        Writes the epoch before other due work. `then` is called in any thread after the write succeeded or failed.
        False if the janitor refused the write.
        """
        self._chores.snapshot.forget_last()
        self._chores.epoch.begin_next()
        return self._start(self._chores.epoch.plan(), then)

    def finish(self) -> None:
        """Submit the last file work: journal, changes, seals and a snapshot. Does not wait. Closes the change log. Does
        nothing if another engine has taken the namespace over.

        With the snapshot, the next start searches only segments with records that were still being written. If there
        is no time for a snapshot, the previous snapshot and its file of changes together have the same content. If the
        epoch is not on disk yet, tries to write it once more, even during its backoff, and skips changes, seals and
        snapshot: no record was stored in this epoch.
        """
        self.cancel_snapshot()
        if self.state.is_taken_over:
            return
        self._segments.close_open()
        self.collect()
        self._start(self._chores.epoch.plan())
        self._start(self._chores.journal.plan())
        if self.state.is_epoch_written:
            self._write_last()
        self._log.close()

    def _write_last(self) -> None:
        self._start(self._chores.changes.plan())
        for due in self._chores.sealer.plan_all():
            self._start(due)
        self._start(self._chores.snapshot.plan_last())

    def cancel_snapshot(self) -> None:
        """Cancel the planned or running snapshot, if there is one."""
        self._chores.snapshot.cancel()

    def stop(self) -> None:
        """Start no more chores: the janitor was closed."""
        self._dispatcher.stop()

    def _start(self, due: AnyDueChore | None, then: Callable[[], None] | None = None) -> bool:
        if due is None:
            return False
        if not self._dispatcher.start(due, then):
            due.refused()
            return False
        due.started()
        return True
