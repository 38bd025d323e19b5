"""Makes long paths recent in all tiers, a part in each step of the engine.

To touch a chunk costs a tenth of a microsecond or two: a path of fifty thousand, all at once, is a step in which
nobody decodes. Until its turn comes a chunk is as recent as it was, which is where it stands while its request runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from hybridkv.connectors.vllm.common.requests import StoredPath
from hybridkv.tiers.stack import TierStack

STEP_KEYS: Final = 4096
"""Chunks that are touched in one step."""
STEP_SHARE: Final = 16
"""Of all that wait, the part that is touched in one step where that is more: what waits must not grow without end."""


@dataclass(slots=True, eq=False)
class _Renewal:
    path: StoredPath
    keys: list[bytes]
    num_touched: int = 0


class Renewals:
    """Of the paths of one connector.

    Args:
        stack: the tiers.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self._waiting: deque[_Renewal] = deque()
        self._num_waiting = 0

    def renew(self, path: StoredPath, keys: list[bytes]) -> None:
        """Make a path recent, given its keys in the order in which they may go: at once where it is short. What an
        earlier call left of the same path is done with."""
        for waiting in self._waiting:
            if waiting.path is path:
                self._num_waiting -= len(waiting.keys) - waiting.num_touched
                self._waiting.remove(waiting)
                break
        if len(keys) <= STEP_KEYS:
            self._stack.touch(keys)
            return
        self._waiting.append(_Renewal(path, keys))
        self._num_waiting += len(keys)

    def advance(self) -> None:
        """A step's part."""
        if self._waiting:
            self._touch_some(max(STEP_KEYS, self._num_waiting // STEP_SHARE))

    def finish(self) -> None:
        """All that is left."""
        self._touch_some(self._num_waiting)

    def forget(self) -> None:
        """Nothing that was stored is there any more."""
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
