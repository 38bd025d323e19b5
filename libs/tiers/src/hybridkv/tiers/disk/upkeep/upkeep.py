"""Keeps empty segments ready and the metadata on disk true: sees to it that the file work is done that is due.

One piece at a time is on its way. What fails rests for a while and is tried again; nothing raises for what the system
says. Everything here runs in the index's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.tables.record import Record
from hybridkv.tiers.disk.upkeep.agenda import Agenda
from hybridkv.tiers.disk.upkeep.dispatch import Dispatcher
from hybridkv.tiers.disk.upkeep.janitor import Janitor
from hybridkv.tiers.disk.upkeep.kind import AnyPiece
from hybridkv.tiers.disk.upkeep.state import StoreState

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
        self._agenda.changes.write_soon(self._dispatcher)

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

    def withdraw(self, record: Record) -> None:
        """Remember across restarts that this record may not be offered."""
        self._agenda.journal.withdraw(record)

    def quarantine(self, key: Key, reason: str) -> bool:
        """Never offer what is stored under this key again. False when nothing is."""
        return self._agenda.journal.quarantine(key, reason)

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
