"""Health of one secondary tier: circuit breakers for the moves of each direction, and for lookups.

Each direction has its own breakers, because a tier that fails in one direction may still work in the other: a full or
read-only file system fails every store and serves every load. Lookups and promotions have separate breakers, because a
tier is useless if it answers lookups but fails every load, or the opposite. So a success of one does not reset the
failures of the other. If the process is short of a resource, or a queue is full, no operation was tried and the tier
did not fail. Then a separate backoff prevents a retry in every step.

This module moves no bytes and reads no clock: callers pass the time.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import msgspec

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.stack.moves import Direction

LONG_SHORTAGE_S = 1.0
"""A backoff of this length or more after a shortage makes the direction unusable. Callers wait for the end of a shorter
backoff."""
_TIER_FAULTS = (FailureReason.IO, FailureReason.CLOSED)
"""Failures of the tier, not only of one chunk."""


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    """The tier is used."""
    OPEN = "open"
    """The tier is not used."""
    PROBING = "probing"
    """One operation at a time: a success closes the breaker, a failure opens it again for twice as long."""


class BreakerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits at which a breaker opens, and the time until it probes.

    Args:
        failures: number of failures in a row that open the breaker; at least 1.
        first_backoff_s: backoff after the first opening; each failed probe doubles it.
        max_backoff_s: upper bound of the backoff.
    """

    failures: int = 3
    first_backoff_s: float = 5.0
    max_backoff_s: float = 120.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise TierConfigurationError("failures", "a number >= 1", self.failures)
        if not 0 < self.first_backoff_s <= self.max_backoff_s:
            raise TierConfigurationError(
                "first_backoff_s", f"seconds above 0 and at most {self.max_backoff_s}", self.first_backoff_s
            )


class Breaker:
    """A circuit breaker. The caller passes the time: seconds of any monotonic clock."""

    def __init__(self, options: BreakerOptions | None = None) -> None:
        self._options = options or BreakerOptions()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._backoff_s = self._options.first_backoff_s
        self._opened_at_s = 0.0
        self.num_openings = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def allows(self) -> bool:
        return self._state is not BreakerState.OPEN

    @property
    def is_healthy(self) -> bool:
        """True if the breaker is closed and has no recent failures, so that a success changes nothing."""
        return self._state is BreakerState.CLOSED and not self._failures

    @property
    def backoff_s(self) -> float:
        """Length of the current backoff; while probing, of the last one; while closed, of the next one."""
        return self._backoff_s

    @property
    def backoff_ends_s(self) -> float:
        """Time of the next state change by `tick`; infinity unless the breaker is open."""
        return self._opened_at_s + self._backoff_s if self._state is BreakerState.OPEN else math.inf

    def tick(self, now_s: float) -> None:
        """Start to probe if the backoff is over."""
        if now_s >= self.backoff_ends_s:
            self._state = BreakerState.PROBING

    def succeed(self) -> None:
        """Record a success. Ignored while open: the operation started before the breaker opened."""
        if self._state is BreakerState.OPEN:
            return
        self._failures = 0
        if self._state is BreakerState.PROBING:
            self._state = BreakerState.CLOSED
            self._backoff_s = self._options.first_backoff_s

    def fail(self, now_s: float) -> None:
        """Record a failure or a timeout. Ignored while open."""
        if self._state is BreakerState.OPEN:
            return
        self._failures += 1
        if self._state is BreakerState.PROBING:
            self._backoff_s = min(2 * self._backoff_s, self._options.max_backoff_s)
        elif self._failures < self._options.failures:
            return
        self._state = BreakerState.OPEN
        self._failures = 0
        self._opened_at_s = now_s
        self.num_openings += 1


class _DirectionHealth(NamedTuple):
    moves: Breaker
    shortage: Breaker
    """Open after BUSY moves: the process was short of files, memory or threads, or a queue was full."""
    lookups: Breaker
    """Open after unanswered lookups. Used only for promotions."""

    @property
    def is_usable(self) -> bool:
        is_long_shortage = not self.shortage.allows and self.shortage.backoff_s >= LONG_SHORTAGE_S
        return self.moves.allows and self.lookups.allows and not is_long_shortage

    @property
    def is_healthy(self) -> bool:
        """True if a successful move changes nothing."""
        return self.moves.is_healthy and self.shortage.is_healthy

    @property
    def answer_state(self) -> tuple[BreakerState, bool]:
        """State that lookup answers depend on."""
        return self.moves.state, self.is_usable


class TierHealth:
    """Breakers of one secondary tier, per direction.

    Args:
        breaker: options for failed moves and for unanswered lookups.
        shortage: options for moves that could not be tried.
    """

    def __init__(self, breaker: BreakerOptions, shortage: BreakerOptions) -> None:
        self._directions = {
            direction: _DirectionHealth(Breaker(breaker), Breaker(shortage), Breaker(breaker))
            for direction in Direction
        }
        self.can_promote = True
        """True if promotions are usable and not probing."""
        self.degraded: frozenset[Direction] = frozenset()
        """Directions for which a successful move changes the state."""
        self.next_change_s = math.inf
        """Time of the next change by `tick`."""
        self.revision = 0
        """Number of changes to the state of promotions."""

    def state(self, direction: Direction) -> BreakerState:
        health = self._directions[direction]
        moves, lookups = health.moves.state, health.lookups.state
        return moves if lookups is BreakerState.CLOSED or moves is BreakerState.OPEN else lookups

    def allows(self, direction: Direction, num_live: int) -> bool:
        """True if one more move may start. `num_live`: moves in flight that have not timed out; a probe is a single
        move."""
        health = self._directions[direction]
        return health.is_usable and not (health.moves.state is BreakerState.PROBING and num_live)

    def allows_lookup(self, num_open: int) -> bool:
        """True if one more lookup may be sent. `num_open`: unanswered lookups; a probe is a single lookup. A lookup
        probe does not block moves."""
        lookups = self._directions[Direction.PROMOTE].lookups
        return lookups.allows and not (lookups.state is BreakerState.PROBING and num_open)

    def is_backing_off(self, direction: Direction) -> bool:
        """True during the backoff after a shortage."""
        return not self._directions[direction].shortage.allows

    def tick(self, now_s: float) -> None:
        """Start to probe where a backoff is over."""
        if now_s < self.next_change_s:
            return
        for direction, health in self._directions.items():
            before = health.answer_state
            health.moves.tick(now_s)
            health.shortage.tick(now_s)
            health.lookups.tick(now_s)
            self._update(direction, before)

    def on_move(self, direction: Direction, failure: Failure | None, now_s: float) -> None:
        """Record the end of a move that has not timed out."""
        health = self._directions[direction]
        before = health.answer_state
        if failure is not None and failure.reason is FailureReason.BUSY:
            health.shortage.fail(now_s)
        else:
            health.shortage.succeed()
        if failure is None:
            health.moves.succeed()
        elif failure.reason in _TIER_FAULTS:
            health.moves.fail(now_s)
        self._update(direction, before)

    def on_timeout(self, direction: Direction, now_s: float) -> None:
        """Record that a move timed out. Do not report the later end of this move."""
        before = self._directions[direction].answer_state
        self._directions[direction].moves.fail(now_s)
        self._update(direction, before)

    def on_lookup_answered(self) -> None:
        """Record a lookup that was answered in time."""
        before = self._directions[Direction.PROMOTE].answer_state
        self._directions[Direction.PROMOTE].lookups.succeed()
        self._update(Direction.PROMOTE, before)

    def on_lookup_timeout(self, now_s: float) -> None:
        """Record a lookup that was not answered in time, or could not be sent."""
        before = self._directions[Direction.PROMOTE].answer_state
        self._directions[Direction.PROMOTE].lookups.fail(now_s)
        self._update(Direction.PROMOTE, before)

    def take_openings(self) -> dict[Direction, int]:
        """Openings of the breakers of moves and lookups since the last call, for directions that had any. Backoffs
        after shortages do not count."""
        openings: dict[Direction, int] = {}
        for direction, health in self._directions.items():
            openings[direction] = health.moves.num_openings + health.lookups.num_openings
            health.moves.num_openings = health.lookups.num_openings = 0
        return {direction: number for direction, number in openings.items() if number}

    def _update(self, direction: Direction, before: tuple[BreakerState, bool]) -> None:
        directions = self._directions
        self.degraded = frozenset(each for each, health in directions.items() if not health.is_healthy)
        self.next_change_s = min(breaker.backoff_ends_s for health in directions.values() for breaker in health)
        if direction is Direction.PROMOTE and (answer_state := directions[direction].answer_state) != before:
            self.revision += 1
            self.can_promote = answer_state == (BreakerState.CLOSED, True)
