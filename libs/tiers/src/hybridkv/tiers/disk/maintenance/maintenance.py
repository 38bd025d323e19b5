"""Maintenance of a store: plans the file work that is due, runs one piece at a time, and applies its result.

Failed work is left alone for a while and tried again; errors of the system never raise here. Everything but
`Dispatcher._execute` runs in the index's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from hybridkv.tiers.disk.format.withdrawals import Withdrawal
from hybridkv.tiers.disk.maintenance.chore import AnyPiece, Ending, Files, Kind, Piece, StoreState, run
from hybridkv.tiers.disk.maintenance.compaction import SegmentCopier
from hybridkv.tiers.disk.maintenance.janitor import Janitor
from hybridkv.tiers.disk.maintenance.segment_chores import Restorer, SegmentDropper, SegmentMaker, SegmentSealer
from hybridkv.tiers.disk.maintenance.snapshots import ChangeWriter, Log, SnapshotWriter
from hybridkv.tiers.disk.maintenance.withdrawals import EpochWriter, JournalWriter, WriteEpoch


class Agenda:
    """Of one index. Changes nothing but by what `plan` of a kind changes.

    Args:
        found: the withdrawals that an opening found in the journal.
    """

    def __init__(self, state: StoreState, found: Iterable[Withdrawal]) -> None:
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
        self._clearing: tuple[Kind[Any, Any], ...] = (self._restorer, self.epoch, self.journal, self._dropper)
        self._storing: tuple[Kind[Any, Any], ...] = (self._maker, self.copier, self.sealer)
        """What names the epoch. Not before that is on disk: the next start would delete what is of an unknown one."""

    def next_but_snapshot(self) -> AnyPiece | None:
        """What is due and does not rest."""
        return self._next(self._storing)

    def next(self) -> AnyPiece | None:
        """The same, and a snapshot when nothing else is due."""
        return self._next((*self._storing, self.snapshot))

    def _next(self, storing: tuple[Kind[Any, Any], ...]) -> AnyPiece | None:
        state = self._state
        if state.is_taken:
            return None
        self._maker.raise_limit()
        for kind in (*self._clearing, *(storing if state.is_epoch_written else ())):
            piece = kind.plan()
            if piece is not None and not state.retries.is_resting(type(piece.chore)):
                return piece
        return None

    @property
    def is_room_due(self) -> bool:
        """Whether `next` would come to work that makes room. Changes nothing that is stored, as planning it may."""
        state = self._state
        if state.is_taken:
            return False
        self._maker.raise_limit()
        if self._restorer.is_due or self._dropper.plan() is not None:
            return True
        if not state.is_epoch_written and state.retries.is_resting(WriteEpoch):
            return False
        if self._maker.plan() is not None and not self._maker.is_resting:
            return True
        return self.copier.is_due


class Outcome(NamedTuple):
    """What came of a piece."""

    piece: AnyPiece
    ending: Ending[Any]
    is_beside: bool


class Dispatcher:
    """Of one index. Used in its thread, but for `_execute`."""

    def __init__(self, janitor: Janitor, files: Files) -> None:
        self._janitor: Janitor | None = janitor
        self._files = files
        self._has_ended = threading.Event()
        self.ended: deque[Outcome] = deque()
        """For `next_ended`."""
        self.num_running = 0
        """Of the pieces that go one by one."""
        self.num_making_room = 0
        """Of those."""

    @property
    def can_wait(self) -> bool:
        """Whether `start_beside` takes what is to run later."""
        return self._janitor is not None and self._janitor.can_wait

    def start(self, piece: AnyPiece, then: Callable[[], None] | None = None) -> bool:
        """False when the janitor takes nothing more. `then` is called when it has run, in any thread."""
        self.num_running += 1
        self.num_making_room += piece.kind.makes_room
        if self._janitor is not None and self._janitor.submit(partial(self._execute, piece, False, then)):
            return True
        self.num_running -= 1
        self.num_making_room -= piece.kind.makes_room
        return False

    def start_beside(self, piece: AnyPiece, delay_s: float) -> bool:
        """It waits while other work goes on, and is none of the pieces that go one by one."""
        return self._janitor is not None and self._janitor.submit_later(
            partial(self._execute, piece, True, None), delay_s
        )

    def next_ended(self) -> Outcome:
        """The first of `ended`, which counts as running no more."""
        outcome = self.ended.popleft()
        if not outcome.is_beside:
            self.num_running -= 1
            self.num_making_room -= outcome.piece.kind.makes_room
        return outcome

    def clear_ended(self) -> None:
        """What ends from now on wakes `wait_for_ended`."""
        self._has_ended.clear()

    def wait_for_ended(self, timeout_s: float) -> bool:
        """Until something ended. False when `timeout_s` passed first."""
        return self._has_ended.wait(timeout_s)

    def stop(self) -> None:
        """Start nothing more: the janitor was closed."""
        self._janitor = None

    def _execute(self, piece: AnyPiece, is_beside: bool, then: Callable[[], None] | None) -> None:
        """In the janitor's thread."""
        self.ended.append(Outcome(piece, run(piece.chore, self._files), is_beside))
        self._has_ended.set()
        if then is not None:
            then()


MAX_CHORES_IN_A_ROW = 64
"""That one call starts, where chores end before they are given back."""


class Upkeep:
    """The file work of one index.

    Args:
        state: of the store.
        agenda: what is due on it.
        janitor: where it runs.
    """

    def __init__(self, state: StoreState, agenda: Agenda, janitor: Janitor) -> None:
        self.state = state
        self._agenda = agenda
        self._segments = state.segments
        self._log = state.records.log
        self._changes_file = state.files.changes
        self._dispatcher = Dispatcher(janitor, state.files)
        self._ended = self._dispatcher.ended
        self._look_again_s = state.clock()
        self._looked_at = -1

    def settle(self) -> None:
        """Do what is due now, but for snapshots and changes, which an index writes once it is open."""
        self._work_off(self._agenda.next_but_snapshot)
        self.collect()  # whoever goes on with these tables does not hear of what ended here

    def run(self) -> None:
        """Apply what ended and start what is to be done next."""
        self.write_changes()
        self._work_off(self._agenda.next)

    def _work_off(self, choose: Callable[[], AnyPiece | None]) -> None:
        for _ in range(MAX_CHORES_IN_A_ROW):
            self.collect()
            if self._dispatcher.num_running:
                return
            self._looked_at = self._segments.revision
            if not self._start(choose()):
                self._look_again_s = min(self._agenda.snapshot.due_s, self.state.retries.next_end_s)
                return

    @property
    def makes_room(self) -> bool:
        """Whether file work that ends with more room is on its way, or due behind other work that is."""
        work = self._dispatcher
        return work.num_making_room > 0 or (work.num_running > 0 and self._agenda.is_room_due)

    @property
    def owes_epoch(self) -> bool:
        """Whether the last `start_epoch` is not on disk and this engine may still write it there."""
        return not self.state.is_epoch_written and not self.state.is_taken

    def run_if_needed(self) -> None:
        """As `run`, but cheap where nothing happened that calls for work."""
        if not self._log.is_scheduled or self._changes_file.has_unwritten:
            self.write_changes()
        has_news = self._ended or self._agenda.journal.has_pending or self._segments.revision != self._looked_at
        if has_news or self.state.clock() >= self._look_again_s:
            self.run()

    def collect(self) -> None:
        """Apply what ended."""
        while self._ended:
            outcome = self._dispatcher.next_ended()
            outcome.piece.ended(outcome.ending)

    def write_changes(self) -> None:
        """See to it that what happened is written down soon, also when nobody calls any more."""
        if self._changes_file.has_unwritten:
            self.collect()  # what failed rests, and nobody may have said so yet
        writer = self._agenda.changes
        if self._log.is_scheduled or not writer.has_news:
            return
        delay_s = writer.delay_s()
        if delay_s > 0 and not self._dispatcher.can_wait:
            return
        self._log.is_scheduled = True
        if self._dispatcher.start_beside(Piece(writer, Log()), delay_s):
            writer.planned(delay_s)
        else:
            self._log.is_scheduled = False

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything that is due was done or failed. False when `timeout_s` passed first."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._dispatcher.clear_ended()
            self.run()
            if not self._dispatcher.num_running and not self._start(self._agenda.changes.plan()):
                return True
            left_s = deadline_s - time.monotonic()
            if not self._dispatcher.wait_for_ended(max(left_s, 0.0)) or left_s < 0:
                return False

    def start_epoch(self, then: Callable[[], None]) -> bool:
        """Nothing that is on disk now may be offered again.

        Writes that down before anything that waits here is started, and calls `then`, in any thread, when it is
        written or failed. False when that cannot be started.
        """
        self._agenda.snapshot.forget_last()
        self._agenda.epoch.begin_next()
        return self._start(self._agenda.epoch.plan(), then)

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
        self._start(self._agenda.epoch.plan())
        self._start(self._agenda.journal.plan())
        if self.state.is_epoch_written:
            self._write_last()
        self._log.close()

    def _write_last(self) -> None:
        self._start(self._agenda.changes.plan())
        for piece in self._agenda.sealer.plan_all():
            self._start(piece)
        self._start(self._agenda.snapshot.plan_last())

    def give_up_snapshot(self) -> None:
        """Do not wait for the one that is being written, if there is one."""
        self._agenda.snapshot.give_up()

    def stop(self) -> None:
        """Start nothing more: the janitor was closed."""
        self._dispatcher.stop()

    def _start(self, piece: AnyPiece | None, then: Callable[[], None] | None = None) -> bool:
        if piece is None:
            return False
        if not self._dispatcher.start(piece, then):
            piece.refused()
            return False
        piece.started()
        return True
