"""What travels between the two halves of a stack: moves to the media, outcomes back, and counts of both."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from hybridkv.tiers.contract import Failure, Key, Slot

_Name = TypeVar("_Name", bound=str)


class Direction(enum.StrEnum):
    PROMOTE = "promote"
    """From a slower tier to the fast one."""
    CASCADE = "cascade"
    """From the fast tier to a slower one."""


class TierMove(msgspec.Struct, frozen=True, array_like=True):
    """One chunk on its way between two tiers; every rank carries out its own part.

    Args:
        move_id: comes back in the outcome.
        direction: which way.
        tier: the name of the slower one.
        key: of the chunk.
        near: its place in the fast tier.
        far: its place in the slower tier.
    """

    move_id: int
    direction: Direction
    tier: str
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
    """The breaker of this direction keeps away from the slower tier."""
    DROPPED_ORPHAN = "dropped_orphan"
    """What it needs before it on its path is not in the slower tier, nor on its way there."""
    DROPPED_EVICTED = "dropped_evicted"
    """It left the fast tier before its turn."""
    DROPPED_LATE = "dropped_late"
    """It waited while nothing came to its end for longer than a move may take."""


class PrefetchResult(enum.StrEnum):
    """What became of one prefix that was to be brought into the fast tier."""

    BROUGHT = "brought"
    """All that it lacked has come, what others brought or stored meanwhile included."""
    NOTHING = "nothing"
    """It lacked nothing, or others brought all of that."""
    NO_ROOM = "no_room"
    """More than the fast tier may have of what nobody waits for: its beginning has come."""
    LATE = "late"
    """It took longer than a hold may wait."""
    LOST = "lost"
    """A chunk could not be promoted, was withdrawn, or its tier is left alone."""
    CROWDED = "crowded"
    """As many wait as may."""


class PrefetchBytes(enum.StrEnum):
    """What became of bytes that nobody waited for."""

    BROUGHT = "brought"
    """They came into the fast tier."""
    USED = "used"
    """Somebody held, pinned or touched them for the first time, and got them."""
    DISPLACED = "displaced"
    """They were to go first, before anybody used them: others were brought in their place."""


class MoveCounts(msgspec.Struct, frozen=True):
    """What went to a slower tier and came from it since it was last asked. Bytes are those of one rank."""

    promotions: dict[MoveResult, int] = {}
    cascades: dict[MoveResult, int] = {}
    promoted_bytes: int = 0
    cascaded_bytes: int = 0
    failures: dict[str, int] = {}
    """Failed moves by the reason that the tier gave."""
    breaker_openings: dict[Direction, int] = {}
    """Only of directions whose breaker opened."""

    def merge(self, other: MoveCounts) -> MoveCounts:
        return MoveCounts(
            promotions=_sum(self.promotions, other.promotions),
            cascades=_sum(self.cascades, other.cascades),
            promoted_bytes=self.promoted_bytes + other.promoted_bytes,
            cascaded_bytes=self.cascaded_bytes + other.cascaded_bytes,
            failures=_sum(self.failures, other.failures),
            breaker_openings=_sum(self.breaker_openings, other.breaker_openings),
        )


class MoveTally:
    """A mutable `MoveCounts`."""

    def __init__(self) -> None:
        self.results: dict[Direction, dict[MoveResult, int]] = {direction: {} for direction in Direction}
        self.num_bytes = dict.fromkeys(Direction, 0)
        self.failures: dict[str, int] = {}

    def moved(
        self, direction: Direction, result: MoveResult, num_bytes: int = 0, failure: Failure | None = None
    ) -> None:
        results = self.results[direction]
        results[result] = results.get(result, 0) + 1
        if failure is not None:
            reason = str(failure.reason)
            self.failures[reason] = self.failures.get(reason, 0) + 1
        else:
            self.num_bytes[direction] += num_bytes

    def as_counts(self, breaker_openings: dict[Direction, int]) -> MoveCounts:
        """What was counted, with how often the breakers opened meanwhile."""
        return MoveCounts(
            promotions=self.results[Direction.PROMOTE],
            cascades=self.results[Direction.CASCADE],
            promoted_bytes=self.num_bytes[Direction.PROMOTE],
            cascaded_bytes=self.num_bytes[Direction.CASCADE],
            failures=self.failures,
            breaker_openings=breaker_openings,
        )


class StackCounts(msgspec.Struct, frozen=True):
    """What a stack did since it was last asked."""

    tiers: dict[str, MoveCounts] = {}
    """Of each slower tier, the nearest first."""
    timeouts: int = 0
    """Holds that were given up because their time was over."""
    prefetches: dict[PrefetchResult, int] = {}
    """Prefixes; only results that occurred."""
    prefetch_bytes: dict[PrefetchBytes, int] = {}
    """Of one rank."""

    @property
    def moves(self) -> MoveCounts:
        """Of all of them together."""
        return functools.reduce(MoveCounts.merge, self.tiers.values(), MoveCounts())


def _sum(mine: Mapping[_Name, int], theirs: Mapping[_Name, int]) -> dict[_Name, int]:
    return {name: mine.get(name, 0) + theirs.get(name, 0) for name in {**mine, **theirs}}
