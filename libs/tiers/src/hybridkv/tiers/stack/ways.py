"""Which way one slower tier may be used now: a breaker for each, since a disk that takes nothing may still give.

A full or read-only file system fails every store and serves every load; that a store failed or came too late keeps no
load away, nor the other way round. Questions are of the way up and have a breaker of their own beside it: a tier that
answers at once and fails every load, and one that does the opposite, are both of no use, and neither success excuses
the other failure. Where nothing could be tried, because this process lacks what it takes or more than enough is queued,
the tier is not to blame: it rests for moments, so that nobody tries again in every step. Moves nothing and reads no
clock of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hybridkv.tiers.contract import Failure, FailureReason
from hybridkv.tiers.stack.breaker import Breaker, BreakerOptions, BreakerState
from hybridkv.tiers.stack.moves import Direction

LONG_SHORTAGE_S = 1.0
"""Nobody is asked to wait for the end of a rest that lasts longer."""
_BLAMED = (FailureReason.IO, FailureReason.CLOSED)
"""What speaks against the tier, and not only against one chunk."""


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
