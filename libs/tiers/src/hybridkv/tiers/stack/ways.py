"""Which way the slow tier may be used now: a breaker for each, since a disk that takes nothing may still give.

A full or read-only file system fails every store and serves every load; that a store failed or came too late keeps no
load away, nor the other way round. Moves nothing and reads no clock of its own.
"""

from __future__ import annotations

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.stack.breaker import Breaker, BreakerOptions, BreakerState
from hybridkv.tiers.stack.moves import Direction

_BLAMED = (FailureReason.IO, FailureReason.CLOSED)
"""What speaks against the tier, and not only against one chunk."""


class Ways:
    """Both ways between a fast tier and a slow one.

    Args:
        options: when to leave a way alone.
    """

    def __init__(self, options: BreakerOptions) -> None:
        self._breakers = {direction: Breaker(options) for direction in Direction}
        self.revision = 0
        """Changes with what may be asked for: the way up."""

    def state(self, direction: Direction) -> BreakerState:
        return self._breakers[direction].state

    def allows(self, direction: Direction, num_moving: int) -> bool:
        """Whether one more move may go this way. `num_moving`: of those that are not late; one at a time is a probe."""
        breaker = self._breakers[direction]
        return breaker.allows and not (breaker.state is BreakerState.PROBING and num_moving)

    def tick(self, now_s: float) -> None:
        """Begin to probe where a pause is over."""
        for direction, breaker in self._breakers.items():
            before = breaker.state
            breaker.tick(now_s)
            self._note(direction, before)

    def ended(self, direction: Direction, failure: Failure | None, now_s: float) -> None:
        """A move that was not late has ended."""
        breaker = self._breakers[direction]
        before = breaker.state
        if failure is None:
            breaker.succeed()
        elif failure.reason in _BLAMED:
            breaker.fail(now_s)
        self._note(direction, before)

    def late(self, direction: Direction, now_s: float) -> None:
        """A move has become late. How it ends is of no interest any more."""
        before = self._breakers[direction].state
        self._breakers[direction].fail(now_s)
        self._note(direction, before)

    def take_openings(self) -> dict[Direction, int]:
        """How often each breaker opened since the last call, where it did."""
        openings = {direction: breaker.num_openings for direction, breaker in self._breakers.items()}
        for breaker in self._breakers.values():
            breaker.num_openings = 0
        return {direction: number for direction, number in openings.items() if number}

    def _note(self, direction: Direction, before: BreakerState) -> None:
        if direction is Direction.PROMOTE and self._breakers[direction].state is not before:
            self.revision += 1
