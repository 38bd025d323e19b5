"""Copies what lives in a segment elsewhere, so that it can be deleted. `Compaction` says which, and what instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hybridkv.tiers.contract import FailureReason
from hybridkv.tiers.disk.files.segment_files import Move
from hybridkv.tiers.disk.upkeep.compaction import Compaction
from hybridkv.tiers.disk.upkeep.job import Ending, Files, Job
from hybridkv.tiers.disk.upkeep.jobs.create import SegmentMaker
from hybridkv.tiers.disk.upkeep.jobs.drop import SegmentDropper
from hybridkv.tiers.disk.upkeep.jobs.journal import JournalWriter
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece
from hybridkv.tiers.disk.upkeep.state import StoreState
from hybridkv.tiers.ledger import State

Copied: TypeAlias = list[tuple[Move, FailureReason | None]]


@dataclass(frozen=True, slots=True)
class Copy(Job[Copied]):
    number: int
    moves: tuple[Move, ...]

    def run(self, files: Files) -> Copied:
        return files.segments.copy(self.moves)


class SegmentCopier(Kind[Copy, Copied]):
    """Where nothing can be copied a segment is emptied for `dropper`; `journal` withdraws what cannot be read."""

    makes_room = True

    def __init__(self, state: StoreState, maker: SegmentMaker, dropper: SegmentDropper, journal: JournalWriter) -> None:
        super().__init__(state)
        self._maker = maker
        self._dropper = dropper
        self._journal = journal
        self.compaction = Compaction(state.segments, state.records, state.options.compaction_share)
        self.copying: tuple[Move, ...] = ()
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
        moves = self.compaction.moves(victim)
        if not moves:
            return self._give_up_one()
        victim.is_moving = True
        segments.refile(victim)
        return Piece(self, Copy(victim.number, moves))

    def _give_up_one(self) -> AnyPiece | None:
        """Nothing can be copied anywhere: evict the segment that costs least."""
        victim = self.compaction.cheapest()
        if victim is not None:
            self.compaction.empty(victim)
        return self._dropper.plan()

    def started(self, job: Copy) -> None:
        self.copying = job.moves

    def refused(self, job: Copy) -> None:
        self._finish(job, [])

    def apply(self, job: Copy, ending: Ending[Copied]) -> None:
        self.copying = ()
        self._finish(job, ending.value or [])

    def _finish(self, job: Copy, copied: Copied) -> None:
        """`copied`: nothing when it broke off."""
        segments = self._state.segments
        for move in job.moves:
            segments.release(move.new_address, is_writing=True)
        if not copied or any(reason is not None for _, reason in copied):
            for move in job.moves:
                target = segments.of(move.new_address)
                target.may_be_sealed = False
                segments.refile(target)
        moved = [move for move, reason in copied if self._is_moved(move, reason)]
        for move in set(job.moves).difference(moved):
            self._state.records.log.gone(move.new_address)
        source = segments.by_number[job.number]
        source.is_moving = False
        segments.refile(source)

    def _is_moved(self, move: Move, reason: FailureReason | None) -> bool:
        """Whether the record lies where it was copied to, from now on."""
        state = self._state
        record = state.records.by_key.get(move.key)
        if record is None or record.address != move.old_address:
            return False
        if reason is not None:
            self._journal.quarantine(move.key, reason)
            return False
        if record.state is not State.COMMITTED or record.num_pins:
            return False
        state.records.move(record, move.new_address)
        state.tally.add("moved_records")
        state.tally.add("moved_bytes", record.cost * state.sizes.num_ranks)
        return True
