"""Stops asking a tier that does not answer, and tries again later. Knows no tier and reads no clock of its own."""

from __future__ import annotations

import enum
import math

import msgspec

from hybridkv.tiers.errors import TierConfigurationError


class BreakerState(enum.StrEnum):
    CLOSED = "closed"
    """The tier is used."""
    OPEN = "open"
    """It is left alone."""
    PROBING = "probing"
    """It is tried: the next success closes the breaker, the next failure opens it again, for longer."""


class BreakerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """When a breaker opens, and for how long.

    Args:
        failures: in a row, that open it; at least 1.
        first_pause_s: how long it then stays open; each failed probe doubles that.
        longest_pause_s: but never beyond this.
    """

    failures: int = 3
    first_pause_s: float = 5.0
    longest_pause_s: float = 120.0

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise TierConfigurationError("failures", "a number >= 1", self.failures)
        if not 0 < self.first_pause_s <= self.longest_pause_s:
            raise TierConfigurationError(
                "first_pause_s", f"seconds above 0 and at most {self.longest_pause_s}", self.first_pause_s
            )


class Breaker:
    """A circuit breaker. Every call says what time it is, in seconds of any clock that does not go back."""

    def __init__(self, options: BreakerOptions | None = None) -> None:
        self._options = options or BreakerOptions()
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = self._options.first_pause_s
        self._opened_at_s = 0.0
        self.num_openings = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def allows(self) -> bool:
        return self._state is not BreakerState.OPEN

    @property
    def is_untroubled(self) -> bool:
        """Whether a success says nothing new."""
        return self._state is BreakerState.CLOSED and not self._failures

    @property
    def pause_s(self) -> float:
        """How long it stays open, or the next time will."""
        return self._pause_s

    @property
    def pause_ends_s(self) -> float:
        """When `tick` changes something; never (infinity) unless it is open."""
        return self._opened_at_s + self._pause_s if self._state is BreakerState.OPEN else math.inf

    def tick(self, now_s: float) -> None:
        """Begin to probe when the pause is over."""
        if now_s >= self.pause_ends_s:
            self._state = BreakerState.PROBING

    def succeed(self) -> None:
        """The tier answered in time. What was asked before the breaker opened says nothing about now."""
        if self._state is BreakerState.OPEN:
            return
        self._failures = 0
        if self._state is BreakerState.PROBING:
            self._state = BreakerState.CLOSED
            self._pause_s = self._options.first_pause_s

    def fail(self, now_s: float) -> None:
        """The tier did not answer, or not in time."""
        if self._state is BreakerState.OPEN:
            return
        self._failures += 1
        if self._state is BreakerState.PROBING:
            self._pause_s = min(2 * self._pause_s, self._options.longest_pause_s)
        elif self._failures < self._options.failures:
            return
        self._state = BreakerState.OPEN
        self._failures = 0
        self._opened_at_s = now_s
        self.num_openings += 1
