"""Moves in flight between the primary tier and one secondary tier: bytes, ranks that are not done, timeouts.

Does not act on outcomes, and calls no tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from hybridkv.tiers.contract import Failure, Key, Slot
from hybridkv.tiers.stack.moves import Direction, MoveOutcome, TierMove

_PROMOTE = Direction.PROMOTE


class InFlightMove(msgspec.Struct):
    """One move in flight."""

    move: TierMove
    num_bytes: int
    ranks_left: int
    since_s: float
    failure: Failure | None = None
    """Failure of the first rank that failed."""
    is_timed_out: bool = False
    is_prefetch: bool = False
    """True if no request waited for the move when it started."""


@dataclass(slots=True)
class SharedMoves:
    """State of moves that all secondary tiers of one stack share.

    Args:
        num_ranks: number of ranks. Each rank reports the outcome of every move.
    """

    num_ranks: int
    planned: list[TierMove] = field(default_factory=list)
    """Moves that `TierStack.take_moves` has not returned yet, in order."""
    timed_out_keys: set[Key] = field(default_factory=set)
    """Keys of timed-out promotions, from all tiers. Their space in the primary tier stays reserved."""
    timed_out_bytes: int = 0
    """Bytes that timed-out promotions keep reserved in the primary tier."""
    source_by_key: dict[Key, str] = field(default_factory=dict)
    """Name of the tier that each key is promoted from."""


class InFlightMoves:
    """All moves between the primary tier and one secondary tier.

    Args:
        tier: name of the secondary tier.
        move_ids: ids for the moves of this tier.
        shared: state of the moves of all tiers.
    """

    def __init__(self, tier: str, move_ids: Iterator[int], shared: SharedMoves) -> None:
        self._tier = tier
        self._move_ids = move_ids
        self._shared = shared
        self._moves: dict[int, InFlightMove] = {}
        """Moves by id, in the order of their start."""
        self.bytes_in_flight = dict.fromkeys(Direction, 0)
        """Bytes of one rank, per direction. Without timed-out promotions, but with timed-out cascades."""
        self.num_live = dict.fromkeys(Direction, 0)
        """Moves that have not timed out, per direction."""
        self.prefetching_bytes = 0
        """Bytes of live promotions that are prefetches."""
        self.num_prefetching = 0
        self.timed_out_bytes = 0
        """Bytes that timed-out promotions of this tier keep reserved in the primary tier."""

    def plan(
        self, direction: Direction, key: Key, primary: Slot, secondary: Slot, now_s: float, is_prefetch: bool = False
    ) -> None:
        """Add a move to the moves that `TierStack.take_moves` returns next."""
        move = TierMove(next(self._move_ids), direction, self._tier, key, primary, secondary)
        num_bytes = primary.num_bytes
        self._moves[move.move_id] = InFlightMove(
            move, num_bytes, self._shared.num_ranks, now_s, is_prefetch=is_prefetch
        )
        self._count_prefetch(self._moves[move.move_id], 1)
        self.bytes_in_flight[direction] += num_bytes
        self.num_live[direction] += 1
        self._shared.planned.append(move)
        if direction is _PROMOTE:
            self._shared.source_by_key[key] = self._tier

    def report(self, move_id: int, outcome: MoveOutcome) -> InFlightMove | None:
        """Record that ranks are done with a move. Returns the move when all ranks are done."""
        in_flight = self._moves[move_id]
        in_flight.ranks_left -= outcome.num_ranks
        if in_flight.failure is None:
            in_flight.failure = outcome.failure
        if in_flight.ranks_left > 0:
            return None
        del self._moves[move_id]
        direction = in_flight.move.direction
        if direction is _PROMOTE:
            del self._shared.source_by_key[in_flight.move.key]
        if not in_flight.is_timed_out:
            self.num_live[direction] -= 1
            self.bytes_in_flight[direction] -= in_flight.num_bytes
            self._count_prefetch(in_flight, -1)
        elif direction is _PROMOTE:
            self._shared.timed_out_keys.discard(in_flight.move.key)
            self.timed_out_bytes -= in_flight.num_bytes
            self._shared.timed_out_bytes -= in_flight.num_bytes
        else:
            self.bytes_in_flight[direction] -= in_flight.num_bytes
        return in_flight

    def time_out(self, before_s: float) -> list[InFlightMove]:
        """Mark the moves that started at `before_s` or earlier as timed out. Returns the newly marked ones."""
        timed_out: list[InFlightMove] = []
        for in_flight in self._moves.values():
            if in_flight.since_s > before_s:
                break
            if in_flight.is_timed_out:
                continue
            timed_out.append(in_flight)
            in_flight.is_timed_out = True
            self.num_live[in_flight.move.direction] -= 1
            if in_flight.move.direction is _PROMOTE:
                self._count_prefetch(in_flight, -1)
                self.bytes_in_flight[_PROMOTE] -= in_flight.num_bytes
                self.timed_out_bytes += in_flight.num_bytes
                self._shared.timed_out_bytes += in_flight.num_bytes
                self._shared.timed_out_keys.add(in_flight.move.key)
        return timed_out

    def _count_prefetch(self, in_flight: InFlightMove, number: int) -> None:
        if in_flight.is_prefetch:
            self.num_prefetching += number
            self.prefetching_bytes += number * in_flight.num_bytes

    def has_live(self) -> bool:
        """True if a move is in flight that has not timed out."""
        return bool(self._moves) and any(self.num_live.values())

    def oldest_live_s(self) -> float:
        """Start of the oldest move that has not timed out; infinity if there is none."""
        for in_flight in self._moves.values():
            if not in_flight.is_timed_out:
                return in_flight.since_s
        return math.inf
