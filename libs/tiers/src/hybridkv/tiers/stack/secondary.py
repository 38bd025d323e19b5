"""One slower tier of a stack: what is on its way to it and from it, who is asked, and what waits for its way down.

It owns its breakers, its deadline, its quotas of traffic, its queue and its counts, so a tier that is slow, full or
dead costs the others nothing. What follows for those who wait, and which tier is asked for what, is the stack's.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridkv.tiers.contract import Failure, FailureReason, Heard, Key, Refusal, Slot, TierIndex
from hybridkv.tiers.stack.cascade_queue import Cascades, Gate
from hybridkv.tiers.stack.health import BreakerState, Ways
from hybridkv.tiers.stack.in_flight import Moving, Planned, Traffic
from hybridkv.tiers.stack.moves import Direction, MoveCounts, MoveOutcome, MoveResult, MoveTally
from hybridkv.tiers.stack.options import CascadePolicy, SlowerTierOptions
from hybridkv.tiers.stack.order import UseOrder
from hybridkv.tiers.stack.path import PathPosition

_PROMOTE, _DONE, _FAILED = Direction.PROMOTE, MoveResult.DONE, MoveResult.FAILED
_KEEPS_KEY = (FailureReason.BUSY, FailureReason.CLOSED)
"""Failures that say nothing about the chunk itself."""


@dataclass(frozen=True, slots=True)
class SlowerTier:
    """One tier below the fast one, as it is given to a stack.

    Args:
        name: what moves and counts call it. No other of the stack has it.
        index: decides what it keeps.
        options: its bounds.
    """

    name: str
    index: TierIndex
    options: SlowerTierOptions = field(default_factory=SlowerTierOptions)


@dataclass(slots=True)
class Common:
    """What the levels of one stack share.

    Args:
        near: index of the fast tier.
        clock: seconds.
        planned: moves to be handed out.
    """

    near: TierIndex
    clock: Callable[[], float]
    planned: Planned
    due_s: float = math.inf
    """Nothing that waits changes before."""

    def wake(self, due_s: float) -> None:
        """Something changes then."""
        self.due_s = min(self.due_s, due_s)


class _Question(NamedTuple):
    deadline_s: float
    before: Heard
    """What the tier had heard when it was asked."""


class Level:
    """One slower tier, at work.

    Args:
        tier: what was given to the stack.
        position: among its slower tiers, the nearest is 0.
        num_levels: how many there are.
        common: what they share.
    """

    def __init__(self, tier: SlowerTier, position: int, num_levels: int, common: Common) -> None:
        self.name, self.index, self._options = tier.name, tier.index, tier.options
        self._common, self._near, self._clock = common, common.near, common.clock
        self.ways = Ways(tier.options.breaker, tier.options.shortage)
        self.traffic = Traffic(tier.name, itertools.count(position + num_levels, num_levels), common.planned)
        self.late_changes = 0
        """How often a late promotion began to hide its chunk, or gave it back."""
        self._counts = MoveTally()
        self._questions: deque[_Question] = deque()
        """Of which nothing has come yet, the oldest first."""
        self._promoting_bytes = tier.options.promoting_share * common.near.capacity_bytes
        self._noticed_s = common.clock()
        """When a deadline was looked for last without `tick`."""
        self.cascades: Cascades | None = None
        self.is_eager = tier.options.cascades is CascadePolicy.ALL
        """Whether it is given what is used for the first time."""
        if tier.options.cascades is not CascadePolicy.NOTHING:
            order = UseOrder(common.near, tier.index)
            self.cascades = Cascades(order, self.traffic, tier.options, self._plan_cascade, position)

    @property
    def load_timeout_s(self) -> float:
        """How long somebody waits for it."""
        return self._options.load_timeout_s

    @property
    def ask_timeout_s(self) -> float:
        """How long it may think about what it was asked: no longer than somebody waits for it."""
        return min(self._options.ask_timeout_s, self._options.load_timeout_s)

    def is_asked(self) -> bool:
        """Whether it may be asked for anything now: one promotion at a time is its probe, and what all tiers together
        never answered takes up no more of the fast tier than one may bring at one time. Beyond that only those are
        asked of which nothing is late: the trouble is not theirs."""
        traffic, ways = self.traffic, self.ways
        if traffic.late_bytes and self._common.planned.late_bytes > self._promoting_bytes:
            return False
        return ways.is_up or ways.allows(_PROMOTE, traffic.num_in_time[_PROMOTE])

    # The way up.

    def may_ask(self) -> bool:
        """Whether it is of any use to ask it for what it has not told, and it may be."""
        if not self.index.answers_late or not self.is_asked():
            return False
        if self._questions and not self.ways.may_ask(len(self._questions)):
            self._hear_answers(self._clock())  # the probe may be over, long before its deadline
        return self.ways.may_ask(len(self._questions))

    def ask(self, keys: Sequence[Key], now_s: float) -> None:
        """Let it find out about these. A tier that cannot even be asked is as one that does not answer."""
        if not keys:
            return
        index, deadline_s = self.index, now_s + self.ask_timeout_s
        try:
            before = index.heard
            index.ask(keys, deadline_s)
        except Exception:  # whatever is elsewhere, the engine goes on without it
            self.ways.unanswered(now_s)
            self._common.wake(self.ways.next_end_s)
            return
        self._questions.append(_Question(deadline_s, before))
        self._common.wake(deadline_s)

    def _hear_answers(self, now_s: float) -> None:
        """What became of questions. An answer to one is an answer to all that were asked before it came, since the tier
        answers; where nothing is left of one to be answered, it says nothing."""
        questions = self._questions
        while questions:
            (deadline_s, before), heard = questions[0], self.index.heard
            if heard.in_time > before.in_time:
                self.ways.answered()
            elif now_s < deadline_s:
                break
            elif heard.not_in_time > before.not_in_time:
                self.ways.unanswered(now_s)
            questions.popleft()

    def why_not_promote(self, num_bytes: int) -> Refusal | None:
        """Why so much cannot come from here now."""
        return self._why_not(num_bytes, self.traffic.bytes_moving[_PROMOTE] - self.traffic.prefetching_bytes)

    def why_not_prefetch(self, num_bytes: int) -> Refusal | None:
        """Why so much that nobody waits for cannot come from here now, 0 where that is not known. What somebody waits
        for goes first, and no trouble of the tier is tried with it (CLOSED)."""
        traffic = self.traffic
        if not self.ways.is_up:
            return Refusal.CLOSED
        if traffic.num_in_time[_PROMOTE] > traffic.num_prefetching:
            return Refusal.BUSY
        if traffic.num_prefetching >= self._options.max_prefetching:
            return Refusal.BUSY
        return self._why_not(num_bytes, traffic.bytes_moving[_PROMOTE])

    def _why_not(self, num_bytes: int, moving: int) -> Refusal | None:
        if num_bytes > self._near.capacity_bytes:
            return Refusal.TOO_LARGE
        if self.ways.rests(_PROMOTE):
            return Refusal.BUSY
        # Alone it goes whatever its size, and whatever other tiers never answered.
        if moving and moving + self._common.planned.late_bytes + num_bytes > self._promoting_bytes:
            return Refusal.BUSY
        return None

    def plan(self, direction: Direction, key: Key, near: Slot, far: Slot, is_prefetch: bool = False) -> None:
        """A move between the places that were given to it."""
        now_s = self._clock()
        self.traffic.plan(direction, key, near, far, now_s, is_prefetch)
        self._common.wake(now_s + self._options.load_timeout_s)

    # The way down.

    def _plan_cascade(self, key: Key, near: Slot, far: Slot) -> None:
        self.plan(Direction.CASCADE, key, near, far)

    def cascade(self, key: Key, on_path: PathPosition, *, is_met: bool) -> None:
        """Copy a chunk here when its turn comes, if this tier is given such and lacks it."""
        cascades = self.cascades
        if cascades is not None and (is_met or self.is_eager):
            if cascades.is_full and cascades.has_news:
                self.pump()
            dropped = cascades.add(key, on_path, self._clock())
            if dropped is not None:
                self._drop(dropped)

    @property
    def num_waiting(self) -> int:
        """Chunks that wait for their way down."""
        return 0 if self.cascades is None else self.cascades.num_waiting

    def clear(self) -> None:
        """Forget what waits."""
        if self.cascades is not None:
            self.cascades.clear()

    def touch(self, keys: Sequence[Key]) -> None:
        """Make keys the most recently used here; once more when what is to come by now has come."""
        if self.cascades is not None:
            self.cascades.touch(keys)
        else:
            self.index.touch(keys)

    @property
    def has_news(self) -> bool:
        """Whether something was added since the last `pump`, and may go."""
        return self.cascades is not None and self.cascades.has_news

    def pump(self) -> None:
        """Send what may go now."""
        cascades = self.cascades
        if cascades is not None and cascades.has_something:
            for dropped in cascades.pump(self._gate, self._clock()):
                self._drop(dropped)
            if cascades.num_waiting:
                self._common.wake(cascades.since_s + self._options.load_timeout_s)

    def _gate(self) -> Gate:
        """Whether one more chunk may be written here now."""
        state = self.ways.state(Direction.CASCADE)
        if state is BreakerState.OPEN:
            return Gate.SHUT
        if self.ways.rests(Direction.CASCADE):
            return Gate.BUSY
        if state is BreakerState.PROBING:
            return Gate.BUSY if self.traffic.num_in_time[Direction.CASCADE] else Gate.PROBE
        return Gate.OPEN

    def _drop(self, dropped: MoveResult) -> None:
        self._counts.moved(Direction.CASCADE, dropped)

    # What came of it.

    def report(self, move_id: int, outcome: MoveOutcome) -> Moving | None:
        """Ranks are done with a move. The move when they were the last ones, and its tier has heard of it."""
        moving = self.traffic.report(move_id, outcome)
        if moving is None:
            return None
        move, failure, ways = moving.move, moving.failure, self.ways
        direction = move.direction
        # What is late was counted as a failure when it became so.
        if (failure is not None or direction in ways.troubled) and not moving.is_late:
            ways.ended(direction, failure, self._clock())
            self._common.wake(ways.next_end_s)
        if direction is _PROMOTE:
            self.late_changes += moving.is_late
            self.index.unpin(move.key)
            if failure is not None and failure.reason not in _KEEPS_KEY:
                self.index.invalidate(move.key, failure.reason)
        elif self._end_cascade(move.key, failure):
            return moving
        self._counts.moved(direction, _DONE if failure is None else _FAILED, moving.num_bytes, failure)
        if failure is not None and direction is not _PROMOTE:
            self.pump()
        return moving

    def _end_cascade(self, key: Key, failure: Failure | None) -> bool:
        """Whether it is made again."""
        assert self.cascades is not None
        near = self._near
        if failure is None:
            self.index.commit(key)
        else:
            self.index.abort(key)
            if failure.reason is FailureReason.CHECKSUM:
                # What was read for the copy is not what was sealed: the fast tier's bytes are bad.
                near.invalidate(key, failure.reason)
        near.unpin(key)
        return self.cascades.on_ended(key, failure, self._clock())

    # Time.

    def notice(self, now_s: float) -> list[Key]:
        """Let what is late be so though nobody calls `tick`. Promotions that became late.

        What somebody asks for says less than a step about what he could hear of meanwhile, so the tier is blamed a
        whole time limit after a move was first found late.
        """
        if now_s - self._noticed_s < self._options.load_timeout_s:
            return []
        late = self.blame_before(self._noticed_s, now_s)
        self._noticed_s = now_s
        return late

    def blame_before(self, heard_s: float, now_s: float) -> list[Key]:
        """The tier is to blame for what was late at a time when the caller might have heard of its end. Promotions that
        became late."""
        late: list[Key] = []
        before_s = heard_s - self._options.load_timeout_s
        for moving in self.traffic.give_up(before_s):
            self.ways.late(moving.move.direction, now_s)
            if moving.move.direction is _PROMOTE:
                self.late_changes += 1
                late.append(moving.move.key)
            elif self.cascades is not None:
                self.cascades.on_late(moving.move.key)
        if self.cascades is not None and self.cascades.num_waiting:
            for dropped in self.cascades.give_up(before_s):
                self._drop(dropped)
        return late

    def pass_time(self, now_s: float) -> float:
        """Begin to probe where a pause is over. When something changes here next."""
        if self._questions:
            self._hear_answers(now_s)
        self.ways.tick(now_s)
        began_s = self.traffic.oldest_in_time_s()
        if self.cascades is not None and self.cascades.num_waiting:
            began_s = min(began_s, self.cascades.since_s)
        asked_s = self._questions[0].deadline_s if self._questions else math.inf
        return min(max(began_s, self._noticed_s) + self._options.load_timeout_s, self.ways.next_end_s, asked_s)

    def keeps_awake(self) -> bool:
        """Whether a move may still end in time, or is to be made soon."""
        if self.traffic.has_some_in_time():
            return True
        return self.num_waiting > 0 and self.cascades is not None and self.cascades.keeps_awake(self._clock())

    def take_counts(self) -> MoveCounts:
        """What happened since the last call."""
        counts, self._counts = self._counts, MoveTally()
        return counts.as_counts(self.ways.take_openings())
