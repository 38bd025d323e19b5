"""The moves that are on their way between a fast tier and a slower one: what they carry, who works on them, which are
late.

Judges no outcome and touches no tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from hybridkv.tiers.contract import Failure, Key, Slot
from hybridkv.tiers.stack.moves import Direction, MoveOutcome, TierMove

_PROMOTE = Direction.PROMOTE


class Moving(msgspec.Struct):
    """One move."""

    move: TierMove
    num_bytes: int
    ranks_left: int
    since_s: float
    failure: Failure | None = None
    """Of the first rank that failed."""
    is_late: bool = False
    is_prefetch: bool = False
    """It was begun though nobody waited."""


@dataclass(slots=True)
class Planned:
    """What all slower tiers of a stack have to do with each other on their way: the fast tier.

    Args:
        num_ranks: media that report every move.
    """

    num_ranks: int
    moves: list[TierMove] = field(default_factory=list)
    """Made, and not handed out yet, in order."""
    late_keys: set[Key] = field(default_factory=set)
    """What late promotions bring, from wherever: its space in the fast tier is nobody else's."""
    late_bytes: int = 0
    """What all of them keep reserved there."""
    tiers_of: dict[Key, str] = field(default_factory=dict)
    """From which tier each key comes that is on its way up."""


class Traffic:
    """All moves between a fast tier and one slower one.

    Args:
        tier: the slower one's name.
        move_ids: those that are this tier's.
        planned: what the traffic of all tiers shares.
    """

    def __init__(self, tier: str, move_ids: Iterator[int], planned: Planned) -> None:
        self._tier = tier
        self._move_ids = move_ids
        self._planned = planned
        self._moves: dict[int, Moving] = {}
        """In the order in which they began."""
        self.bytes_moving = dict.fromkeys(Direction, 0)
        """Of one rank. Late promotions are not among them."""
        self.num_in_time = dict.fromkeys(Direction, 0)
        """Moves that are not late."""
        self.prefetching_bytes = 0
        """Of what moves up in time, what nobody waited for when it began."""
        self.num_prefetching = 0
        self.late_bytes = 0
        """What they keep reserved in the fast tier."""

    def plan(
        self, direction: Direction, key: Key, near: Slot, far: Slot, now_s: float, is_prefetch: bool = False
    ) -> None:
        """A move, to be handed out with all that are planned."""
        move = TierMove(next(self._move_ids), direction, self._tier, key, near, far)
        num_bytes = near.num_bytes
        self._moves[move.move_id] = Moving(move, num_bytes, self._planned.num_ranks, now_s, is_prefetch=is_prefetch)
        self._count_prefetch(self._moves[move.move_id], 1)
        self.bytes_moving[direction] += num_bytes
        self.num_in_time[direction] += 1
        self._planned.moves.append(move)
        if direction is _PROMOTE:
            self._planned.tiers_of[key] = self._tier

    def report(self, move_id: int, outcome: MoveOutcome) -> Moving | None:
        """Ranks are done with a move. The move when they were the last ones."""
        moving = self._moves[move_id]
        moving.ranks_left -= outcome.num_ranks
        if moving.failure is None:
            moving.failure = outcome.failure
        if moving.ranks_left > 0:
            return None
        del self._moves[move_id]
        direction = moving.move.direction
        if direction is _PROMOTE:
            del self._planned.tiers_of[moving.move.key]
        if not moving.is_late:
            self.num_in_time[direction] -= 1
            self.bytes_moving[direction] -= moving.num_bytes
            self._count_prefetch(moving, -1)
        elif direction is _PROMOTE:
            self._planned.late_keys.discard(moving.move.key)
            self.late_bytes -= moving.num_bytes
            self._planned.late_bytes -= moving.num_bytes
        else:
            self.bytes_moving[direction] -= moving.num_bytes
        return moving

    def give_up(self, before_s: float) -> list[Moving]:
        """The moves that became late: they began at `before_s` or earlier."""
        late: list[Moving] = []
        for moving in self._moves.values():
            if moving.since_s > before_s:
                break
            if moving.is_late:
                continue
            late.append(moving)
            moving.is_late = True
            self.num_in_time[moving.move.direction] -= 1
            if moving.move.direction is _PROMOTE:
                self._count_prefetch(moving, -1)
                self.bytes_moving[_PROMOTE] -= moving.num_bytes
                self.late_bytes += moving.num_bytes
                self._planned.late_bytes += moving.num_bytes
                self._planned.late_keys.add(moving.move.key)
        return late

    def _count_prefetch(self, moving: Moving, number: int) -> None:
        if moving.is_prefetch:
            self.num_prefetching += number
            self.prefetching_bytes += number * moving.num_bytes

    def has_some_in_time(self) -> bool:
        """Whether a move is on its way that is not late."""
        return bool(self._moves) and any(self.num_in_time.values())

    def oldest_in_time_s(self) -> float:
        """When the first of them began; never (infinity) when there is none."""
        for moving in self._moves.values():
            if not moving.is_late:
                return moving.since_s
        return math.inf
