"""Gives out granules of equal size. Any set of granules serves a chunk, so nothing is lost to external fragmentation.

Free granules are kept as maximal runs in two dicts (by first and by last granule): joining and splitting cost O(1) a
run, and memory grows with the number of holes, not with the size of the arena. Knows neither keys nor eviction.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.tiers.contract import Slot


class GranuleAllocator:
    """`num_granules` places of `granule_bytes` each, numbered from offset 0."""

    __slots__ = ("_count_by_first", "_first_by_last", "granule_bytes", "num_free", "num_granules")

    def __init__(self, num_granules: int, granule_bytes: int) -> None:
        self.num_granules = num_granules
        self.granule_bytes = granule_bytes
        self.num_free = 0
        self._count_by_first: dict[int, int] = {}
        self._first_by_last: dict[int, int] = {}
        self._give_back(0, num_granules)

    def granules_for(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granule_bytes)

    def take(self, num_bytes: int) -> Slot:
        """A slot of exactly `num_bytes`. The caller made sure that `num_free` suffices."""
        wanted = self.granules_for(num_bytes)
        runs: list[tuple[int, int]] = []
        while wanted:
            first, count = self._count_by_first.popitem()
            del self._first_by_last[first + count - 1]
            taken = min(count, wanted)
            if taken < count:
                self._count_by_first[first + taken] = count - taken
                self._first_by_last[first + count - 1] = first + taken
            self.num_free -= taken
            wanted -= taken
            runs.append((first, taken))
        runs.sort()
        return self._slot(runs, num_bytes)

    def _slot(self, runs: list[tuple[int, int]], num_bytes: int) -> Slot:
        """Free runs are maximal, so runs that were taken never touch each other and are extents as they stand."""
        granule_bytes = self.granule_bytes
        extents = [(first * granule_bytes, count * granule_bytes) for first, count in runs]
        spare_bytes = sum(length for _, length in extents) - num_bytes
        offset, length = extents[-1]
        extents[-1] = (offset, length - spare_bytes)
        return Slot(tuple(extents))

    def free(self, slot: Slot) -> None:
        """Take back a slot that `take` gave out."""
        for offset, num_bytes in slot.extents:
            self._give_back(offset // self.granule_bytes, self.granules_for(num_bytes))

    def keep_only(self, slots: Iterable[Slot]) -> None:
        """Take back everything that `take` gave out, but for these slots. Costs nothing for what is taken back."""
        self.num_free = 0
        self._count_by_first, self._first_by_last = {}, {}
        first = 0
        for offset, num_bytes in sorted(extent for slot in slots for extent in slot.extents):
            start = offset // self.granule_bytes
            if start > first:
                self._give_back(first, start - first)
            first = start + self.granules_for(num_bytes)
        if first < self.num_granules:
            self._give_back(first, self.num_granules - first)

    def _give_back(self, first: int, count: int) -> None:
        self.num_free += count
        before = self._first_by_last.pop(first - 1, None)
        if before is not None:
            count += self._count_by_first.pop(before)
            first = before
        after = self._count_by_first.pop(first + count, None)
        if after is not None:
            del self._first_by_last[first + count + after - 1]
            count += after
        self._count_by_first[first] = count
        self._first_by_last[first + count - 1] = first
