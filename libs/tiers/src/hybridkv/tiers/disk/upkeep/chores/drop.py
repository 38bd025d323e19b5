"""Deletes segments that hold nothing any more."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from hybridkv.tiers.disk.tables.segments import Stage
from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, Files
from hybridkv.tiers.disk.upkeep.chores.create import Create, SegmentMaker
from hybridkv.tiers.disk.upkeep.chores.epoch import WriteEpoch
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece
from hybridkv.tiers.disk.upkeep.state import StoreState

STUCK_SHARE = 16
"""Of so many segments one may be left that cannot be deleted, while others give up their place for it. No more, where
perhaps none can be deleted: each costs the chunks of another one."""
MOST_STUCK_SEGMENTS = 8


class DropError(OSError):
    """Some segments could not be deleted."""

    def __init__(self, first: OSError, left: tuple[int, ...]) -> None:
        super().__init__(first.errno, first.strerror, first.filename)
        self.left = left


@dataclass(frozen=True, slots=True)
class Drop(Chore[None]):
    """Each for itself: one that cannot be deleted keeps no other one."""

    numbers: tuple[int, ...]

    def run(self, files: Files) -> None:
        errors: dict[int, OSError] = {}
        for number in self.numbers:
            try:
                files.segments.drop(number)
            except OSError as error:
                errors[number] = error
        if errors:
            raise DropError(next(iter(errors.values())), tuple(errors))


class SegmentDropper(Kind[Drop, None]):
    """`maker` waits for the room that it makes."""

    makes_room = True

    def __init__(self, state: StoreState, maker: SegmentMaker) -> None:
        super().__init__(state)
        self._maker = maker
        sizes = state.sizes
        count = sizes.data_bytes // (sizes.num_ranks * sizes.segment_bytes)
        self._most_stuck = min(max(count // STUCK_SHARE, 1), MOST_STUCK_SEGMENTS)

    @property
    def is_resting(self) -> bool:
        return self._state.retries.is_resting(Drop)

    def plan(self) -> AnyPiece | None:
        # What rests may be long, and is asked for again and again.
        if self.is_resting:
            return None
        segments, is_resting = self._state.segments, self._state.retries.is_resting
        numbers = (*segments.dead, *(number for number in segments.stuck if not is_resting(number)))
        return Piece(self, Drop(numbers)) if numbers else None

    def started(self, chore: Drop) -> None:
        segments = self._state.segments
        for number in chore.numbers:
            segment = segments.by_number[number]
            segment.stage = Stage.LEAVING
            segments.refile(segment)
        segments.num_leaving += len(chore.numbers)

    def ended(self, chore: Drop, ending: Ending[None]) -> None:
        state, segments = self._state, self._state.segments
        left = _left(chore, ending.error)
        may_be_stuck = self._may_be_stuck(left, ending.error)
        for number in chore.numbers:
            segment = segments.by_number[number]
            segment.stage = Stage.STUCK if may_be_stuck else Stage.FULL
            segments.num_leaving -= 1
            if number in left:
                segments.refile(segment)
            else:
                segments.remove(segment)
                self._state.records.drop_segment(segment.number)
                state.retries.forget(number)
                self._maker.dropped(segment.segment_bytes)
                state.tally.add("segments_dropped")
        if len(left) < len(chore.numbers):
            state.retries.end(Create)
            state.retries.end(WriteEpoch)
        # Where more could not be deleted than may be stuck, none of them rests alone: the whole kind does.
        state.note(Drop, ending.error, left if may_be_stuck else (), is_all_well=not segments.stuck)

    def _may_be_stuck(self, left: tuple[int, ...], error: Exception | None) -> bool:
        """Whether these may be left alone. Not where it is plain that nothing can be deleted."""
        is_theirs = isinstance(error, DropError) and error.errno != errno.EROFS
        return is_theirs and len(self._state.segments.stuck) + len(left) <= self._most_stuck


def _left(chore: Drop, error: Exception | None) -> tuple[int, ...]:
    """What could not be deleted."""
    if isinstance(error, DropError):
        return error.left
    return () if error is None else chore.numbers
