"""Cost of calls to a disk index does not depend on the number of segments. Counted in attribute reads, not seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import disk_store
import msgspec
import pytest

from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, plan_sizes
from hybridkv.tiers.disk.format.layout import SEGMENT_HEAD_BYTES
from hybridkv.tiers.disk.index.segments import Segment, SegmentStage
from hybridkv.tiers.disk.maintenance import segment_chores
from hybridkv.tiers.disk.maintenance.snapshots import Log
from hybridkv.tiers.disk.recovery import builder

RECORDS_IN_SEGMENT = 4
SEGMENT_BYTES = SEGMENT_HEAD_BYTES + RECORDS_IN_SEGMENT * 8192
FEW, MANY = 10, 300
NUM_CALLS = 400


class Looks:
    """Number of attribute reads on segments."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    looks = Looks()

    class Counted(Segment):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            looks.count += 1
            return super().__getattribute__(name)

    monkeypatch.setattr(builder, "Segment", Counted)
    monkeypatch.setattr(segment_chores, "Segment", Counted)
    return looks


def options_for(num_segments: int) -> DiskOptions:
    rough = DiskOptions(
        capacity_bytes=1 << 30,
        segment_bytes=SEGMENT_BYTES,
        max_records=10_000,
        max_quarantined=64,
        fsync=disk_store.Fsync.NONE,
    )
    metadata_bytes = plan_sizes(rough, 1).metadata_bytes
    return msgspec.structs.replace(rough, capacity_bytes=metadata_bytes + num_segments * SEGMENT_BYTES)


class Subject:
    """Disk index with its medium."""

    def __init__(self, path: Path, num_segments: int) -> None:
        options = options_for(num_segments)
        self.index: DiskIndex = disk_store.make_index(path, options)
        self.medium: DiskMedium = disk_store.make_medium(path, options)
        self.num_stored = 0

    def store(self, count: int, touched: bool = False) -> None:
        """Store `count` chunks. With `touched`, every second one stored about half a capacity ago is used again."""
        half = self.index.capacity_bytes // 2 // 8192
        for _ in range(count):
            assert disk_store.store(self.index, self.medium, b"%d" % self.num_stored, b"x" * 4000)
            self.num_stored += 1
            if touched and self.num_stored % 2:
                self.index.touch([b"%d" % (self.num_stored - half)])

    def fill(self, share: float, touched: bool = False) -> None:
        self.store(int(share * self.index.capacity_bytes) // 8192 - self.num_stored, touched)

    def close(self) -> None:
        self.medium.close()
        self.index.close()


def looks_a_call(looks: Looks, path: Path, num_segments: int, share: float, touched: bool) -> float:
    subject = Subject(path / f"{num_segments}", num_segments)
    num_calls = NUM_CALLS if share > 1 else RECORDS_IN_SEGMENT * 4
    subject.fill(share, touched)
    looks.count = 0
    subject.index.take_disk_counts()
    subject.store(num_calls, touched)
    found = looks.count / num_calls
    assert (subject.index.take_disk_counts().moved_records > 0) == touched
    subject.close()
    return found


@pytest.mark.parametrize(
    ("share", "touched"),
    [
        pytest.param(0.3, False, id="with room"),
        pytest.param(1.2, False, id="full"),
        pytest.param(1.5, True, id="compacting", marks=pytest.mark.full),
    ],
)
def test_a_store_reads_as_many_segments_however_many_exist(
    tmp_path: Path, looks: Looks, share: float, touched: bool
) -> None:
    few, many = (looks_a_call(looks, tmp_path, count, share, touched) for count in (FEW, MANY))
    assert 0 < many <= 1.5 * few, (few, many)


def full_segment(index: DiskIndex) -> tuple[bytes, Segment]:
    """A key with its record in a segment that takes no more records, and that segment."""
    segments, records = index._segments, disk_store.records_of(index)
    return next((key, found) for key in records if (found := segments.of(records[key].address)) is not segments.open)


def test_a_read_of_a_full_segment_starts_no_search_for_work(tmp_path: Path) -> None:
    subject = Subject(tmp_path / "store", FEW)
    subject.store(3 * RECORDS_IN_SEGMENT)
    index, segments = subject.index, subject.index._segments
    key, segment = full_segment(index)
    index.take_disk_counts()
    before = segments.revision
    assert index.pin(key) is not None
    assert not segment.is_candidate
    index.unpin(key)
    assert segment.is_candidate and segments.revision == before
    assert index.pin(key) is not None
    for record in disk_store.records_of(index).values():
        if segments.of(record.address) is segment:
            index.invalidate(record.key)
    before = segments.revision
    index.unpin(key)
    assert segments.revision > before, "a segment that its last reader releases for deletion is work"
    subject.close()


def test_the_end_of_a_read_starts_a_search_for_work_if_all_segments_were_pinned(tmp_path: Path) -> None:
    subject = Subject(tmp_path / "store", FEW)
    subject.store(3 * RECORDS_IN_SEGMENT)
    index, segments = subject.index, subject.index._segments
    keys = list(disk_store.records_of(index))
    for key in keys:
        assert index.pin(key) is not None
    assert index._maintenance._chores.copier.compaction.cheapest() is None
    before = segments.revision
    for key in keys:
        index.unpin(key)
    assert segments.revision > before
    assert index._maintenance._chores.copier.compaction.cheapest() is not None
    subject.close()


def test_reads_search_for_work_once_if_a_backoff_or_a_snapshot_without_changes_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = disk_store.Clock()
    options = options_for(FEW)
    index = disk_store.make_index(tmp_path / "store", options, clock=clock)
    medium = disk_store.make_medium(tmp_path / "store", options)
    assert disk_store.store(index, medium, b"a", b"x" * 4000)
    clock.now_s += options.snapshot_interval_s
    assert disk_store.load(index, medium, b"a") is not None
    index.take_disk_counts()
    chores, searches = index._maintenance._chores, list[float]()
    search = chores.next

    def counted() -> Any:
        searches.append(clock.now_s)
        return search()

    monkeypatch.setattr(chores, "next", counted)
    index._maintenance.state.retries.failed(Log, OSError(5, "Input/output error"))
    clock.now_s += options.snapshot_interval_s
    for _ in range(5):
        assert disk_store.load(index, medium, b"a") is not None
    assert len(searches) == 1
    medium.close()
    index.close()


def test_a_search_through_all_segments_is_counted(tmp_path: Path, looks: Looks) -> None:
    """Control for the test of stores: such a search would be seen."""
    subject = Subject(tmp_path / "store", MANY)
    subject.fill(0.3)
    looks.count = 0
    assert any(segment.is_candidate for segment in subject.index._segments.by_number.values())
    assert not [s for s in subject.index._segments.by_number.values() if s.stage is SegmentStage.UNAVAILABLE]
    assert looks.count >= MANY // 4
    subject.close()
