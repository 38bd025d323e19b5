"""Compaction: copies the live records of a segment to other segments, so that the segment can be deleted.

Chooses the segment with the fewest kept bytes (`Segment.kept_bytes`), if they are at most `COMPACTION_SHARE` of it.
Otherwise first evicts records until a segment qualifies: least recently used records of one segment's size, then
records of the segment with the fewest kept bytes. Without room for copies, evicts all records of that segment. A
segment with pinned or reserved records is never chosen, even if these records were deleted meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hybridkv.tiers.contract import FailureReason
from hybridkv.tiers.disk.files.segment_files import Relocation
from hybridkv.tiers.disk.format.layout import SEGMENT_HEAD_BYTES
from hybridkv.tiers.disk.index.records import RecordTable
from hybridkv.tiers.disk.index.segments import Segment, SegmentTable
from hybridkv.tiers.disk.maintenance.chore import (
    AnyDueChore,
    Chore,
    ChoreKind,
    DueChore,
    Ending,
    StoreFiles,
    StoreState,
)
from hybridkv.tiers.disk.maintenance.segment_chores import SegmentDropper, SegmentMaker
from hybridkv.tiers.disk.maintenance.withdrawals import JournalWriter
from hybridkv.tiers.ledger import KeyState

COMPACTION_SHARE = 0.75
"""Largest share of live bytes in a segment that is copied. Limits the write amplification to 1 / (1 - share)."""


class Compaction:
    """Chooses segments for compaction, evicts records and reserves addresses for copies. Works on the tables of one
    index."""

    def __init__(self, segments: SegmentTable, records: RecordTable) -> None:
        self._segments = segments
        self._records = records

    def victim(self) -> Segment | None:
        """Segment to free, after evictions if needed. None if every segment is in use."""
        cheapest = self.cheapest()
        if cheapest is not None and not self._is_worth_copying(cheapest):
            self._evict_until_worth_copying(cheapest)
        return self.cheapest()

    def reserve_relocations(self, victim: Segment) -> tuple[Relocation, ...]:
        """Reserve new addresses for the victim's live records, as many as fit into the open and empty segments. Returns
        the copies to make."""
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
        """Evict all committed, unpinned records of a segment."""
        for record in self._records.movable_in(victim):
            self._records.evict(record.key)

    def cheapest(self) -> Segment | None:
        """Candidate with the fewest kept bytes, see `Segment.is_candidate`. None without candidates. Sets
        `SegmentTable.lacks_candidate`."""
        found = self._segments.candidates.cheapest()
        self._segments.lacks_candidate = found is None
        return found

    def _is_worth_copying(self, segment: Segment) -> bool:
        return segment.kept_bytes <= COMPACTION_SHARE * (segment.segment_bytes - SEGMENT_HEAD_BYTES)

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


Copied: TypeAlias = list[tuple[Relocation, FailureReason | None]]


@dataclass(frozen=True, slots=True)
class Copy(Chore[Copied]):
    number: int
    relocations: tuple[Relocation, ...]

    def run(self, files: StoreFiles) -> Copied:
        return files.segments.copy(self.relocations)


class SegmentCopier(ChoreKind[Copy, Copied]):
    """Copies live records of a segment to other segments. If there is no room for copies, evicts the records, and
    `dropper` deletes the segment. Quarantines damaged records in `journal`."""

    makes_room = True

    def __init__(self, state: StoreState, maker: SegmentMaker, dropper: SegmentDropper, journal: JournalWriter) -> None:
        super().__init__(state)
        self._maker = maker
        self._dropper = dropper
        self._journal = journal
        self.compaction = Compaction(state.segments, state.records)
        self.copying: tuple[Relocation, ...] = ()
        """Copies of the running chore."""

    @property
    def is_due(self) -> bool:
        """True if space is short and a segment can be freed."""
        return self._may_copy() and self.compaction.cheapest() is not None

    def _may_copy(self) -> bool:
        segments = self._state.segments
        if len(segments.ready) + segments.num_creatable + segments.num_deleting >= self._state.sizes.kept_free_segments:
            return False
        if self._state.retries.is_backing_off(Copy) or self._dropper.is_backing_off:
            return False
        if segments.num_creatable and self._maker.is_backing_off:
            return False
        return self._maker.deletions_help

    def plan(self) -> AnyDueChore | None:
        """Next copy, or a deletion if no live record is left to copy. Evicts records if needed, and reserves addresses
        for the copies."""
        segments = self._state.segments
        if not self._may_copy():
            return None
        if not segments.ready and not segments.num_creatable:
            return self._evict_cheapest()
        victim = self.compaction.victim()
        if victim is None:
            return None
        if not victim.live_bytes:
            return self._dropper.plan()
        relocations = self.compaction.reserve_relocations(victim)
        if not relocations:
            return self._evict_cheapest()
        victim.is_moving = True
        segments.refile(victim)
        return DueChore(self, Copy(victim.number, relocations))

    def _evict_cheapest(self) -> AnyDueChore | None:
        """Evict all records of the cheapest segment, because there is no room for copies. Returns the deletion."""
        victim = self.compaction.cheapest()
        if victim is not None:
            self.compaction.empty(victim)
        return self._dropper.plan()

    def started(self, chore: Copy) -> None:
        self.copying = chore.relocations

    def refused(self, chore: Copy) -> None:
        self._finish(chore, [])

    def apply(self, chore: Copy, ending: Ending[Copied]) -> None:
        self.copying = ()
        self._finish(chore, ending.value or [])

    def _finish(self, chore: Copy, copied: Copied) -> None:
        """Apply a copy to the tables. `copied`: empty if the copy failed as a whole, or was refused."""
        segments = self._state.segments
        for relocation in chore.relocations:
            segments.release(relocation.new_address, is_writing=True)
        if not copied or any(reason is not None for _, reason in copied):
            for relocation in chore.relocations:
                target = segments.of(relocation.new_address)
                target.may_be_sealed = False
                segments.refile(target)
        moved = [relocation for relocation, reason in copied if self._move(relocation, reason)]
        for relocation in set(chore.relocations).difference(moved):
            self._state.records.log.gone(relocation.new_address)
        source = segments.by_number[chore.number]
        source.is_moving = False
        segments.refile(source)

    def _move(self, relocation: Relocation, reason: FailureReason | None) -> bool:
        """Change the record's address to the address of its copy. False if the copy failed (then quarantines the
        record), or if the record was deleted, replaced or pinned during the copy."""
        state = self._state
        record = state.records.find(relocation.key)
        if record is None or record.address != relocation.old_address:
            return False
        if reason is not None:
            self._journal.quarantine(relocation.key, reason)
            return False
        if record.state is not KeyState.COMMITTED or record.num_pins:
            return False
        state.records.relocate(record, relocation.new_address)
        state.tally.add("moved_records")
        state.tally.add("moved_bytes", record.cost * state.sizes.num_ranks)
        return True
