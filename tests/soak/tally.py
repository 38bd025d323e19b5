"""Counts in memory shared with forked processes, so that counts of killed processes are not lost."""

from __future__ import annotations

import mmap

import numpy as np

MAX_NAMES = 512
NAME_BYTES = 56


class Tally:
    """Counts by name. Only one process at a time may add."""

    def __init__(self) -> None:
        row = np.dtype([("name", f"S{NAME_BYTES}"), ("count", np.int64)])
        memory = mmap.mmap(-1, MAX_NAMES * row.itemsize)
        self._rows = np.frombuffer(memory, dtype=row)
        self._places: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        self._rows["count"][self._place(name)] += amount

    def most(self, name: str, value: int) -> None:
        """Keep the maximum."""
        place = self._place(name)
        self._rows["count"][place] = max(int(self._rows["count"][place]), value)

    def get(self, name: str) -> int:
        return self.all().get(name, 0)

    def all(self) -> dict[str, int]:
        return {row["name"].decode(): int(row["count"]) for row in self._rows if row["name"]}

    def _place(self, name: str) -> int:
        place = self._places.get(name)
        if place is None:
            taken = [row["name"].decode() for row in self._rows if row["name"]]
            place = taken.index(name) if name in taken else len(taken)
            if place >= MAX_NAMES or len(name.encode()) > NAME_BYTES:
                raise ValueError(f"no room to count {name!r}")
            self._rows["name"][place] = name.encode()
            self._places[name] = place
        return place
