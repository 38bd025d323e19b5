"""Decides which segment gives up its place when no empty one is left. Changes nothing but by evicting records.

In this order: the segment with the fewest live bytes, if copying them is worth it; else least recently used records are
evicted until one is; at most about two segments' worth of them. Pinned, reserved and doomed records hold their segment
where it is.
"""

from __future__ import annotations

from hybridkv.tiers.disk.files.segment_files import Relocation
from hybridkv.tiers.disk.format.layout import SEGMENT_HEAD_BYTES
from hybridkv.tiers.disk.tables.records import RecordTable
from hybridkv.tiers.disk.tables.segments import Segment, SegmentTable


class Compaction:
    """Looks at the tables of one index."""

    def __init__(self, segments: SegmentTable, records: RecordTable, share: float) -> None:
        self._segments = segments
        self._records = records
        self._share = share

    def victim(self) -> Segment | None:
        """The segment to copy away, after evicting what had to be. None when every segment is held."""
        cheapest = self.cheapest()
        if cheapest is not None and not self._is_worth_copying(cheapest):
            self._evict_until_worth_copying(cheapest)
        return self.cheapest()

    def relocations(self, victim: Segment) -> tuple[Relocation, ...]:
        """The victim's live records, with new addresses for as many as fit into what is open and empty."""
        relocations = []
        for record in self._records.movable_in(victim):
            if not self._segments.has_room(record.cost, may_take_last=True):
                break
            address = self._segments.append(record.cost)
            self._segments.hold(address, is_writing=True)
            self._records.log.reserved(address, record.payload_bytes)
            relocations.append(Relocation(record.key, record.address, address, record.payload_bytes))
        return tuple(relocations)

    def empty(self, victim: Segment) -> None:
        """Evict everything in it."""
        for record in self._records.movable_in(victim):
            self._records.evict(record.key)

    def cheapest(self) -> Segment | None:
        """The segment with the fewest live bytes that nothing holds."""
        found = self._segments.candidates.cheapest()
        self._segments.lacks_candidate = found is None
        return found

    def _is_worth_copying(self, segment: Segment) -> bool:
        return segment.live_bytes <= self._share * (segment.segment_bytes - SEGMENT_HEAD_BYTES)

    def _evict_until_worth_copying(self, cheapest: Segment) -> None:
        left_bytes = self._segments.largest_bytes
        while left_bytes > 0 and self._records.has_evictable:
            record = self._records.evict_next()
            segment = self._segments.of(record.address)
            left_bytes -= record.cost
            if segment.is_candidate and self._is_worth_copying(segment):
                return
        cheapest = self.cheapest() or cheapest
        for record in self._records.movable_in(cheapest):
            if self._is_worth_copying(cheapest):
                return
            self._records.evict(record.key)
