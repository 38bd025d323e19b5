"""What file work is due next: every kind of it, and in which order it is done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hybridkv.tiers.disk.format.journal import Withdrawal
from hybridkv.tiers.disk.upkeep.chores.changes import ChangeWriter
from hybridkv.tiers.disk.upkeep.chores.copy import SegmentCopier
from hybridkv.tiers.disk.upkeep.chores.create import SegmentMaker
from hybridkv.tiers.disk.upkeep.chores.drop import SegmentDropper
from hybridkv.tiers.disk.upkeep.chores.epoch import EpochWriter, WriteEpoch
from hybridkv.tiers.disk.upkeep.chores.journal import JournalWriter
from hybridkv.tiers.disk.upkeep.chores.restore import Restorer
from hybridkv.tiers.disk.upkeep.chores.seal import SegmentSealer
from hybridkv.tiers.disk.upkeep.chores.snapshot import SnapshotWriter
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind
from hybridkv.tiers.disk.upkeep.state import StoreState


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
