"""What travels between the two halves of a stack: moves to the media, outcomes back, and counts of both."""

from __future__ import annotations

import enum

import msgspec

from hybridkv.tiers.contract import Failure, Key, Slot


class Direction(enum.StrEnum):
    PROMOTE = "promote"
    """From the slow tier to the fast one."""
    CASCADE = "cascade"
    """From the fast tier to the slow one."""


class TierMove(msgspec.Struct, frozen=True, array_like=True):
    """One chunk on its way between two tiers; every rank carries out its own part.

    Args:
        move_id: comes back in the outcome.
        direction: which way.
        key: of the chunk.
        near: its place in the fast tier.
        far: its place in the slow tier.
    """

    move_id: int
    direction: Direction
    key: Key
    near: Slot
    far: Slot


class MoveOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How many ranks are done with a move, and why the first of them failed, if one did."""

    num_ranks: int
    failure: Failure | None = None

    def merge(self, other: MoveOutcome) -> MoveOutcome:
        return MoveOutcome(self.num_ranks + other.num_ranks, self.failure or other.failure)


class MoveResult(enum.StrEnum):
    """What became of a move that was made or wished for."""

    DONE = "done"
    FAILED = "failed"
    DROPPED_BUSY = "dropped_busy"
    """More waits than the options allow, or all that may be on its way is late."""
    DROPPED_NO_ROOM = "dropped_no_room"
    """The destination had no space to give."""
    DROPPED_OPEN = "dropped_open"
    """The breaker of this direction keeps away from the slow tier."""
    DROPPED_ORPHAN = "dropped_orphan"
    """What it needs before it on its path is not in the slow tier, nor on its way there."""
    DROPPED_EVICTED = "dropped_evicted"
    """It left the fast tier before its turn."""
    DROPPED_LATE = "dropped_late"
    """It waited while nothing came to its end for longer than a move may take."""


class StackCounts(msgspec.Struct, frozen=True):
    """What a stack did since it was last asked. Bytes are those of one rank."""

    promotions: dict[MoveResult, int] = {}
    cascades: dict[MoveResult, int] = {}
    promoted_bytes: int = 0
    cascaded_bytes: int = 0
    failures: dict[str, int] = {}
    """Failed moves by the reason that the tier gave."""
    timeouts: int = 0
    """Waits that were given up."""
    breaker_openings: dict[Direction, int] = {}
    """Only of directions whose breaker opened."""
