"""Writes down, every so often, what happened to the records since the last snapshot."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, Files
from hybridkv.tiers.disk.upkeep.dispatch import Dispatcher
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece
from hybridkv.tiers.disk.upkeep.state import StoreState


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

    def write_soon(self, dispatcher: Dispatcher) -> None:
        """See to it that what happened is written down in time, also when nobody calls any more."""
        if self._log.is_scheduled or not self.has_news:
            return
        now_s = self._state.clock()
        if now_s < self._due_s and not dispatcher.can_wait:
            return
        delay_s = max(self._due_s - now_s, 0.0)
        self._log.is_scheduled = True
        if dispatcher.start_beside(Piece(self, Log()), delay_s):
            self._due_s = now_s + delay_s + self._state.options.changes_interval_s
        else:
            self._log.is_scheduled = False

    def apply(self, chore: Log, ending: Ending[bool]) -> None:
        # A file that somebody removed does not come back by itself.
        is_gone = getattr(ending.error, "errno", None) == errno.ENOENT
        self._state.is_snapshot_owed = self._state.is_snapshot_owed or is_gone or ending.value is True
