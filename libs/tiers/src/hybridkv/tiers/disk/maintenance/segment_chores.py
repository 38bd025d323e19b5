"""Chores for segments: create, seal, delete; and recreate removed directories."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hybridkv.tiers.disk.format.layout import segment_number
from hybridkv.tiers.disk.index.segments import Segment, SegmentStage
from hybridkv.tiers.disk.maintenance.chore import (
    AnyDueChore,
    Chore,
    ChoreKind,
    DueChore,
    Ending,
    StoreFiles,
    StoreState,
)
from hybridkv.tiers.disk.maintenance.withdrawals import JournalWriter, WriteEpoch

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Create(Chore[None]):
    number: int
    epoch: int
    segment_bytes: int
    own_bytes: int

    def run(self, files: StoreFiles) -> None:
        files.segments.create(self.number, self.epoch, self.segment_bytes, self.own_bytes)


class SegmentMaker(ChoreKind[Create, None]):
    """Creates empty segments ahead of stores, and detects a full file system."""

    makes_room = True

    def __init__(self, state: StoreState) -> None:
        super().__init__(state)
        self._bytes_on_all_ranks = state.sizes.segment_bytes * state.sizes.num_ranks
        self._is_full = False
        """True if there was no room for the last new segment: in the file system, a quota, or beside other
        namespaces."""
        self._dropped_bytes = 0
        """Bytes deleted while `_is_full`, on all ranks."""

    @property
    def is_backing_off(self) -> bool:
        return self._state.retries.is_backing_off(Create)

    @property
    def deletions_help(self) -> bool:
        """False if a segment's size was deleted and there is still no room for a new segment."""
        return self._dropped_bytes < self._bytes_on_all_ranks

    def dropped(self, segment_bytes: int) -> None:
        """Count the bytes of a segment that was deleted on every rank. `segment_bytes`: size on one rank."""
        if self._is_full:
            self._dropped_bytes += segment_bytes * self._state.sizes.num_ranks

    def raise_limit(self) -> None:
        """Reset the limit of the segments to `data_bytes`, unless the maker is backing off."""
        if not self.is_backing_off:
            self._state.segments.limit_bytes = self._state.sizes.data_bytes

    def plan(self) -> AnyDueChore | None:
        state, segments, sizes = self._state, self._state.segments, self._state.sizes
        if len(segments.ready) >= sizes.ready_segments or not segments.num_creatable:
            return None
        own_bytes = segments.allocated_bytes + self._bytes_on_all_ranks + sizes.metadata_bytes
        return DueChore(self, Create(segments.free_number(), state.epoch, sizes.segment_bytes, own_bytes))

    def started(self, chore: Create) -> None:
        self._state.segments.take_number()
        self._state.segments.creating = chore.number
        self._state.segments.allocated_bytes += self._bytes_on_all_ranks

    def apply(self, chore: Create, ending: Ending[None]) -> None:
        state, segments = self._state, self._state.segments
        segments.creating = None
        if ending.error is not None:
            segments.allocated_bytes -= self._bytes_on_all_ranks
            self._is_full = getattr(ending.error, "errno", None) in _FULL
            if self._is_full:
                segments.limit_bytes = segments.allocated_bytes
            return
        self._is_full, self._dropped_bytes = False, 0
        segment = Segment(chore.number, chore.segment_bytes, chore.epoch)
        if chore.epoch != state.epoch:
            segment.stage = SegmentStage.FULL
        segments.add(segment)
        state.tally.add("segments_created")
        state.tally.add("namespaces_deleted", state.files.segments.take_deleted_namespaces())


STUCK_SHARE = 16
"""One in this many segments may stay undeletable while another segment is evicted in its place. This limits the loss if
no segment can be deleted: each such segment costs the chunks of another segment."""
MOST_STUCK_SEGMENTS = 8


class DropError(OSError):
    """Some segments could not be deleted: numbers in `left`, with the first error."""

    def __init__(self, first: OSError, left: tuple[int, ...]) -> None:
        super().__init__(first.errno, first.strerror, first.filename)
        self.left = left


@dataclass(frozen=True, slots=True)
class Drop(Chore[None]):
    """Deletes segments one by one: a failure does not stop the other deletions."""

    numbers: tuple[int, ...]

    def run(self, files: StoreFiles) -> None:
        errors: dict[int, OSError] = {}
        for number in self.numbers:
            try:
                files.segments.drop(number)
            except OSError as error:
                errors[number] = error
        if errors:
            raise DropError(next(iter(errors.values())), tuple(errors))


class SegmentDropper(ChoreKind[Drop, None]):
    """Deletes segments that hold no record. Reports freed space to `maker`."""

    makes_room = True

    def __init__(self, state: StoreState, maker: SegmentMaker) -> None:
        super().__init__(state)
        self._maker = maker
        sizes = state.sizes
        count = sizes.data_bytes // (sizes.num_ranks * sizes.segment_bytes)
        self._most_stuck = min(max(count // STUCK_SHARE, 1), MOST_STUCK_SEGMENTS)

    @property
    def is_backing_off(self) -> bool:
        return self._state.retries.is_backing_off(Drop)

    def plan(self) -> AnyDueChore | None:
        # The list may be long, and `plan` is called often, so check the backoff first.
        if self.is_backing_off:
            return None
        segments, is_backing_off = self._state.segments, self._state.retries.is_backing_off
        numbers = (*segments.dead, *(number for number in segments.stuck if not is_backing_off(number)))
        return DueChore(self, Drop(numbers)) if numbers else None

    def started(self, chore: Drop) -> None:
        segments = self._state.segments
        for number in chore.numbers:
            segment = segments.by_number[number]
            segment.stage = SegmentStage.DELETING
            segments.refile(segment)
        segments.num_deleting += len(chore.numbers)

    def ended(self, chore: Drop, ending: Ending[None]) -> None:
        state, segments = self._state, self._state.segments
        left = _left(chore, ending.error)
        may_be_stuck = self._may_be_stuck(left, ending.error)
        for number in chore.numbers:
            segment = segments.by_number[number]
            segment.stage = SegmentStage.STUCK if may_be_stuck else SegmentStage.FULL
            segments.num_deleting -= 1
            if number in left:
                segments.refile(segment)
            else:
                segments.remove(segment)
                self._state.records.drop_segment(segment.number)
                state.retries.forget_segment(number)
                self._maker.dropped(segment.segment_bytes)
                state.tally.add("segments_dropped")
        if len(left) < len(chore.numbers):
            state.retries.end_early(Create)
            state.retries.end_early(WriteEpoch)
        # With more undeletable segments than `_most_stuck`, the whole kind backs off, not single segments.
        state.note(Drop, ending.error, left if may_be_stuck else (), no_segment_is_stuck=not segments.stuck)

    def _may_be_stuck(self, left: tuple[int, ...], error: Exception | None) -> bool:
        """True if these segments may become STUCK. False if there are too many, the file system is read-only, or the
        error does not concern single segments."""
        is_theirs = isinstance(error, DropError) and error.errno != errno.EROFS
        return is_theirs and len(self._state.segments.stuck) + len(left) <= self._most_stuck


def _left(chore: Drop, error: Exception | None) -> tuple[int, ...]:
    """Segments that could not be deleted."""
    if isinstance(error, DropError):
        return error.left
    return () if error is None else chore.numbers


@dataclass(frozen=True, slots=True)
class Seal(Chore[None]):
    number: int
    epoch: int
    end_offset: int

    def run(self, files: StoreFiles) -> None:
        files.segments.seal(self.number, self.epoch, self.end_offset)


class SegmentSealer(ChoreKind[Seal, None]):
    """Seals full segments: a start that searches a sealed segment does not read the payloads. `plan` waits for
    `journal`, because such a start offers every record of the segment that the journal does not withdraw."""

    def __init__(self, state: StoreState, journal: JournalWriter) -> None:
        super().__init__(state)
        self._journal = journal

    def plan(self) -> AnyDueChore | None:
        if self._journal.has_pending:
            return None
        sealable = self._state.segments.sealable
        while sealable:
            segment = next(iter(sealable.values()))
            if segment.epoch == self._state.epoch:
                return self._due(segment)
            del sealable[segment.number]  # the segment has an earlier epoch
        return None

    def plan_all(self) -> Iterator[AnyDueChore]:
        """Chores for all segments that can be sealed now. Does not wait for the journal."""
        for segment in list(self._state.segments.sealable.values()):
            if segment.epoch == self._state.epoch:
                yield self._due(segment)

    def _due(self, segment: Segment) -> AnyDueChore:
        return DueChore(self, Seal(segment.number, segment.epoch, segment.end_offset))

    def apply(self, chore: Seal, ending: Ending[None]) -> None:
        segments = self._state.segments
        if ending.is_success and chore.number in segments.by_number:
            segments.by_number[chore.number].is_sealed = True
            segments.refile(segments.by_number[chore.number])


_WRITABLE = (SegmentStage.READY, SegmentStage.OPEN)


@dataclass(frozen=True, slots=True)
class Restore(Chore[set[int] | None]):
    epoch: int
    segments: frozenset[int]
    """Segments that must exist on every rank. Other segments may be deleted on some ranks already."""

    needs_own: ClassVar[bool] = False

    def run(self, files: StoreFiles) -> set[int] | None:
        """Recreate removed directories. Returns the segments that every rank has now, after writing the epoch; None if
        no directory and no segment is missing."""
        namespace = files.namespace
        if not namespace.is_present():
            namespace.restore()
        numbers = [{segment_number(name) for name in directory.list()} for directory in namespace.ranks]
        present = {number for number in set.intersection(*numbers) if number is not None}
        if not namespace.is_recreated:
            if self.segments <= present:
                return None
            namespace.require_own()
        WriteEpoch(self.epoch).run(files)
        namespace.is_recreated = False
        return present


class Restorer(ChoreKind[Restore, set[int] | None]):
    """Recreates removed directories, and withdraws the records of missing files. Then the next write of `journal`
    writes the whole file."""

    makes_room = True

    def __init__(self, state: StoreState, journal: JournalWriter) -> None:
        super().__init__(state)
        self._journal = journal

    @property
    def is_due(self) -> bool:
        return self._state.may_lack_files and not self._state.retries.is_backing_off(Restore)

    def plan(self) -> AnyDueChore | None:
        state = self._state
        if not state.may_lack_files or state.retries.is_backing_off(Restore):
            return None
        known = state.segments.by_number.values()
        expected = (each for each in known if (each.stage in _WRITABLE or each.live_bytes) and not each.is_lost)
        segments = frozenset(each.number for each in expected)
        return DueChore(self, Restore(state.epoch, segments))

    def apply(self, chore: Restore, ending: Ending[set[int] | None]) -> None:
        state, segments, present = self._state, self._state.segments, ending.value
        if ending.error is not None:
            # The new directories have no epoch: a start would delete segments created there.
            state.is_epoch_written = state.is_epoch_written and not state.files.namespace.is_recreated
            return
        state.may_lack_files = False
        if present is None:
            return
        state.is_epoch_written = state.is_epoch_written or chore.epoch == state.epoch
        self._journal.lost()
        state.records.log.drop_until_snapshot()
        state.is_snapshot_wanted = True
        segments.close_open()
        lost = [each for each in segments.by_number.values() if each.number not in present and not each.is_lost]
        for segment in lost:
            self._lose(segment)
        path = state.files.namespace.path
        logger.warning("%s: %d segments are missing; hint: keep programs that delete old files away", path, len(lost))

    def _lose(self, segment: Segment) -> None:
        """Withdraw the records of a segment without files."""
        segments, records = self._state.segments, self._state.records
        if segment.stage is SegmentStage.READY:
            segments.ready.remove(segment)
        if segment.stage in (SegmentStage.READY, SegmentStage.UNAVAILABLE, SegmentStage.STUCK):
            segment.stage = SegmentStage.FULL
        segment.may_be_sealed, segment.is_lost = False, True
        records.withdraw_in(segment)
        segments.refile(segment)
