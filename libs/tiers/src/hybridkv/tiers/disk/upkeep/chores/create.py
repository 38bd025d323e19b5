"""Makes empty segments ahead of who stores into them, as many as there is room for."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from hybridkv.tiers.disk.tables.segments import Segment, Stage
from hybridkv.tiers.disk.upkeep.chore import Chore, Ending, Files
from hybridkv.tiers.disk.upkeep.kind import AnyPiece, Kind, Piece
from hybridkv.tiers.disk.upkeep.state import StoreState

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Create(Chore[None]):
    number: int
    epoch: int
    segment_bytes: int
    own_bytes: int

    def run(self, files: Files) -> None:
        files.segments.create(self.number, self.epoch, self.segment_bytes, self.own_bytes)


class SegmentMaker(Kind[Create, None]):
    """Knows whether the file system has room for another segment."""

    makes_room = True

    def __init__(self, state: StoreState) -> None:
        super().__init__(state)
        self._bytes_on_all_ranks = state.sizes.segment_bytes * state.sizes.num_ranks
        self._is_full = False
        """There was no room for the last segment that should have been made."""
        self._dropped_bytes = 0
        """Since then, on all ranks."""

    @property
    def is_resting(self) -> bool:
        return self._state.retries.is_resting(Create)

    @property
    def helps_to_drop(self) -> bool:
        """False when as much was deleted as a segment needs, and the file system still has no room for one."""
        return self._dropped_bytes < self._bytes_on_all_ranks

    def dropped(self, segment_bytes: int) -> None:
        """A segment of this size was deleted on every rank."""
        if self._is_full:
            self._dropped_bytes += segment_bytes * self._state.sizes.num_ranks

    def raise_limit(self) -> None:
        """What the file system had no room for may be tried again, once it has rested."""
        if not self.is_resting:
            self._state.segments.limit_bytes = self._state.sizes.data_bytes

    def plan(self) -> AnyPiece | None:
        state, segments, sizes = self._state, self._state.segments, self._state.sizes
        if len(segments.ready) >= sizes.ready_segments or not segments.creatable:
            return None
        own_bytes = segments.allocated_bytes + self._bytes_on_all_ranks + sizes.metadata_bytes
        return Piece(self, Create(segments.free_number(), state.epoch, sizes.segment_bytes, own_bytes))

    def started(self, chore: Create) -> None:
        self._state.segments.take_number()
        self._state.segments.allocated_bytes += self._bytes_on_all_ranks

    def apply(self, chore: Create, ending: Ending[None]) -> None:
        state, segments = self._state, self._state.segments
        if ending.error is not None:
            segments.allocated_bytes -= self._bytes_on_all_ranks
            self._is_full = getattr(ending.error, "errno", None) in _FULL
            if self._is_full:
                segments.limit_bytes = segments.allocated_bytes
            return
        self._is_full, self._dropped_bytes = False, 0
        segment = Segment(chore.number, chore.segment_bytes, chore.epoch)
        if chore.epoch != state.epoch:
            segment.stage = Stage.FULL
        segments.add(segment)
        state.tally.add("segments_created")
        state.tally.add("namespaces_deleted", state.files.segments.take_deleted_namespaces())
