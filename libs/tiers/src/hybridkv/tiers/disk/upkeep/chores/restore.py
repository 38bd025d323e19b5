"""Makes the directories anew if somebody removed them, and forgets what lay in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hybridkv.tiers.disk.files.names import segment_number
from hybridkv.tiers.disk.tables.segments import Segment, Stage
from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, Files
from hybridkv.tiers.disk.upkeep.chores.epoch import WriteEpoch
from hybridkv.tiers.disk.upkeep.chores.journal import JournalWriter
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece
from hybridkv.tiers.disk.upkeep.state import StoreState


@dataclass(frozen=True, slots=True)
class Restore(Chore[set[int] | None]):
    epoch: int

    needs_own: ClassVar[bool] = False

    def run(self, files: Files) -> set[int] | None:
        """The segments that every rank has now; None when nothing was removed."""
        namespace = files.namespace
        if not namespace.is_there():
            namespace.restore()
        if not namespace.is_anew:
            return None
        WriteEpoch(self.epoch).run(files)
        numbers = [{segment_number(name) for name in directory.list()} for directory in namespace.ranks]
        namespace.is_anew = False
        return {number for number in set.intersection(*numbers) if number is not None}


class Restorer(Kind[Restore, set[int] | None]):
    """Where the directories are gone, so is the journal."""

    makes_room = True

    def __init__(self, state: StoreState, journal: JournalWriter) -> None:
        super().__init__(state)
        self._journal = journal

    @property
    def is_due(self) -> bool:
        return self._state.is_lost and not self._state.retries.is_resting(Restore)

    def plan(self) -> AnyPiece | None:
        return Piece(self, Restore(self._state.epoch)) if self._state.is_lost else None

    def apply(self, chore: Restore, ending: Ending[set[int] | None]) -> None:
        state, segments, there = self._state, self._state.segments, ending.value
        if ending.error is not None:
            # Directories without an epoch: what is made in them now would be of an unknown one.
            state.is_epoch_written = state.is_epoch_written and not state.files.namespace.is_anew
            return
        state.is_lost = False
        if there is None:
            return
        state.is_epoch_written = state.is_epoch_written or chore.epoch == state.epoch
        self._journal.lost()
        state.records.log.give_up()
        state.is_snapshot_owed = True
        segments.close_open()
        for segment in segments.by_number.values():
            if segment.number not in there:
                self._lose(segment)

    def _lose(self, segment: Segment) -> None:
        """Its files are gone."""
        segments, records = self._state.segments, self._state.records
        if segment.stage is Stage.READY:
            segments.ready.remove(segment)
        if segment.stage in (Stage.READY, Stage.UNAVAILABLE, Stage.STUCK):
            segment.stage = Stage.FULL
        segment.may_be_sealed = False
        records.withdraw_in(segment)
        segments.refile(segment)
