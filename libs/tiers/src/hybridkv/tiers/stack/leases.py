"""A request's hold on chunks: all of them stay in the fast tier, or come there, until it is released."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence

import msgspec

from hybridkv.tiers.contract import Key, TierIndex
from hybridkv.tiers.stack.secondary import Common, Level


class HoldFailure(enum.StrEnum):
    """Why a hold came to nothing."""

    TIMEOUT = "timeout"
    """A slower tier took longer than allowed."""
    LOST = "lost"
    """A chunk could not be promoted, or was withdrawn."""


class Hold(msgspec.Struct):
    """Made by `TierStack.acquire`, ended by `TierStack.release`."""

    owner: str
    since_s: float
    pinned: list[Key] = []
    """In the fast tier, protected."""
    waiting: set[Key] = set()
    """On their way there."""
    source: str = ""
    """The slowest tier that brings what it waits for, whoever had it promoted; the nearest where it waits for nothing,
    or only for what is being stored."""
    failure: HoldFailure | None = None
    """Once set, the hold protects nothing."""

    @property
    def is_ready(self) -> bool:
        return not self.waiting and self.failure is None


class Holds:
    """All holds on one fast tier.

    Args:
        near: its index.
        timeout_s: how long one may wait.
    """

    def __init__(self, near: TierIndex, timeout_s: float) -> None:
        self._near = near
        self.timeout_s = timeout_s
        self.by_owner: dict[str, Hold] = {}
        self._timeouts = 0

    def release(self, owner: str) -> None:
        """Give up a hold."""
        hold = self.by_owner.pop(owner, None)
        if hold is not None:
            self.unpin(hold)

    def unpin(self, hold: Hold) -> None:
        """Protect nothing for it any more."""
        self._near.unpin_all(reversed(hold.pinned))
        hold.pinned.clear()
        hold.waiting.clear()

    def _fail(self, hold: Hold, failure: HoldFailure) -> None:
        self.unpin(hold)
        hold.failure = failure

    def hand_out(self, key: Key) -> None:
        """A key that was on its way into the fast tier has come."""
        for hold in self.by_owner.values():
            if key in hold.waiting:
                hold.waiting.discard(key)
                self._near.pin(key)
                hold.pinned.append(key)

    def lose(self, key: Key) -> None:
        """It never will come."""
        for hold in self.by_owner.values():
            if key in hold.waiting:
                self._fail(hold, HoldFailure.LOST)

    def lose_all(self) -> None:
        """Nothing is what it was."""
        for hold in self.by_owner.values():
            self._fail(hold, HoldFailure.LOST)

    def stop_waiting(self, keys: Iterable[Key]) -> None:
        """Whoever waits for one of these waits no longer."""
        for key in keys:
            late = [hold for hold in self.by_owner.values() if key in hold.waiting]
            for hold in late:
                self._fail(hold, HoldFailure.TIMEOUT)
            self._timeouts += len(late)

    def pass_time(self, now_s: float) -> float:
        """Let what has waited too long fail. When the next one will."""
        limit_s, due_s = self.timeout_s, math.inf
        for hold in self.by_owner.values():
            if hold.waiting and now_s - hold.since_s >= limit_s:
                self._fail(hold, HoldFailure.TIMEOUT)
                self._timeouts += 1
            elif hold.waiting:
                due_s = min(due_s, hold.since_s + limit_s)
        return due_s

    def take_timeouts(self) -> int:
        """Holds that were given up because their time was over, since the last call."""
        timeouts, self._timeouts = self._timeouts, 0
        return timeouts


_NEVER_S = math.inf


class Deadlines:
    """All deadlines of one stack.

    Args:
        levels: its slower tiers.
        holds: those who wait.
        common: when something changes next.
    """

    def __init__(self, levels: Sequence[Level], holds: Holds, common: Common) -> None:
        self._levels = levels
        self._holds = holds
        self._common = common
        self._clock = common.clock
        self._ticked_s = common.clock()
        """When `tick` was called last."""

    def tick(self) -> None:
        """Let what has waited too long fail; call it once a step.

        A hold fails at its time. A slower tier is blamed one call later, when the caller had the chance to hear of it:
        between two calls it may have stood still itself, with the news of a move still to come.
        """
        now_s = self._clock()
        for level in self._levels:
            late = level.blame_before(self._ticked_s, now_s)
            if late:
                self._stop_waiting(level, late)
        self._ticked_s = now_s
        self._pass_time(now_s)

    def look_at_clock(self) -> None:
        """Deadlines hold though nobody calls `tick`. Where nothing waits this is one comparison."""
        due_s = self._common.due_s
        if due_s == _NEVER_S:
            return
        now_s = self._clock()
        if now_s < due_s:
            return
        for level in self._levels:
            self._stop_waiting(level, level.notice(now_s))
        self._pass_time(now_s)

    def _stop_waiting(self, level: Level, keys: Sequence[Key]) -> None:
        """Who waits for more than one tier does not wait longer for one of them than that may take."""
        if level.load_timeout_s < self._holds.timeout_s:
            self._holds.stop_waiting(keys)

    def _pass_time(self, now_s: float) -> None:
        due_s = _NEVER_S
        for level in self._levels:
            due_s = min(due_s, level.pass_time(now_s))
        self._common.due_s = min(due_s, self._holds.pass_time(now_s))
