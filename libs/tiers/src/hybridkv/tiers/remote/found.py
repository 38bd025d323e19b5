"""Places of chunks that were found elsewhere: kept an answer at a time, until a time, and forgotten the same way."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from hybridkv.tiers.contract import Key, Slot

_NUM_BYTES = attrgetter("num_bytes")


class RemotePlace(Protocol):
    """Where a chunk lies elsewhere. A value."""

    @property
    def num_bytes(self) -> int:
        """Of the chunk."""
        ...

    def slot(self, number: int) -> Slot:
        """The place for a medium. No other slot of the index begins at this number."""
        ...


P = TypeVar("P", bound=RemotePlace)


class FoundPlaces(Generic[P]):
    """Chunks that were found and are not read now."""

    def __init__(self) -> None:
        self.by_key: dict[Key, P] = {}
        self.num_bytes = 0
        """Of all of them."""
        self._answers: list[tuple[float, int, Mapping[Key, P]]] = []
        """A heap: until when each answer is believed, a number, and its places."""
        self._numbers = itertools.count()
        self.due_s = math.inf
        """`expire` has nothing to do before."""

    def add(self, places: Mapping[Key, P], until_s: float) -> None:
        """Places of one answer. None of its keys is known."""
        self.by_key.update(places)
        self.num_bytes += sum(map(_NUM_BYTES, places.values()))
        heapq.heappush(self._answers, (until_s, next(self._numbers), places))
        self.due_s = self._answers[0][0]

    def pop(self, key: Key) -> P:
        """Forget one key, which is known."""
        place = self.by_key.pop(key)
        self.num_bytes -= place.num_bytes
        return place

    def expire(self, now_s: float) -> dict[Key, P]:
        """Forget the answers that are not believed any more. Their places."""
        expired: dict[Key, P] = {}
        while self._answers and self._answers[0][0] <= now_s:
            expired |= self.forget_oldest()
        return expired

    def forget_oldest(self) -> dict[Key, P]:
        """Forget the answer that expires first. Those of its places that were still known."""
        _, _, places = heapq.heappop(self._answers)
        self.due_s = self._answers[0][0] if self._answers else math.inf
        by_key = self.by_key
        forgotten = {key: place for key, place in places.items() if by_key.get(key) is place}
        self.num_bytes -= sum(map(_NUM_BYTES, map(by_key.pop, forgotten)))
        return forgotten

    def clear(self) -> dict[Key, P]:
        """Forget all. Their places."""
        forgotten, self.by_key, self.num_bytes = self.by_key, {}, 0
        self._answers.clear()
        self.due_s = math.inf
        return forgotten
