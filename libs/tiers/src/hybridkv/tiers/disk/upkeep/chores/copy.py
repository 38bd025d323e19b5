"""Copies what lives in a segment elsewhere, so that it can be deleted. `Compaction` says which, and what instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hybridkv.tiers.contract import FailureReason
from hybridkv.tiers.disk.files.segment_files import Relocation
from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, Files
from hybridkv.tiers.disk.upkeep.chores.create import SegmentMaker
from hybridkv.tiers.disk.upkeep.chores.drop import SegmentDropper
from hybridkv.tiers.disk.upkeep.chores.journal import JournalWriter
from hybridkv.tiers.disk.upkeep.compaction import Compaction
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece
from hybridkv.tiers.disk.upkeep.state import StoreState
from hybridkv.tiers.ledger import KeyState

Copied: TypeAlias = list[tuple[Relocation, FailureReason | None]]


@dataclass(frozen=True, slots=True)
class Copy(Chore[Copied]):
    number: int
    relocations: tuple[Relocation, ...]

    def run(self, files: Files) -> Copied:
        return files.segments.copy(self.relocations)


class SegmentCopier(Kind[Copy, Copied]):
    """Where nothing can be copied a segment is emptied for `dropper`; `journal` withdraws what cannot be read."""

    makes_room = True

    def __init__(self, state: StoreState, maker: SegmentMaker, dropper: SegmentDropper, journal: JournalWriter) -> None:
        super().__init__(state)
        self._maker = maker
        self._dropper = dropper
        self._journal = journal
        self.compaction = Compaction(state.segments, state.records, state.options.compaction_share)
        self.copying: tuple[Relocation, ...] = ()
        """What is being copied now."""

    @property
    def is_due(self) -> bool:
        """Whether it is time for a segment to give up its place, and one can be found."""
        return self._may_copy() and self.compaction.cheapest() is not None

    def _may_copy(self) -> bool:
        segments = self._state.segments
        if len(segments.ready) + segments.creatable + segments.num_leaving >= self._state.sizes.kept_segments:
            return False
        if self._state.retries.is_resting(Copy) or self._dropper.is_resting:
            return False
        if segments.creatable and self._maker.is_resting:
            return False
        return self._maker.helps_to_drop

    def plan(self) -> AnyPiece | None:
        """Also a deletion, where nothing is left to be copied."""
        segments = self._state.segments
        if not self._may_copy():
            return None
        if not segments.ready and not segments.creatable:
            return self._give_up_one()
        victim = self.compaction.victim()
        if victim is None:
            return None
        if not victim.live_bytes:
            return self._dropper.plan()
        relocations = self.compaction.relocations(victim)
        if not relocations:
            return self._give_up_one()
        victim.is_moving = True
        segments.refile(victim)
        return Piece(self, Copy(victim.number, relocations))

    def _give_up_one(self) -> AnyPiece | None:
        """Nothing can be copied anywhere: evict the segment that costs least."""
        victim = self.compaction.cheapest()
        if victim is not None:
            self.compaction.empty(victim)
        return self._dropper.plan()

    def started(self, chore: Copy) -> None:
        self.copying = chore.relocations

    def refused(self, chore: Copy) -> None:
        self._finish(chore, [])

    def apply(self, chore: Copy, ending: Ending[Copied]) -> None:
        self.copying = ()
        self._finish(chore, ending.value or [])

    def _finish(self, chore: Copy, copied: Copied) -> None:
        """`copied`: nothing when it broke off."""
        segments = self._state.segments
        for relocation in chore.relocations:
            segments.release(relocation.new_address, is_writing=True)
        if not copied or any(reason is not None for _, reason in copied):
            for relocation in chore.relocations:
                target = segments.of(relocation.new_address)
                target.may_be_sealed = False
                segments.refile(target)
        moved = [relocation for relocation, reason in copied if self._is_moved(relocation, reason)]
        for relocation in set(chore.relocations).difference(moved):
            self._state.records.log.gone(relocation.new_address)
        source = segments.by_number[chore.number]
        source.is_moving = False
        segments.refile(source)

    def _is_moved(self, relocation: Relocation, reason: FailureReason | None) -> bool:
        """Whether the record lies where it was copied to, from now on."""
        state = self._state
        record = state.records.find(relocation.key)
        if record is None or record.address != relocation.old_address:
            return False
        if reason is not None:
            self._journal.quarantine(relocation.key, reason)
            return False
        if record.state is not KeyState.COMMITTED or record.num_pins:
            return False
        state.records.relocate(record, relocation.new_address)
        state.tally.add("moved_records")
        state.tally.add("moved_bytes", record.cost * state.sizes.num_ranks)
        return True
