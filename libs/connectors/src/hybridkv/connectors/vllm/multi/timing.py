"""How long the workers spend in loads within a step, child by child. Loads in the background are timed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class SyncLoadTimer:
    """Times calls of those children that load within the present step.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timed: frozenset[int] = frozenset()
        self._seconds: dict[int, float] = {}

    def begin(self, children: frozenset[int]) -> None:
        """A step begins in which these children load."""
        self._timed = children

    def run(self, child: int, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Calls a child."""
        if child not in self._timed:
            call(*args, **options)
            return
        begun_at_s = self._clock()
        call(*args, **options)
        self._seconds[child] = self._seconds.get(child, 0.0) + self._clock() - begun_at_s

    def take(self) -> dict[int, float]:
        """Seconds by child since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
