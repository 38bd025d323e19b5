"""Writes into segments that every record in them is whole, so that the next opening need not read those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridkv.tiers.disk.tables.segments import Segment
from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, Files
from hybridkv.tiers.disk.upkeep.chores.journal import JournalWriter
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece
from hybridkv.tiers.disk.upkeep.state import StoreState


@dataclass(frozen=True, slots=True)
class Seal(Chore[None]):
    number: int
    epoch: int
    end_offset: int

    def run(self, files: Files) -> None:
        files.segments.seal(self.number, self.epoch, self.end_offset)


class SegmentSealer(Kind[Seal, None]):
    """Behind `journal`: a seal vouches for all that nobody withdrew."""

    def __init__(self, state: StoreState, journal: JournalWriter) -> None:
        super().__init__(state)
        self._journal = journal

    def plan(self) -> AnyPiece | None:
        if self._journal.has_pending:
            return None
        sealable = self._state.segments.sealable
        while sealable:
            segment = next(iter(sealable.values()))
            if segment.epoch == self._state.epoch:
                return self._piece(segment)
            del sealable[segment.number]  # of an epoch that is over
        return None

    def plan_all(self) -> Iterator[AnyPiece]:
        """Everything that can be sealed now."""
        for segment in list(self._state.segments.sealable.values()):
            if segment.epoch == self._state.epoch:
                yield self._piece(segment)

    def _piece(self, segment: Segment) -> AnyPiece:
        return Piece(self, Seal(segment.number, segment.epoch, segment.end_offset))

    def apply(self, chore: Seal, ending: Ending[None]) -> None:
        segments = self._state.segments
        if ending.is_done and chore.number in segments.by_number:
            segments.by_number[chore.number].is_sealed = True
            segments.refile(segments.by_number[chore.number])
