"""Moves between tiers, their outcomes, and counts of both. Messages between `TierStack` and `TierMover`."""

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
    """From a secondary tier to the primary one."""
    CASCADE = "cascade"
    """From the primary tier to a secondary one."""


class TierMove(msgspec.Struct, frozen=True, array_like=True):
    """Move of one chunk between two tiers. Every rank moves its own part.

    Args:
        move_id: identifies the move in its outcome.
        direction: promotion or cascade.
        tier: name of the secondary tier.
        key: key of the chunk.
        primary: slot in the primary tier.
        secondary: slot in the secondary tier.
    """

    move_id: int
    direction: Direction
    tier: str
    key: Key
    primary: Slot
    secondary: Slot


class MoveOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Number of ranks that are done with a move, and the failure of the first rank that failed."""

    num_ranks: int
    failure: Failure | None = None

    def merge(self, other: MoveOutcome) -> MoveOutcome:
        return MoveOutcome(self.num_ranks + other.num_ranks, self.failure or other.failure)


class MoveResult(enum.StrEnum):
    """Result of a requested move."""

    DONE = "done"
    FAILED = "failed"
    DROPPED_BUSY = "dropped_busy"
    """The queue is full; timed-out cascades use up the limits; or a timed-out cascade of the same key is in flight."""
    DROPPED_NO_ROOM = "dropped_no_room"
    """The secondary tier had no space, is closed, or the chunk is too large for it."""
    DROPPED_OPEN = "dropped_open"
    """The breaker of this direction is open."""
    DROPPED_ORPHAN = "dropped_orphan"
    """A chunk that this chunk needs is neither in the secondary tier nor in flight to that tier."""
    DROPPED_EVICTED = "dropped_evicted"
    """The primary tier evicted the chunk, or the chunk was invalidated, before it was sent."""
    DROPPED_LATE = "dropped_late"
    """The chunk waited while the queue made no progress for `load_timeout_s`."""


class PrefetchResult(enum.StrEnum):
    """Result of the prefetch of one prefix."""

    PROMOTED = "promoted"
    """All missing chunks arrived, some perhaps by another promotion or a store."""
    NOTHING = "nothing"
    """No chunk was missing, or other promotions or stores wrote all missing chunks."""
    NO_ROOM = "no_room"
    """The limit of unused prefetched bytes was reached, or a chunk is larger than the primary tier. Earlier chunks of
    the prefix were sent."""
    LATE = "late"
    """The prefetch took longer than `load_timeout_s`."""
    LOST = "lost"
    """A chunk could not be promoted, was invalidated, or its tier is not usable; or the prefetch was stopped."""
    CROWDED = "crowded"
    """Too many prefixes are in progress."""


class PrefetchBytes(enum.StrEnum):
    """Counted events of prefetched bytes."""

    PROMOTED = "promoted"
    """Arrived in the primary tier."""
    USED = "used"
    """Used for the first time: leased or pinned."""
    DISPLACED = "displaced"
    """Dropped unused, to make room for another prefetch."""


class MoveCounts(msgspec.Struct, frozen=True):
    """Counts of the moves of one secondary tier. Bytes count one rank."""

    promotions: dict[MoveResult, int] = {}
    cascades: dict[MoveResult, int] = {}
    promoted_bytes: int = 0
    cascaded_bytes: int = 0
    failures: dict[str, int] = {}
    """Failed moves by `FailureReason`."""
    breaker_openings: dict[Direction, int] = {}
    """Openings of breakers, by direction; only directions that had any."""

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
    """Mutable `MoveCounts`."""

    def __init__(self) -> None:
        self.results: dict[Direction, dict[MoveResult, int]] = {direction: {} for direction in Direction}
        self.num_bytes = dict.fromkeys(Direction, 0)
        self.failures: dict[str, int] = {}

    def add(self, direction: Direction, result: MoveResult, num_bytes: int = 0, failure: Failure | None = None) -> None:
        results = self.results[direction]
        results[result] = results.get(result, 0) + 1
        if failure is not None:
            reason = str(failure.reason)
            self.failures[reason] = self.failures.get(reason, 0) + 1
        else:
            self.num_bytes[direction] += num_bytes

    def as_counts(self, breaker_openings: dict[Direction, int]) -> MoveCounts:
        """Counts so far, and the openings of breakers in the same time."""
        return MoveCounts(
            promotions=self.results[Direction.PROMOTE],
            cascades=self.results[Direction.CASCADE],
            promoted_bytes=self.num_bytes[Direction.PROMOTE],
            cascaded_bytes=self.num_bytes[Direction.CASCADE],
            failures=self.failures,
            breaker_openings=breaker_openings,
        )


class StackCounts(msgspec.Struct, frozen=True):
    """Counts of a stack since the last `take_counts`."""

    tiers: dict[str, MoveCounts] = {}
    """By secondary tier, the nearest first."""
    timeouts: int = 0
    """Promotion leases that timed out."""
    prefetches: dict[PrefetchResult, int] = {}
    """Prefixes by result; only results that occurred."""
    prefetch_bytes: dict[PrefetchBytes, int] = {}
    """Bytes of one rank, by event; only events that occurred."""

    @property
    def moves(self) -> MoveCounts:
        """Sum over all secondary tiers."""
        return functools.reduce(MoveCounts.merge, self.tiers.values(), MoveCounts())


def _sum(mine: Mapping[_Name, int], theirs: Mapping[_Name, int]) -> dict[_Name, int]:
    return {name: mine.get(name, 0) + theirs.get(name, 0) for name in {**mine, **theirs}}
