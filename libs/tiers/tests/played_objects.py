"""Object client under the control of a test: it answers when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hybridkv.tiers import Key
from hybridkv.tiers.object import (
    ClientEvent,
    EpochChanged,
    LookupAnswered,
    LookupFailed,
    PackPlace,
    StoreCounts,
    Stored,
)


class FakeObjectClient:
    """Lookup client of an `ObjectIndex`, under the control of a test.

    Args:
        clock: the test's.
        held: the chunks in the store, with their places.
    """

    def __init__(self, clock: Callable[[], float], held: dict[Key, PackPlace]) -> None:
        self._clock = clock
        self.held = held
        self.namespace: str | None = "n"
        self.events: deque[ClientEvent] = deque()
        self.asked: list[tuple[int, tuple[Key, ...]]] = []
        self.requested: list[Key] = []
        """Keys of all lookups that requests wait for."""
        self.published: list[Stored] = []
        self.used: list[tuple[Key, ...]] = []
        self.retracted: list[tuple[Key, PackPlace]] = []
        self.cleared: list[bool] = []
        self.is_reachable = True
        self.takes_objects = True
        self.is_closed = False

    def send_lookup(self, request: int, keys: Sequence[Key], until_s: float, *, is_for_store: bool = False) -> bool:
        if self.is_reachable:
            self.asked.append((request, tuple(keys)))
            self.requested += () if is_for_store else keys
        return self.is_reachable

    def answer(self) -> None:
        """Answer all pending lookups."""
        asked, self.asked = self.asked, []
        for request, keys in asked:
            places = {key: self.held[key]._replace(source=b"source") for key in keys if key in self.held}
            places = {key: place for key, place in places.items() if (key, place) not in self.retracted}
            self.events.append(LookupAnswered(request, places, self._clock()))

    def fail(self) -> None:
        """Fail all pending lookups."""
        asked, self.asked = self.asked, []
        self.events += [LookupFailed(request, self._clock()) for request, _ in asked]

    def move(self) -> None:
        """Another client starts a new epoch."""
        self.namespace = "n2"
        self.events.append(EpochChanged(self._clock()))

    def publish(self, stored: Sequence[Stored]) -> None:
        self.published += stored

    def use(self, keys: Sequence[Key]) -> None:
        self.used.append(tuple(keys))

    def take_counts(self) -> StoreCounts:
        return StoreCounts()

    def retract(self, key: Key, place: PackPlace) -> None:
        self.retracted.append((key, place))

    def clear(self, *, is_for_all: bool) -> None:
        self.cleared.append(is_for_all)

    def close(self) -> None:
        self.is_closed = True
