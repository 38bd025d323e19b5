"""LRU refresh: touches long chains in all tiers, some keys in each engine step.

A touch takes 0.1 to 0.2 microseconds, so touching 50,000 keys at once would delay a step. Until then a chunk keeps its
place in the LRU order, as it does while its request runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from hybridkv.connectors.vllm.common.requests import PrefixChain
from hybridkv.tiers.stack import TierStack

STEP_KEYS: Final = 4096
"""Keys touched in one step."""
STEP_SHARE: Final = 16
"""One step touches at least 1/STEP_SHARE of all waiting keys, so that the queue cannot grow without limit."""


@dataclass(slots=True, eq=False)
class _Refresh:
    path: PrefixChain
    keys: list[bytes]
    num_touched: int = 0


class RefreshQueue:
    """Queue of the chains of one connector that wait for a refresh.

    Args:
        stack: the tiers.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._waiting: deque[_Refresh] = deque()
        self._num_waiting = 0

    def refresh(self, path: PrefixChain, keys: list[bytes]) -> None:
        """Refreshes a chain: at once if it has at most `STEP_KEYS` keys, else over the next steps.

        `keys` are in eviction order. The keys of an earlier call for the same chain that still wait are dropped.
        """
        for waiting in self._waiting:
            if waiting.path is path:
                self._num_waiting -= len(waiting.keys) - waiting.num_touched
                self._waiting.remove(waiting)
                break
        if len(keys) <= STEP_KEYS:
            self._stack.touch(keys)
            return
        self._waiting.append(_Refresh(path, keys))
        self._num_waiting += len(keys)

    def advance(self) -> None:
        """Touches the keys of one step."""
        if self._waiting:
            self._touch_some(max(STEP_KEYS, self._num_waiting // STEP_SHARE))

    def finish(self) -> None:
        """Touches all waiting keys."""
        self._touch_some(self._num_waiting)

    def clear(self) -> None:
        """Drops all waiting keys; called when the tiers were cleared."""
        self._waiting.clear()
        self._num_waiting = 0

    def _touch_some(self, num_keys: int) -> None:
        while self._waiting and num_keys > 0:
            first = self._waiting[0]
            keys = first.keys[first.num_touched : first.num_touched + num_keys]
            first.num_touched += len(keys)
            if first.num_touched == len(first.keys):
                self._waiting.popleft()
            num_keys -= len(keys)
            self._num_waiting -= len(keys)
            self._stack.touch(keys)
