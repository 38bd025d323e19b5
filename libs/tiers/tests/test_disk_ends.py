"""Cost of the end of a disk tier: for the caller, in memory, and in waits for the janitor.

Costs are counted in calls and bytes, never in seconds.
"""

from __future__ import annotations

import errno
import gc
import logging
import shutil
import sys
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import disk_faults
import disk_store
import pytest

from hybridkv.planner import LookupResult
from hybridkv.tiers import Slot, TierConfigurationError, TierIndex
from hybridkv.tiers.disk import DiskIndex, DiskOptions, FileIO, ThreadJanitor
from hybridkv.tiers.files.directory import Directory
from hybridkv.tiers.ram import RamIndex
from kits.tiers.inline_janitor import InlineJanitor

RECORD_BYTES = 8192
FEW, MANY = 64, 6000
LARGEST_TABLE_BYTES = 40_000
"""More than an end allocates for a few records, less than a copy of any table of many."""


class SparseIO(FileIO):
    """Allocates sparse segments, since no data is written to them. Records writes to the snapshot."""

    def __init__(self) -> None:
        self.snapshot_fd = -1
        self.written: list[int] = []
        self.on_snapshot: Callable[[], None] = lambda: None

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.truncate(fd, num_bytes)

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        fd = super().open(name, flags, mode, dir_fd)
        if name == "snapshot.new":
            self.snapshot_fd = fd
        return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        if fd == self.snapshot_fd:
            self.snapshot_fd = -1

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        if fd == self.snapshot_fd:
            self.written.append(sum(map(len, buffers)))
            self.on_snapshot()
        return super().pwritev(fd, buffers, offset)


class LateJanitor(InlineJanitor):
    """Janitor that runs tasks only when a test calls `work`: the caller's cost is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Callable[[], None]] = []
        self.is_late = False

    def submit(self, task: Callable[[], None]) -> bool:
        if not self.is_late:
            return super().submit(task)
        self.tasks.append(task)
        return True

    def close(self, timeout_s: float) -> bool:
        return super().close(timeout_s) and not self.tasks

    def run_at_end(self, last: Callable[[], None]) -> bool:
        self.tasks.append(last)
        return True

    def work(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


def options(count: int = MANY) -> DiskOptions:
    return disk_store.options_for(count * RECORD_BYTES, max_records=8 * count, close_timeout_s=0.0)


def opened(path: Path, io: FileIO, janitor: InlineJanitor | None = None) -> DiskIndex:
    clock = disk_store.Clock()
    return DiskIndex(str(path), disk_store.FINGERPRINT, options(), janitor or InlineJanitor(), io, clock)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def fill(index: TierIndex, count: int, num_bytes: int = RECORD_BYTES // 2) -> list[bytes]:
    """Keys of `count` committed chunks. One more is pinned, and one reserved."""
    keys = [key_of(number) for number in range(count)]
    for key in [*keys, b"pinned"]:
        assert isinstance(index.reserve(key, num_bytes), Slot)
        assert index.commit(key)
    assert index.pin(b"pinned") is not None
    assert isinstance(index.reserve(b"reserved", num_bytes), Slot)
    return keys


def steps_and_bytes(call: Callable[[], object]) -> tuple[int, int]:
    """Number of Python and C calls in this thread during `call`, and its peak memory."""
    steps = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    gc.disable()  # hypothesis adds a callback to the collector, and its calls would count here
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return steps, peak - before


@pytest.mark.parametrize("end", [DiskIndex.clear, DiskIndex.close])
def test_an_end_costs_the_caller_no_step_per_record(tmp_path: Path, end: Callable[[DiskIndex], object]) -> None:
    steps = []
    for turn, count in enumerate((FEW, FEW, MANY - 2)):
        janitor = LateJanitor()
        index = opened(tmp_path / str(turn), SparseIO(), janitor)
        keys = fill(index, count)
        index.take_counts()
        janitor.is_late = True
        num_steps, num_bytes = steps_and_bytes(lambda index=index: end(index))  # type: ignore[misc]
        steps.append(num_steps)
        assert num_bytes < LARGEST_TABLE_BYTES
        assert {index.lookup(key) for key in keys} == {LookupResult.MISS}
        assert (index.used_bytes, index.num_keys) == (2 * RECORD_BYTES, 0)
        assert index.take_counts().invalidations == count + 2
        janitor.work()
        index.close()
    # The first run fills some of Python's own tables.
    assert steps[1] == steps[2]


@pytest.mark.parametrize("name", ["clear", "close"])
def test_an_end_of_host_memory_costs_no_step_per_chunk(name: str) -> None:
    steps, end = [], getattr(RamIndex, name)
    for count in (FEW, FEW, MANY):
        index = RamIndex((count + 2) * 4096, 4096)
        keys = fill(index, count, 4096)
        num_steps, num_bytes = steps_and_bytes(lambda index=index: end(index))  # type: ignore[misc]
        steps.append(num_steps)
        assert num_bytes < LARGEST_TABLE_BYTES
        assert {index.lookup(key) for key in keys} == {LookupResult.MISS}
        assert (index.used_bytes, index.num_keys) == (2 * 4096, 0)
        assert index.take_counts().invalidations == count + 2
        index.unpin(b"pinned")
        assert not index.commit(b"reserved")
        assert index.used_bytes == 0
    # The first run fills some of Python's own tables.
    assert steps[1] == steps[2]


def test_a_closed_index_leaves_its_snapshot_to_the_janitor(tmp_path: Path) -> None:
    """The snapshot is made from the tables at the time of the close, whatever happens to the new ones meanwhile."""
    janitor = LateJanitor()
    index = opened(tmp_path / "store", SparseIO(), janitor)
    keys = fill(index, FEW)
    janitor.is_late = True
    index.close()
    index.unpin(b"pinned")
    assert not index.commit(b"reserved")
    janitor.work()
    index._namespace.close()
    again = opened(tmp_path / "store", SparseIO())
    assert list(disk_store.records_of(again)) == [*keys, b"pinned"]
    again.close()


def test_a_snapshot_is_written_in_pieces_not_all_in_memory(tmp_path: Path) -> None:
    count = 60_000
    io = SparseIO()
    chosen = disk_store.options_for(count * RECORD_BYTES, max_records=count)
    index = disk_store.make_index(tmp_path / "store", chosen, io)
    for number in range(count - 2):
        assert isinstance(index.reserve(key_of(number), 1), Slot)
        index.commit(key_of(number))
    assert index.drain(disk_store.TIMEOUT_S)
    io.written.clear()
    gc.collect()
    _, peak_bytes = steps_and_bytes(index._maintenance.finish)
    snapshot_bytes = sum(io.written)
    assert snapshot_bytes > (32 + 18) * (count - 2)
    assert max(io.written) < snapshot_bytes // 4
    # Keys and columns, a second copy of them, and the pieces.
    assert peak_bytes < 3 * snapshot_bytes + (2 << 20)
    index.close()


def test_a_clear_does_not_wait_for_a_snapshot_being_written(tmp_path: Path) -> None:
    io, janitor = SparseIO(), LateJanitor()
    index = opened(tmp_path / "store", io, janitor)
    fill(index, MANY - 2)
    index.take_disk_counts()
    path = tmp_path / "store" / index.namespace.hex() / "snapshot"
    before = path.read_bytes()

    def clear() -> None:
        """Clears while the snapshot is written; the janitor goes on with the snapshot first."""
        io.on_snapshot = lambda: None
        janitor.is_late = True
        index.clear()

    io.on_snapshot = clear
    io.written.clear()
    index._maintenance.state.is_snapshot_wanted = True
    assert index.take_disk_counts().snapshots == 0
    assert len(io.written) == 1 and io.written[0] < (32 + 18) * (MANY - 2), "the rest of the snapshot is not written"
    assert path.read_bytes() == before
    janitor.work()
    janitor.is_late = False
    assert index.take_disk_counts().snapshots == 1, "a snapshot of the new epoch follows soon"
    assert path.read_bytes() != before
    index.close()


def test_the_log_replaces_a_missing_last_snapshot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = disk_faults.FaultyIO()
    index = opened(tmp_path / "store", io)
    keys = fill(index, FEW)
    index.touch(keys[:2])
    io.failing_names["snapshot.new"] = errno.ENOSPC
    index.close()
    assert "save: ENOSPC" in caplog.text
    with caplog.at_level(logging.INFO):
        again = opened(tmp_path / "store", FileIO())
    assert list(disk_store.records_of(again)) == [*keys[2:], b"pinned", *keys[:2]]
    assert "(1 of " in caplog.text, "only the place of the reserved record is read"
    again.close()


def test_a_close_gives_up_a_snapshot_that_takes_too_long(tmp_path: Path) -> None:
    """Here its first write takes longer than the time left. The store is complete without it."""
    io = SparseIO()
    index = opened(tmp_path / "store", io)
    keys = fill(index, MANY - 2)
    io.on_snapshot = index._maintenance.cancel_snapshot
    io.written.clear()
    index.close()
    assert len(io.written) == 1
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    again = opened(tmp_path / "copy", SparseIO())
    assert set(disk_store.records_of(again)) == {*keys, b"pinned"}
    again.close()


@pytest.mark.parametrize("max_queued", [1, 64])
def test_a_close_without_time_releases_the_lock_after_file_work(tmp_path: Path, max_queued: int) -> None:
    io, path, clock = disk_faults.FaultyIO(), str(tmp_path / "store"), disk_store.Clock()
    janitor = ThreadJanitor(max_queued)
    index = DiskIndex(path, disk_store.FINGERPRINT, options(FEW), janitor, io, clock)
    assert index.drain(disk_store.TIMEOUT_S)
    held = io.stalled["open"] = threading.Event()
    io.has_stalled.clear()
    assert isinstance(index.reserve(b"a", RECORD_BYTES // 2), Slot) and index.commit(b"a")
    clock.now_s += 1000  # a snapshot is due
    index.take_counts()
    assert io.has_stalled.wait(disk_store.TIMEOUT_S)
    index.close()
    with pytest.raises(TierConfigurationError, match="no other engine has open"):
        opened(tmp_path / "store", FileIO())
    held.set()
    assert janitor._thread.wait_until_ended(disk_store.TIMEOUT_S)
    opened(tmp_path / "store", FileIO()).close()


def test_a_closed_janitor_accepts_no_last_task() -> None:
    janitor = ThreadJanitor()
    done: list[int] = []
    assert janitor.close(disk_store.TIMEOUT_S)
    assert not janitor.run_at_end(lambda: done.append(1))
    assert not done


def test_readers_keep_their_bytes_after_a_clear(tmp_path: Path) -> None:
    chosen = disk_store.options_for(4 * RECORD_BYTES, close_timeout_s=0.0)
    index = disk_store.make_index(tmp_path / "store", chosen)
    medium = disk_store.make_medium(tmp_path / "store", chosen)
    chunks = {number.to_bytes(1, "little"): bytes([number]) * 4096 for number in range(4)}
    for key, chunk in chunks.items():
        assert disk_store.store(index, medium, key, chunk)
    slot = index.pin(b"\1")
    assert slot is not None
    assert index.clear() == 4
    assert disk_store.segment_path(tmp_path / "store", slot).exists()
    loaded = bytearray(4096)
    medium.load(disk_store.Ticket(7), b"\1", slot, [loaded])
    [completion] = disk_store.finish(medium)
    assert completion.failure is None and bytes(loaded) == chunks[b"\1"]
    index.unpin(b"\1")
    index.take_counts()
    assert not disk_store.segment_path(tmp_path / "store", slot).exists()
    assert disk_store.store(index, medium, b"\1", chunks[b"\2"])
    medium.close()
    index.close()


def test_a_file_is_unchanged_if_a_write_in_pieces_fails(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o700)
    directory = Directory.root(FileIO(), str(tmp_path / "root"), create=False)
    pieces = [bytes([number]) * (1 << 17) for number in range(5)]
    directory.write_pieces("file", pieces, sync=True)
    assert directory.read_file("file") == b"".join(pieces)
    with pytest.raises(ZeroDivisionError):
        directory.write_pieces("file", (bytes(1 << 17) + bytes([1 // (3 - turn)]) for turn in range(5)), sync=True)
    assert directory.read_file("file") == b"".join(pieces)
    assert directory.list() == ["file"], "half-written data takes up no room"
    directory.close()
