"""Health of one secondary tier: circuit breakers for the moves of each direction, and for lookups. Reads no clock."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import msgspec

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.stack.moves import Direction

LONG_SHORTAGE_S = 1.0
"""Nobody is asked to wait for the end of a rest that lasts longer."""
_BLAMED = (FailureReason.IO, FailureReason.CLOSED)
"""What speaks against the tier, and not only against one chunk."""


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


class _Way(NamedTuple):
    breaker: Breaker
    rest: Breaker
    """Open while nothing is tried for want of files, memory or threads."""
    questions: Breaker
    """Of the way up alone: open while nobody is asked what it holds."""

    @property
    def is_usable(self) -> bool:
        is_short_for_long = not self.rest.allows and self.rest.pause_s >= LONG_SHORTAGE_S
        return self.breaker.allows and self.questions.allows and not is_short_for_long

    @property
    def is_untroubled(self) -> bool:
        """Whether a success says nothing new."""
        return self.breaker.is_untroubled and self.rest.is_untroubled

    @property
    def look(self) -> tuple[BreakerState, bool]:
        """What an answer depends on."""
        return self.breaker.state, self.is_usable


class Ways:
    """Both ways between a fast tier and a slow one.

    Args:
        breaker: when to leave a way alone whose moves fail, or whose questions are not answered.
        shortage: the same for moves that cannot be tried.
    """

    def __init__(self, breaker: BreakerOptions, shortage: BreakerOptions) -> None:
        self._ways = {direction: _Way(Breaker(breaker), Breaker(shortage), Breaker(breaker)) for direction in Direction}
        self.is_up = True
        """Nothing speaks against asking for more: the way up is neither left alone nor tried."""
        self.troubled: frozenset[Direction] = frozenset()
        """Ways of which the end of a move says something new though it is none of a failure."""
        self.next_end_s = math.inf
        """When `tick` changes something."""
        self.revision = 0
        """Changes with what may be asked for: the way up."""

    def state(self, direction: Direction) -> BreakerState:
        way = self._ways[direction]
        moves, questions = way.breaker.state, way.questions.state
        return moves if questions is BreakerState.CLOSED or moves is BreakerState.OPEN else questions

    def allows(self, direction: Direction, num_moving: int) -> bool:
        """Whether one more move may go this way. `num_moving`: of those that are not late; one at a time is a probe."""
        way = self._ways[direction]
        return way.is_usable and not (way.breaker.state is BreakerState.PROBING and num_moving)

    def may_ask(self, num_open: int) -> bool:
        """Whether one more question may be asked where so many are open; one at a time is a probe. No such probe holds
        up moves."""
        questions = self._ways[Direction.PROMOTE].questions
        return questions.allows and not (questions.state is BreakerState.PROBING and num_open)

    def rests(self, direction: Direction) -> bool:
        """Whether to try nothing for a moment."""
        return not self._ways[direction].rest.allows

    def tick(self, now_s: float) -> None:
        """Begin to probe where a pause is over."""
        if now_s < self.next_end_s:
            return
        for direction, way in self._ways.items():
            before = way.look
            way.breaker.tick(now_s)
            way.rest.tick(now_s)
            way.questions.tick(now_s)
            self._note(direction, before)

    def ended(self, direction: Direction, failure: Failure | None, now_s: float) -> None:
        """A move that was not late has ended."""
        way = self._ways[direction]
        before = way.look
        if failure is not None and failure.reason is FailureReason.BUSY:
            way.rest.fail(now_s)
        else:
            way.rest.succeed()
        if failure is None:
            way.breaker.succeed()
        elif failure.reason in _BLAMED:
            way.breaker.fail(now_s)
        self._note(direction, before)

    def late(self, direction: Direction, now_s: float) -> None:
        """A move has become late. How it ends is of no interest any more."""
        before = self._ways[direction].look
        self._ways[direction].breaker.fail(now_s)
        self._note(direction, before)

    def answered(self) -> None:
        """A question had an answer in time."""
        before = self._ways[Direction.PROMOTE].look
        self._ways[Direction.PROMOTE].questions.succeed()
        self._note(Direction.PROMOTE, before)

    def unanswered(self, now_s: float) -> None:
        """A question had none, or could not even be asked."""
        before = self._ways[Direction.PROMOTE].look
        self._ways[Direction.PROMOTE].questions.fail(now_s)
        self._note(Direction.PROMOTE, before)

    def take_openings(self) -> dict[Direction, int]:
        """How often each breaker opened since the last call, where it did."""
        openings: dict[Direction, int] = {}
        for direction, way in self._ways.items():
            openings[direction] = way.breaker.num_openings + way.questions.num_openings
            way.breaker.num_openings = way.questions.num_openings = 0
        return {direction: number for direction, number in openings.items() if number}

    def _note(self, direction: Direction, before: tuple[BreakerState, bool]) -> None:
        ways = self._ways
        self.troubled = frozenset(each for each, way in ways.items() if not way.is_untroubled)
        self.next_end_s = min(part.pause_ends_s for way in ways.values() for part in way)
        if direction is Direction.PROMOTE and (look := ways[direction].look) != before:
            self.revision += 1
            self.is_up = look == (BreakerState.CLOSED, True)
