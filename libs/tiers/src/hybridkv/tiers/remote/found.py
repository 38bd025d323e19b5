"""Places of found chunks. The places of one lookup result expire together."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from hybridkv.tiers.contract import Key, Slot

_get_num_bytes = attrgetter("num_bytes")


class RemotePlace(Protocol):
    """Place of a chunk in a remote tier. Immutable."""

    @property
    def num_bytes(self) -> int:
        """Size of the chunk."""
        ...

    def slot(self, number: int) -> Slot:
        """Slot for the medium. `number` is unique: no other slot of the index begins at this number."""
        ...


P = TypeVar("P", bound=RemotePlace)


class FoundPlaces(Generic[P]):
    """Found chunks that were not read yet.

    Args:
        max_remembered: limit of remembered places, gone ones included. Must be at least twice the largest number of
            chunks.
    """

    def __init__(self, max_remembered: int) -> None:
        self._max_remembered = max_remembered
        self.by_key: dict[Key, P] = {}
        self.num_bytes = 0
        """Total size of all chunks."""
        self._answers: list[tuple[float, int, Mapping[Key, P]]] = []
        """Heap of (expiry time, number, places), one for each lookup result. Some places are gone."""
        self._num_remembered = 0
        """Number of places in `_answers`."""
        self._numbers = itertools.count()
        self.due_s = math.inf
        """Next expiry time."""

    def add(self, places: Mapping[Key, P], until_s: float) -> None:
        """Add the places of one lookup result. The keys must be new."""
        self.by_key.update(places)
        self.num_bytes += sum(map(_get_num_bytes, places.values()))
        heapq.heappush(self._answers, (until_s, next(self._numbers), places))
        self._num_remembered += len(places)
        if self._num_remembered > self._max_remembered:
            self._forget_gone()
        self.due_s = self._answers[0][0]

    def pop(self, key: Key) -> P:
        """Remove one key and return its place. The key must be present."""
        place = self.by_key.pop(key)
        self.num_bytes -= place.num_bytes
        return place

    def expire(self, now_s: float) -> dict[Key, P]:
        """Remove expired results. Returns their places that were still present."""
        expired: dict[Key, P] = {}
        while self._answers and self._answers[0][0] <= now_s:
            expired |= self.forget_oldest()
        return expired

    def forget_oldest(self) -> dict[Key, P]:
        """Remove the result that expires first. Returns the places that were still present."""
        _, _, places = heapq.heappop(self._answers)
        self._num_remembered -= len(places)
        self.due_s = self._answers[0][0] if self._answers else math.inf
        by_key = self.by_key
        forgotten = {key: place for key, place in places.items() if by_key.get(key) is place}
        self.num_bytes -= sum(map(_get_num_bytes, map(by_key.pop, forgotten)))
        return forgotten

    def _forget_gone(self) -> None:
        by_key = self.by_key
        answers = [
            (until_s, number, {key: place for key, place in places.items() if by_key.get(key) is place})
            for until_s, number, places in self._answers
        ]
        self._answers = [answer for answer in answers if answer[2]]
        heapq.heapify(self._answers)
        self._num_remembered = len(by_key)

    def clear(self) -> dict[Key, P]:
        """Remove everything. Returns the places."""
        forgotten, self.by_key, self.num_bytes = self.by_key, {}, 0
        self._answers.clear()
        self._num_remembered = 0
        self.due_s = math.inf
        return forgotten
