"""Stores stay within their capacity under any amount of data, and keep recently used chunks."""

from __future__ import annotations

import random
from pathlib import Path

import disk_store
import msgspec
import pytest
from examples import examples

from hybridkv.planner import LookupResult
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.disk import DiskCounts, DiskIndex, DiskOptions, Fsync, ThreadJanitor, plan_sizes
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, record_bytes

CAPACITY_BYTES = 16 << 20
OPTIONS = DiskOptions(capacity_bytes=CAPACITY_BYTES, segment_bytes=1 << 20, fsync=Fsync.NONE, max_in_flight=2)
CHUNK_BYTES = 30_000
POOL = random.Random(0).randbytes(1 << 20)


def chunk(number: int) -> bytes:
    return POOL[number % 9973 : number % 9973 + CHUNK_BYTES + number % 5 * 500]


@pytest.mark.parametrize("has_thread", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_store_stays_within_capacity_and_keeps_a_working_set(tmp_path: Path, has_thread: bool) -> None:
    path = tmp_path / "store"
    janitor = ThreadJanitor() if has_thread else None
    index = (
        DiskIndex(str(path), disk_store.FINGERPRINT, OPTIONS, janitor)
        if has_thread
        else disk_store.make_index(path, OPTIONS)
    )
    medium = disk_store.make_medium(path, OPTIONS)
    num_used = index.capacity_bytes // 2 // record_bytes(CHUNK_BYTES + 2000)
    working_set = [b"used %d" % number for number in range(num_used)]
    num_bytes = num_lookups = num_hits = number = 0
    while num_bytes < examples(20, 7) * CAPACITY_BYTES:
        # Two lookups of the working set for each chunk that is never used again.
        for turn in range(2):
            key = working_set[(2 * number + turn) % len(working_set)]
            is_warm = number > len(working_set)
            is_hit = index.lookup(key) is LookupResult.HIT
            num_lookups += is_warm
            num_hits += is_warm and is_hit
            if is_hit:
                index.touch([key])
            elif store(index, medium, key, chunk(turn), has_thread):
                num_bytes += len(chunk(turn))
        if store(index, medium, b"once %d" % number, chunk(number), has_thread):
            num_bytes += len(chunk(number))
        number += 1
        assert index._segments.allocated_bytes <= CAPACITY_BYTES
        assert has_thread or disk_store.disk_bytes(path) <= CAPACITY_BYTES
    assert num_hits > 0.95 * num_lookups, f"{num_hits} of {num_lookups}"
    assert index.drain(disk_store.TIMEOUT_S), "the janitor thread did not end its work"
    assert disk_store.disk_bytes(path) <= CAPACITY_BYTES
    counts = index.take_disk_counts()
    assert 0 < counts.moved_bytes < 1.5 * num_bytes, "compaction moves a bounded share"
    medium.close()
    index.close()


def store(index: DiskIndex, medium: disk_store.DiskMedium, key: bytes, data: bytes, has_thread: bool) -> bool:
    is_stored = disk_store.store(index, medium, key, data)
    if has_thread and not is_stored:
        index.drain(disk_store.TIMEOUT_S)
    return is_stored


@pytest.mark.parametrize("record_pages", [6, 11])
def test_compaction_does_not_copy_segments_that_records_cannot_fill(tmp_path: Path, record_pages: int) -> None:
    """Two of these records, or one, fill less of a segment's 17 pages than compaction would copy."""
    path = tmp_path / "store"
    options = DiskOptions(
        capacity_bytes=3 << 20, segment_bytes=18 * PAGE_BYTES, fsync=Fsync.NONE, max_in_flight=2, max_quarantined=64
    )
    index = disk_store.make_index(path, options)
    medium = disk_store.make_medium(path, options)
    count = 3 * index._segments.limit_bytes // (record_pages * PAGE_BYTES)
    for number in range(count):
        assert disk_store.store(index, medium, b"%d" % number, bytes((record_pages - 1) * PAGE_BYTES))
    assert index.take_disk_counts().moved_records <= count
    assert index.lookup(b"%d" % (count - 1)) is LookupResult.HIT
    medium.close()
    index.close()


def test_compaction_empties_segments_that_a_restart_left_unfilled(tmp_path: Path) -> None:
    path = tmp_path / "store"
    options = disk_store.options_for(16 * 8192, num_spare=3)
    for number in range(3):
        index = disk_store.make_index(path, options)
        medium = disk_store.make_medium(path, options)
        assert disk_store.store(index, medium, b"start %d" % number, b"x" * 4000)
        medium.close()
        index.close()
    index = disk_store.make_index(path, options)
    medium = disk_store.make_medium(path, options)
    for number in range(13):
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 4000)
    assert index.take_disk_counts().moved_records > 0
    keys = [b"start %d" % number for number in range(3)] + [b"%d" % number for number in range(13)]
    assert all(index.lookup(key) is LookupResult.HIT for key in keys)
    medium.close()
    index.close()


def test_compaction_keeps_a_used_record_among_dead_ones(tmp_path: Path) -> None:
    path = tmp_path / "store"
    options = disk_store.options_for(16 * 8192, num_spare=3)
    index = disk_store.make_index(path, options)
    medium = disk_store.make_medium(path, options)
    assert disk_store.store(index, medium, b"used", b"used" * 1000)
    for number in range(400):
        index.touch([b"used"])
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 4000)
    loaded = disk_store.load(index, medium, b"used")
    assert loaded is not None and loaded[1] == b"used" * 1000
    counts = index.take_disk_counts()
    assert counts.moved_records > 0 and counts.segments_dropped > 0
    medium.close()
    index.close()


@pytest.mark.parametrize("ready_segments", [1, 2, 5, None])
def test_a_store_goes_on_when_all_segments_are_in_use(tmp_path: Path, ready_segments: int | None) -> None:
    """A random half of the records is used again and again, so that hardly any segment dies by itself."""
    options = disk_store.options_for(6 * 8192, num_spare=15)
    options = msgspec.structs.replace(options, spare_share=0.0, ready_segments=ready_segments)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = disk_store.make_medium(tmp_path / "store", options)
    noise = random.Random(0)
    for number in range(300):
        held = sorted(disk_store.records_of(index))
        index.touch(noise.sample(held, len(held) // 2))
        assert disk_store.store(index, medium, b"%d" % number, b"x" * 4000)
    assert index.take_disk_counts().moved_records > 10
    medium.close()
    index.close()


def test_segments_held_by_pins_refuse_stores_until_the_pins_end(tmp_path: Path) -> None:
    options = disk_store.options_for(4 * 8192, num_spare=3)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = disk_store.make_medium(tmp_path / "store", options)
    pinned = []
    for number in range(60):
        if disk_store.store(index, medium, b"%d" % number, b"x" * 4000) and number % 4 == 0:
            assert index.pin(b"%d" % number) is not None
            pinned.append(b"%d" % number)
            if len(pinned) == 3:
                break
    assert all(index.lookup(key) is LookupResult.HIT for key in pinned)
    for number in range(60):
        disk_store.store(index, medium, b"more %d" % number, b"x" * 4000)
    assert all(index.lookup(key) is LookupResult.HIT for key in pinned)
    for key in pinned:
        index.unpin(key)
    assert all(disk_store.store(index, medium, b"again %d" % number, b"x" * 4000) for number in range(60))
    medium.close()
    index.close()


def test_max_records_is_not_exceeded(tmp_path: Path) -> None:
    options = msgspec.structs.replace(disk_store.options_for(16 * 8192), max_records=5)
    index = disk_store.make_index(tmp_path / "store", options)
    for number in range(20):
        key = b"%d" % number
        assert not isinstance(index.reserve(key, 100), str)
        index.commit(key)
        assert index.num_keys <= 5
    assert [index.lookup(b"%d" % number) for number in range(15, 20)] == [LookupResult.HIT] * 5
    index.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"capacity_bytes": 1 << 20}, "capacity_bytes"),
        ({"segment_bytes": 1000}, "segment_bytes"),
        ({"segment_bytes": 8192}, "segment_bytes"),
        ({"segment_bytes": 1 << 33}, "segment_bytes"),
        ({"segment_bytes": 512 << 10, "largest_chunk_bytes": 1 << 20}, "segment_bytes"),
        ({"spare_share": -0.1}, "spare_share"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"max_in_flight": 8, "max_open_files": 4}, "max_open_files"),
        ({"fsync": "sometimes"}, "fsync"),
        ({"direct": "maybe"}, "direct"),
        ({"batch_bytes": 5000}, "batch_bytes"),
        ({"max_queued": 0}, "max_queued"),
        ({"fsync_interval_s": -1.0}, "fsync_interval_s"),
    ],
)
def test_invalid_options_name_the_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(TierConfigurationError) as caught:
        plan_sizes(msgspec.structs.replace(OPTIONS, **changes), 1)
    assert caught.value.field == field


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("capacity_bytes", [256 << 20, 1 << 30, 1 << 40, 1 << 44])
def test_usual_sizes_leave_most_of_the_capacity_to_records(num_ranks: int, capacity_bytes: int) -> None:
    options = DiskOptions(capacity_bytes=capacity_bytes, largest_chunk_bytes=200_000)
    sizes = plan_sizes(options, num_ranks)
    assert 1 << 20 <= sizes.segment_bytes <= 256 << 20
    assert sizes.data_bytes + sizes.metadata_bytes == capacity_bytes
    assert sizes.usable_bytes * num_ranks > 0.7 * capacity_bytes
    assert sizes.usable_bytes * num_ranks < 0.92 * capacity_bytes


def test_disk_counts_merge_in_any_order() -> None:
    a = DiskCounts(moved_bytes=3, quarantined={"checksum": 1}, failures={"create: EIO": 2})
    b = DiskCounts(moved_bytes=4, snapshots=1, quarantined={"checksum": 2, "io": 1})
    assert a.merge(b) == b.merge(a)
    assert a.merge(b) == DiskCounts(
        moved_bytes=7, snapshots=1, quarantined={"checksum": 3, "io": 1}, failures={"create: EIO": 2}
    )
    assert a.merge(DiskCounts()) == a


def test_lookups_of_many_keys_equal_lookups_of_each_key(tmp_path: Path) -> None:
    index = disk_store.make_index(tmp_path / "store", disk_store.options_for(16 * 8192))
    states = [LookupResult.HIT, LookupResult.PENDING, LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
    keys = [b"%d" % number for number in range(len(states) + 1)]
    for key, state in zip(keys, [*states, LookupResult.MISS], strict=True):
        if state is not LookupResult.MISS:
            index.reserve(key, 100)
        if state is LookupResult.HIT:
            index.commit(key)
    index.reserve(b"doomed", 100)
    index.invalidate(b"doomed")
    assert (index.leading(keys), index.leading([]), index.leading(keys[3:])) == (3, 0, 0)
    assert (index.last_held(keys), index.last_held([]), index.last_held([keys[3]])) == (4, None, None)
    assert (index.any_pending(keys), index.any_pending([]), index.any_pending([keys[0], b"doomed"])) == (
        True,
        False,
        False,
    )
    index.close()
