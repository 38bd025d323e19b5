"""What the store was found to hold, an answer at a time: believed for a while, and forgotten as it came."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from operator import attrgetter

from hybridkv.tiers.contract import Key
from hybridkv.tiers.object.known import PackPlace

_NUM_BYTES = attrgetter("num_bytes")


class HeardPlaces:
    """Chunks that others stored, and nobody here reads now.

    Args:
        believed_s: for so long.
    """

    def __init__(self, believed_s: float) -> None:
        self._believed_s = believed_s
        self.by_key: dict[Key, PackPlace] = {}
        self.num_bytes = 0
        """Of all of them."""
        self._answers: deque[tuple[float, tuple[Key, ...]]] = deque()
        """Until when each is believed, the earliest first, and what it told."""
        self.due_s = math.inf
        """Nothing is forgotten before."""

    def learn(self, places: Mapping[Key, PackPlace], now_s: float) -> None:
        """None of these is there."""
        self.by_key.update(places)
        self.num_bytes += sum(map(_NUM_BYTES, places.values()))
        self._answers.append((now_s + self._believed_s, tuple(places)))
        self.due_s = self._answers[0][0]

    def pop(self, key: Key) -> PackPlace | None:
        """It is somebody else's to know, or is not believed any more."""
        place = self.by_key.pop(key, None)
        if place is not None:
            self.num_bytes -= place.num_bytes
        return place

    def pass_time(self, now_s: float) -> list[Key]:
        """What is not believed any more."""
        over: list[Key] = []
        while self._answers and self._answers[0][0] <= now_s:
            over += self.forget_oldest()
        return over

    def forget_oldest(self) -> list[Key]:
        """What the oldest answer told, and is there still."""
        _, keys = self._answers.popleft()
        self.due_s = self._answers[0][0] if self._answers else math.inf
        return self._drop(keys)

    def _drop(self, keys: Iterable[Key]) -> list[Key]:
        by_key = self.by_key
        gone = [key for key in keys if key in by_key]
        self.num_bytes -= sum(map(_NUM_BYTES, map(by_key.pop, gone)))
        return gone

    def clear(self) -> int:
        """Forget all. How many there were."""
        number = len(self.by_key)
        self.by_key, self.num_bytes = {}, 0
        self._answers.clear()
        self.due_s = math.inf
        return number
