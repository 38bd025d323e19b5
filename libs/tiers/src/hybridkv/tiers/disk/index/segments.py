"""Segments of a namespace: stage and live bytes of each segment, and the address of the next record.

All records, copies by compaction included, are appended to one open segment, so a higher address was always assigned
later. Extra tables list the segments for each kind of work, so that a search for due work does not scan all segments.
Code that changes a field of a segment from outside must call `refile`. Contains no states of keys; touches no files.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Mapping

from hybridkv.tiers.disk.format.layout import LARGEST_NUMBER, SEGMENT_HEAD_BYTES, address_of, number_of
from hybridkv.tiers.disk.options import DiskSizes

MAX_EXTRA_HEAP_ENTRIES = 64
"""Maximum heap entries, in addition to two for each segment. With more, the heap is rebuilt."""


class SegmentHeap:
    """Heap of segments by kept bytes, with lazy deletion.

    A changed segment gets a new entry before the next query. Queries skip stale entries.
    """

    def __init__(self, by_number: Mapping[int, Segment]) -> None:
        self._by_number = by_number
        self._heap: list[tuple[int, int]] = []
        """(kept bytes, number)."""
        self._changed: set[int] = set()

    def changed(self, number: int) -> None:
        """Mark a segment as new or changed."""
        self._changed.add(number)

    def cheapest(self) -> Segment | None:
        """Candidate with the fewest kept bytes; None without candidates."""
        self._take_in()
        while self._heap:
            kept_bytes, number = self._heap[0]
            segment = self._by_number.get(number)
            if segment is not None and segment.is_candidate and segment.kept_bytes == kept_bytes:
                return segment
            heapq.heappop(self._heap)
        return None

    def _take_in(self) -> None:
        if len(self._heap) + len(self._changed) > 2 * len(self._by_number) + MAX_EXTRA_HEAP_ENTRIES:
            self._heap = []
            self._changed.update(self._by_number)
        for number in self._changed:
            segment = self._by_number.get(number)
            if segment is not None and segment.is_candidate:
                heapq.heappush(self._heap, (segment.kept_bytes, number))
        self._changed.clear()


class SegmentStage(enum.Enum):
    """Stage of a segment's life cycle."""

    READY = "ready"
    OPEN = "open"
    FULL = "full"
    DELETING = "deleting"
    """A chore deletes the segment."""
    STUCK = "stuck"
    """Without live records, but could not be deleted. Uses space. The deletion is retried after a backoff."""
    UNAVAILABLE = "unavailable"
    """A file could not be opened at the start. Uses space, and is not touched until a later start can open it."""


class Segment:
    """One segment: a file on each rank, with the same layout."""

    __slots__ = (
        "end_offset",
        "epoch",
        "is_filled",
        "is_lost",
        "is_moving",
        "is_sealed",
        "live_bytes",
        "may_be_sealed",
        "num_being_written",
        "num_holding",
        "number",
        "segment_bytes",
        "stage",
    )

    def __init__(self, number: int, segment_bytes: int, epoch: int) -> None:
        self.number = number
        self.segment_bytes = segment_bytes
        self.epoch = epoch
        self.stage = SegmentStage.READY
        self.end_offset = SEGMENT_HEAD_BYTES
        self.live_bytes = 0
        """Bytes of records that are not yet freed."""
        self.num_holding = 0
        """Number of records that are pinned, reserved, or the target of a copy: the segment must stay."""
        self.num_being_written = 0
        """Number of records that are reserved or the target of a copy, and may still be written."""
        self.is_filled = False
        """True if the segment was closed because the next record did not fit. False after a restart."""
        self.is_moving = False
        """True while compaction copies the records to another segment."""
        self.is_lost = False
        """True if the files are missing."""
        self.is_sealed = False
        self.may_be_sealed = True
        """False if the segment may hold a torn record, for example after an interrupted copy into it."""

    @property
    def kept_bytes(self) -> int:
        """Space that copies of all records would take: the live bytes; but the whole segment if it is filled and no
        record was deleted, because copies would leave as much space unused at the end of another segment."""
        is_whole = self.is_filled and self.live_bytes == self.end_offset - SEGMENT_HEAD_BYTES
        return self.segment_bytes - SEGMENT_HEAD_BYTES if is_whole else self.live_bytes

    @property
    def is_candidate(self) -> bool:
        """True if compaction may choose this segment: it is full, no record is pinned or being written, and compaction
        is not copying its records."""
        return self.stage is SegmentStage.FULL and not (self.num_holding or self.is_moving)

    @property
    def is_sealable(self) -> bool:
        """True if the segment is full, no record is being written, none may be torn, and its files have no seal yet."""
        is_settled = self.stage is SegmentStage.FULL and not self.num_being_written
        return is_settled and self.may_be_sealed and not self.is_sealed


class SegmentTable:
    """All segments of a namespace."""

    def __init__(self, sizes: DiskSizes, next_number: int) -> None:
        self._sizes = sizes
        self.by_number: dict[int, Segment] = {}
        self.next_number = next_number
        self.open: Segment | None = None
        self.ready: deque[Segment] = deque()
        self.creating: int | None = None
        """Number of the segment that is being created; None if there is none."""
        self.allocated_bytes = 0
        """Size of all segments on all ranks, including segments that are created or deleted now."""
        self.num_deleting = 0
        self.limit_bytes = sizes.data_bytes
        """Limit of `allocated_bytes`. Lower than `data_bytes` while the file system is full or other namespaces leave
        less space."""
        self.revision = 0
        """Number that changes whenever file work may be due."""
        self.largest_bytes = sizes.segment_bytes
        """Size of the largest segment so far; an earlier start may have had another segment size."""
        self.dead: dict[int, Segment] = {}
        """Candidates without live bytes, by number."""
        self.sealable: dict[int, Segment] = {}
        self.unavailable: dict[int, Segment] = {}
        self.stuck: dict[int, Segment] = {}
        self.being_written: dict[int, Segment] = {}
        """Segments with records that may still be written."""
        self.candidates = SegmentHeap(self.by_number)
        self.lacks_candidate = False
        """True if the last query for a candidate found none."""

    def add(self, segment: Segment) -> None:
        """Add a segment that is on disk."""
        self.by_number[segment.number] = segment
        self.largest_bytes = max(self.largest_bytes, segment.segment_bytes)
        self.refile(segment)
        if segment.stage is SegmentStage.READY:
            self.ready.append(segment)

    def remove(self, segment: Segment) -> None:
        """Remove a segment that was deleted from disk."""
        del self.by_number[segment.number]
        for kept in (self.dead, self.sealable, self.unavailable, self.stuck, self.being_written):
            kept.pop(segment.number, None)
        self.revision += 1
        self.allocated_bytes -= segment.segment_bytes * self._sizes.num_ranks

    def refile(self, segment: Segment) -> None:
        """Update the tables after a change of this segment."""
        number, is_candidate = segment.number, segment.is_candidate
        _keep(self.dead, segment, is_candidate and not segment.live_bytes)
        _keep(self.sealable, segment, segment.is_sealable)
        _keep(self.unavailable, segment, segment.stage is SegmentStage.UNAVAILABLE)
        _keep(self.stuck, segment, segment.stage is SegmentStage.STUCK)
        if is_candidate:
            self.candidates.changed(number)
        self.revision += 1

    def of(self, address: int) -> Segment:
        return self.by_number[number_of(address)]

    def free_number(self) -> int:
        """Next unused segment number; above `LARGEST_NUMBER` if all numbers are used."""
        while self.next_number in self.by_number:
            self.next_number += 1
        return self.next_number

    def take_number(self) -> None:
        """Mark the present `next_number` as used."""
        self.next_number = min(self.next_number, LARGEST_NUMBER) + 1

    @property
    def num_creatable(self) -> int:
        """Number of new segments that fit into the limit."""
        room_bytes = self.limit_bytes - self.allocated_bytes
        return max(room_bytes // (self._sizes.segment_bytes * self._sizes.num_ranks), 0)

    @property
    def next_address(self) -> int:
        """Above the address of every record. The next record gets this address or a higher one."""
        if self.open is not None:
            return address_of(self.open.number, self.open.end_offset)
        if self.ready:
            return address_of(self.ready[0].number, 0)
        return address_of(self.next_number if self.creating is None else self.creating, 0)

    def has_room(self, cost: int, may_take_last: bool) -> bool:
        """True if a record of `cost` bytes can be appended now.

        The last empty segment is reserved for compaction, because compaction frees segments; only compaction sets
        `may_take_last`.
        """
        if self.open is not None and self.open.end_offset + cost <= self.open.segment_bytes:
            return True
        if not self.ready or SEGMENT_HEAD_BYTES + cost > self.ready[0].segment_bytes:
            return False
        return may_take_last or len(self.ready) + self.num_creatable + self.num_deleting >= 2

    def append(self, cost: int) -> int:
        """Append a record and return its address. The caller must check `has_room` first."""
        if self.open is None or self.open.end_offset + cost > self.open.segment_bytes:
            if self.open is not None:
                self.open.is_filled = True
            self.close_open()
            self.open = self.ready.popleft()
            self.open.stage = SegmentStage.OPEN
            self.refile(self.open)
        segment = self.open
        address = address_of(segment.number, segment.end_offset)
        segment.end_offset += cost
        return address

    def change_live(self, address: int, num_bytes: int) -> None:
        """Change the live bytes of the segment at this address: a record was added or, with negative bytes, removed."""
        segment = self.of(address)
        segment.live_bytes += num_bytes
        if segment is self.open:
            return  # the open segment is in no table of `refile`
        if not segment.live_bytes or segment.number in self.dead:
            self.refile(segment)
        else:
            self.candidates.changed(segment.number)

    def forget_records(self) -> None:
        """Set the live bytes of all segments to 0."""
        for segment in self.by_number.values():
            segment.live_bytes = 0
            self.refile(segment)

    def hold(self, address: int, is_writing: bool, count: int = 1) -> None:
        """Count `count` records with a new reader or writer, in the segment of this address."""
        segment = self.of(address)
        segment.num_holding += count
        if is_writing:
            segment.num_being_written += count
            self.being_written[segment.number] = segment

    def release(self, address: int, is_writing: bool, count: int = 1) -> None:
        """Undo `hold`."""
        segment = self.of(address)
        segment.num_holding -= count
        if is_writing:
            segment.num_being_written -= count
            if not segment.num_being_written:
                del self.being_written[segment.number]
        if segment is self.open:
            return
        if (is_writing and not segment.num_being_written) or not (segment.num_holding or segment.live_bytes):
            self.refile(segment)
        elif not segment.num_holding:  # the last reader has ended; nothing else changed
            self.candidates.changed(segment.number)
            self.revision += self.lacks_candidate

    def close_open(self) -> None:
        """Append no more to the open segment."""
        if self.open is not None:
            former, self.open = self.open, None
            former.stage = SegmentStage.FULL
            self.refile(former)


def _keep(where: dict[int, Segment], segment: Segment, belongs: bool) -> None:
    if belongs:
        where[segment.number] = segment
    else:
        where.pop(segment.number, None)
