"""When what waits in a stack is late: for those who wait, and for the tier that they wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybridkv.tiers.contract import Key
from hybridkv.tiers.stack.hold import Holds
from hybridkv.tiers.stack.level import Common, Level

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
