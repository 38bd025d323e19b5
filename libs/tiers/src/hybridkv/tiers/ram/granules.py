"""Gives out granules of equal size. Any set of granules serves a chunk, so nothing is lost to external fragmentation.

Free granules are kept as maximal runs in two dicts (by first and by last granule): joining and splitting cost O(1) a
run, and memory grows with the number of holes, not with the size of the arena. Knows neither the life of a key nor
eviction.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.ledger import Entry, KeyState

_RESERVED = KeyState.RESERVED


class SlotEntry(Entry):
    """A chunk's granules."""

    slot: Slot


class GranuleAllocator:
    """The `Space` of host memory: `num_granules` places of `granule_bytes` each, numbered from offset 0.

    What it is asked for costs whole granules, and the caller made sure that so many are free.
    """

    __slots__ = ("_count_by_first", "_first_by_last", "granule_bytes", "num_granules")

    def __init__(self, num_granules: int, granule_bytes: int) -> None:
        self.num_granules = num_granules
        self.granule_bytes = granule_bytes
        self._count_by_first: dict[int, int] = {}
        self._first_by_last: dict[int, int] = {}
        self._give_back(0, num_granules)

    def take(self, key: Key, num_bytes: int, cost: int) -> SlotEntry:
        """A slot of exactly `num_bytes`."""
        granule_bytes = self.granule_bytes
        wanted = cost // granule_bytes
        first, count = self._take_run(wanted)
        if count == wanted:
            return SlotEntry(cost, _RESERVED, 0, Slot(((first * granule_bytes, num_bytes),)))
        runs = [(first, count)]
        while wanted := wanted - count:
            first, count = self._take_run(wanted)
            runs.append((first, count))
        return SlotEntry(cost, _RESERVED, 0, self._slot(runs, cost - num_bytes))

    def _take_run(self, wanted: int) -> tuple[int, int]:
        """Of one free run as many granules as are wanted, or all that it has."""
        first, count = self._count_by_first.popitem()
        last = first + count - 1
        if count <= wanted:
            del self._first_by_last[last]
            return first, count
        self._count_by_first[first + wanted] = count - wanted
        self._first_by_last[last] = first + wanted
        return first, wanted

    def _slot(self, runs: list[tuple[int, int]], spare_bytes: int) -> Slot:
        """Free runs are maximal, so runs that were taken never touch each other and are extents as they stand."""
        granule_bytes = self.granule_bytes
        extents = [(first * granule_bytes, count * granule_bytes) for first, count in sorted(runs)]
        offset, length = extents[-1]
        extents[-1] = (offset, length - spare_bytes)
        return Slot(tuple(extents))

    def free(self, entry: SlotEntry) -> None:
        for offset, num_bytes in entry.slot.extents:
            self._give_back(offset // self.granule_bytes, -(-num_bytes // self.granule_bytes))

    def keep_only(self, entries: Iterable[SlotEntry]) -> tuple[()]:
        """Costs nothing for what is taken back, and leaves nothing to be emptied."""
        self._count_by_first, self._first_by_last = {}, {}
        first = 0
        for offset, num_bytes in sorted(extent for entry in entries for extent in entry.slot.extents):
            start = offset // self.granule_bytes
            if start > first:
                self._give_back(first, start - first)
            first = start + -(-num_bytes // self.granule_bytes)
        if first < self.num_granules:
            self._give_back(first, self.num_granules - first)
        return ()

    def _give_back(self, first: int, count: int) -> None:
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
