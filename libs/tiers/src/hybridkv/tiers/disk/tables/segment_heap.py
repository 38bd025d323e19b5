"""Which segment holds the least, among those that may give up their place. Looks only at segments that changed.

Entries of a heap are not taken out when their segment changes: a newer one is put in before the next question, and an
old one is skipped when it comes up. Knows no record and decides nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybridkv.tiers.disk.tables.segments import Segment

FEWEST_BEFORE_CLEANING = 64
"""Entries, beside two for each segment, before the old ones are thrown away."""


class SegmentHeap:
    """Of the segments of one table."""

    def __init__(self, by_number: Mapping[int, Segment]) -> None:
        self._by_number = by_number
        self._heap: list[tuple[int, int]] = []
        """(live bytes, number)."""
        self._changed: set[int] = set()

    def changed(self, number: int) -> None:
        """This segment appeared, or something of it is not as it was."""
        self._changed.add(number)

    def cheapest(self) -> Segment | None:
        """The one with the fewest live bytes, None when there is none."""
        self._take_in()
        while self._heap:
            live_bytes, number = self._heap[0]
            segment = self._by_number.get(number)
            if segment is not None and segment.is_candidate and segment.live_bytes == live_bytes:
                return segment
            heapq.heappop(self._heap)
        return None

    def _take_in(self) -> None:
        if len(self._heap) + len(self._changed) > 2 * len(self._by_number) + FEWEST_BEFORE_CLEANING:
            self._heap = []
            self._changed.update(self._by_number)
        for number in self._changed:
            segment = self._by_number.get(number)
            if segment is not None and segment.is_candidate:
                heapq.heappush(self._heap, (segment.live_bytes, number))
        self._changed.clear()
