"""What this host alone has found bad. It expires, and nobody else hears of it: the host's reads may be what is sick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Quarantine(Generic[K, V]):
    """Bounded; the oldest goes first.

    Args:
        max_entries: of them.
        lasts_s: for so long each stays.
        clock: seconds.
    """

    def __init__(self, max_entries: int, lasts_s: float, clock: Callable[[], float]) -> None:
        self._max_entries = max_entries
        self._lasts_s = lasts_s
        self._clock = clock
        self._entries: dict[K, tuple[float, V]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __contains__(self, key: K) -> bool:
        return self.get(key) is not None

    def add(self, key: K, value: V) -> None:
        """From now on, once more if it is there."""
        self._entries.pop(key, None)
        if len(self._entries) >= self._max_entries:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = (self._clock() + self._lasts_s, value)

    def get(self, key: K) -> V | None:
        """What was said of it; None where it is not in quarantine."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        until_s, value = entry
        if until_s <= self._clock():
            del self._entries[key]
            return None
        return value

    def release(self, key: K) -> None:
        """It is good again."""
        self._entries.pop(key, None)
