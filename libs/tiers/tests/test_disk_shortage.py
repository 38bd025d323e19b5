"""A shortage of files, memory or threads in this process is BUSY: nothing was tried, and no stored chunk is lost."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import resource
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import disk_faults
import disk_store
import msgspec
import pytest
from disk_faults import CHUNK, Store
from disk_stack import Tiers
from examples import thinned

from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, Slot, Ticket, is_shortage
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, FileIO, Fsync
from hybridkv.tiers.stack import BreakerState, Direction, LeaseFailure
from kits.tiers.inline_janitor import InlineJanitor

SHORTAGES = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK]
OPTIONS = disk_store.options_for(24 * 12288, num_spare=3, direct=False)
NUM_CHUNKS = 12
KEYS = [b"chunk %d" % number for number in range(NUM_CHUNKS)]


@pytest.mark.parametrize("number", SHORTAGES)
def test_a_promotion_without_files_loses_no_chunk(tmp_path: Path, number: int) -> None:
    tiers = Tiers(tmp_path / "store", OPTIONS)
    assert tiers.store(KEYS) == [None] * NUM_CHUNKS
    tiers.clear_primary()
    tiers.io.failing["open"] = number
    lease = tiers.lease(KEYS)
    failures = tiers.move()
    assert {failure.reason for failure in failures if failure} == {FailureReason.BUSY} and len(failures) == NUM_CHUNKS
    assert lease.failure is LeaseFailure.LOST
    assert tiers.index.take_disk_counts().quarantined == {}
    assert tiers.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED
    tiers.io.failing.clear()
    tiers.clock.now_s += 5
    lease = tiers.lease(KEYS)
    assert tiers.move() == [None] * NUM_CHUNKS and lease.is_ready
    tiers.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_failing_disk_is_no_shortage(tmp_path: Path, number: int) -> None:
    """Control: the test before would also pass if nothing were ever withdrawn."""
    tiers = Tiers(tmp_path / "store", OPTIONS)
    assert tiers.store(KEYS) == [None] * NUM_CHUNKS
    tiers.clear_primary()
    tiers.io.failing["open"] = number
    tiers.lease(KEYS)
    assert {failure.reason for failure in tiers.move() if failure} == {FailureReason.IO}
    assert tiers.index.take_disk_counts().quarantined == {"io": NUM_CHUNKS}
    assert tiers.stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.OPEN
    tiers.close()


def test_a_store_without_files_keeps_the_chunk_in_the_primary_tier(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path / "store", OPTIONS)
    tiers.io.failing["open"] = errno.EMFILE
    assert [failure.reason for failure in tiers.store(KEYS[:1]) if failure] == [FailureReason.BUSY]
    assert tiers.primary.lookup(KEYS[0]) is LookupResult.HIT and tiers.index.lookup(KEYS[0]) is LookupResult.MISS
    assert tiers.stack.breaker_state(Direction.CASCADE, "disk") is BreakerState.CLOSED
    tiers.io.failing.clear()
    tiers.clock.now_s += 5
    tiers.stack.cascade(KEYS[0])
    assert tiers.move() == [None] and tiers.index.lookup(KEYS[0]) is LookupResult.HIT
    tiers.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize("number", SHORTAGES)
def test_a_call_without_memory_is_busy_and_keeps_its_file_open(tmp_path: Path, call: str, number: int) -> None:
    store = Store(tmp_path / "store")
    assert store.store(b"key")
    opened = store.medium._cache._open[0]
    store.io.failing[call] = number
    if call == "preadv":
        assert store.load_fails_with(b"key") is FailureReason.BUSY
    else:
        assert busy_store(store.index, store.medium, b"other") is FailureReason.BUSY
    store.io.failing.clear()
    assert store.load_fails_with(b"key") is None
    assert store.medium._cache._open[0] is opened, (
        "a process short of files does not close one that it has to open again"
    )
    store.close()


def busy_store(index: DiskIndex, medium: DiskMedium, key: bytes) -> FailureReason | None:
    slot = index.reserve(key, len(CHUNK))
    assert isinstance(slot, Slot)
    medium.store(Ticket(1), key, slot, [CHUNK])
    [completion] = disk_store.finish(medium)
    index.abort(key)
    return completion.failure.reason if completion.failure else None


def test_memory_that_runs_out_during_an_operation_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    assert store.store(b"key")

    def without_memory(self: FileIO, *arguments: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(disk_faults.FaultyIO, "preadv", without_memory)
    assert store.load_fails_with(b"key") is FailureReason.BUSY
    monkeypatch.undo()
    assert store.load_fails_with(b"key") is None
    store.close()


def test_without_threads_or_memory_for_them_an_operation_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, error in (
        ("thread", RuntimeError("can't start new thread")),
        ("mmap", OSError(errno.ENOMEM, "no memory")),
        ("thread", MemoryError()),
    ):
        store = Store(tmp_path / f"store-{name}-{type(error).__name__}")

        def refuse(*arguments: Any, error: Exception = error, **named: Any) -> None:
            raise error

        slot = store.index.reserve(b"key", len(CHUNK))
        assert isinstance(slot, Slot)
        with monkeypatch.context() as patch:
            patch.setattr(*((threading.Thread, "start") if name == "thread" else (mmap, "mmap")), refuse)
            store.medium.store(Ticket(1), b"key", slot, [CHUNK])
            [completion] = store.medium.poll()
        assert completion.failure is not None and completion.failure.reason is FailureReason.BUSY
        store.index.abort(b"key")
        assert store.store(b"key"), "and it works afterwards"
        store.close()


def test_an_index_without_a_thread_releases_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread") as raised:
            DiskIndex(str(tmp_path / "store"), disk_store.FINGERPRINT, OPTIONS)
    assert raised.tb is not None, "the failed index is still referenced"
    disk_store.make_index(tmp_path / "store", OPTIONS).close()


def test_a_medium_without_a_thread_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    medium = DiskMedium(str(tmp_path / "store"), disk_store.FINGERPRINT.digest(), 0, OPTIONS)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert busy_store(index, medium, b"key") is FailureReason.BUSY  # no thread opens the file
    assert disk_store.store(index, medium, b"key", CHUNK)
    medium.close()
    index.close()


def test_no_direct_io_and_no_threads_lose_no_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a read shows that O_DIRECT is not supported, and then no thread can open the file again."""
    options = msgspec.structs.replace(OPTIONS, direct="auto")
    index = disk_store.make_index(tmp_path / "store", options)
    medium = DiskMedium(str(tmp_path / "store"), disk_store.FINGERPRINT.digest(), 0, options)
    assert disk_store.store(index, medium, b"key", CHUNK)
    runner: Any = medium._runner
    if not runner._direct.is_on:
        pytest.skip("this file system has no O_DIRECT")
    runner._open_later = lambda operation: False

    class Refusing:
        """Queue with calls that fail with EINVAL."""

        def __init__(self, queue: Any) -> None:
            self._queue = queue
            self._refused: list[tuple[int, int, int, bytes, bytes]] = []

        def submit(self, tag: int, *arguments: Any) -> bool:
            self._refused.append((tag, 1, errno.EINVAL, b"", b""))
            return True

        def take(self) -> list[tuple[int, int, int, bytes, bytes]]:
            refused, self._refused = self._refused, []
            return refused

        def wait_until_idle(self, timeout_s: float) -> bool:
            return True

    queue, runner._queue = runner._queue, Refusing(runner._queue)
    loaded = disk_store.load(index, medium, b"key")
    assert loaded is not None and loaded[0].failure is not None
    assert loaded[0].failure.reason is FailureReason.BUSY
    runner._queue = queue
    medium.close()
    index.close()


def test_a_medium_without_threads_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = msgspec.structs.replace(OPTIONS, close_timeout_s=0.5)
    index = disk_store.make_index(tmp_path / "store", options)
    medium = DiskMedium(str(tmp_path / "store"), disk_store.FINGERPRINT.digest(), 0, options)
    assert disk_store.store(index, medium, b"key", CHUNK)

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    num_open = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        medium.close()
    assert len(os.listdir("/proc/self/fd")) < num_open, "its files are closed"
    index.close()


@pytest.mark.parametrize(
    ("call", "number"), thinned([*itertools.product(["open", "preadv", "pwritev", "fdatasync"], SHORTAGES)], 3)
)
def test_a_copy_with_a_shortage_withdraws_no_record(tmp_path: Path, call: str, number: int) -> None:
    options = msgspec.structs.replace(disk_faults.OPTIONS, fsync=Fsync.ALWAYS)
    store = Store(tmp_path / "store", options)
    copying = store.index._maintenance.state.files.segments.copy
    tried: list[int] = []

    def short_copy(relocations: Any) -> Any:
        tried.append(len(relocations))
        if len(tried) > 2:
            return copying(relocations)
        store.io.failing[call] = number
        try:
            return copying(relocations)
        finally:
            store.io.failing.clear()

    store.index._maintenance.state.files.segments.copy = short_copy  # type: ignore[method-assign]
    for _ in range(120):
        store.clock.now_s += options.retry_interval_s
        store.store()
        store.index.touch([b"1"])
    assert len(tried) > 2, "records were copied"
    counts = store.index.take_disk_counts()
    assert counts.quarantined == {} and f"copy: {errno.errorcode[number]}" in counts.failures
    assert store.load_fails_with(b"1") is None
    store.close()


class ShortAfterOpening(FileIO):
    """Segment files can be opened, and reads fail for lack of memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: set[int] = set()

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        fd = super().open(name, flags, mode, dir_fd)
        if name.startswith("segment-"):
            self.segments.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.segments.discard(fd)
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fd in self.segments:
            raise OSError(self.number, os.strerror(self.number))
        return super().preadv(fd, buffers, offset)


def stored(path: Path, options: DiskOptions = OPTIONS) -> set[bytes]:
    """Keys of a store that was filled and closed."""
    store = Store(path, options)
    keys = {b"%d" % (number + 1) for number in range(8) if store.store()}
    store.close()
    return keys


@pytest.mark.parametrize("number", SHORTAGES)
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_opening_with_a_shortage_fails_and_drops_nothing(tmp_path: Path, call: str, number: int) -> None:
    path = tmp_path / "store"
    keys = stored(path)
    io: FileIO = ShortAfterOpening(number)
    if call == "open":
        io = disk_faults.FaultyIO()
        io.failing_names = {f"segment-{0:010d}": number, "snapshot": number}
    with pytest.raises(Exception, match=os.strerror(number)):
        disk_store.make_index(path, OPTIONS, io)
    index = disk_store.make_index(path, OPTIONS)
    assert set(disk_store.records_of(index)) == keys
    index.close()


def test_an_opening_without_threads_reads_segments_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store"
    options = DiskOptions(capacity_bytes=4 << 20, segment_bytes=32768, fsync=Fsync.NONE, direct=False)
    store = Store(path, options)
    for _ in range(24):
        assert store.store()
    keys = set(disk_store.records_of(store.index))
    store.medium.close()
    store.index._namespace.close()  # as a crash

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    index = disk_store.make_index(path, options)
    assert len(keys) == 24 and set(disk_store.records_of(index)) == keys
    assert "one segment is read after the other" in caplog.text
    index.close()


@pytest.mark.parametrize("number", SHORTAGES)
def test_a_directory_that_cannot_be_read_is_not_taken_as_removed(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "store")
    assert store.store(b"key")
    maintenance = store.index._maintenance
    maintenance.state.may_lack_files = True
    store.io.failing["open"] = number
    maintenance.run()
    assert maintenance.state.may_lack_files and "was removed" not in caplog.text
    store.io.failing.clear()
    store.clock.now_s += OPTIONS.retry_interval_s
    maintenance.run()
    assert not maintenance.state.may_lack_files
    assert store.load_fails_with(b"key") is None
    store.close()


def test_an_unreadable_size_of_other_caches_is_not_taken_as_zero(tmp_path: Path) -> None:
    """Otherwise this cache would grow beyond the capacity of both."""
    path = tmp_path / "store"
    other = disk_store.make_index(path, OPTIONS, model="another")
    store = Store(path)
    number_before = len(store.index._segments.by_number)
    store.io.failing_names = {disk_store.fingerprint(model="another").digest().hex(): errno.EMFILE}
    store.index._segments.revision += 1
    for _ in range(40):
        store.clock.now_s += OPTIONS.retry_interval_s
        store.store()
    assert len(store.index._segments.by_number) == number_before
    assert "create: EMFILE" in store.index.take_disk_counts().failures
    store.close()
    other.close()


def test_a_segment_that_one_rank_could_not_make_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    options = disk_store.options_for(6 * 12288, num_ranks=2, num_spare=3, direct=False)

    class LastFile(FileIO):
        """The second rank's file, and every later one, exceeds the limit of open files."""

        has_run_out = False

        def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
            if name.startswith("segment-") and dir_fd is not None:
                rank = os.readlink(f"/proc/self/fd/{dir_fd}")
                self.has_run_out = self.has_run_out or rank.endswith("rank-1")
                if self.has_run_out:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(name, flags, mode, dir_fd)

    index = DiskIndex(
        str(path),
        disk_store.fingerprint(tensor_parallel_size=2),
        options,
        InlineJanitor(),
        LastFile(),
        disk_store.Clock(),
    )
    assert index.take_disk_counts().failures == {"create: EMFILE": 1}
    assert list(path.rglob("segment-*")) == []
    index.close()


def test_a_sync_without_a_free_file_is_made_later(tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, fsync=Fsync.INTERVAL, fsync_interval_s=0.0)
    store = Store(tmp_path / "store", options)
    syncer = store.medium._runner._syncer  # type: ignore[attr-defined]
    synced = threading.Event()
    store.io.stalled["fdatasync"] = synced
    synced.set()
    assert store.store(b"key")
    store.medium._runner.close()
    syncer._dirty.add(0)
    store.medium._cache.forget(0)
    before = store.io.count("fdatasync")
    store.io.failing["open"] = errno.EMFILE
    syncer.sync()
    assert store.io.count("fdatasync") == before and syncer._dirty == {0}
    store.io.failing.clear()
    syncer.sync()
    assert store.io.count("fdatasync") == before + 1 and not syncer._dirty
    store.close()


LIMITED = """
import os, pathlib, resource, sys
import disk_stack
import test_disk_shortage as test
from hybridkv.tiers import FailureReason
tiers = disk_stack.Tiers(pathlib.Path(sys.argv[1]), test.OPTIONS)
assert tiers.store(test.KEYS) == [None] * test.NUM_CHUNKS
tiers.clear_primary()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, limits[1]))
tiers.lease(test.KEYS)
failures = tiers.move()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert [failure.reason for failure in failures] == [FailureReason.BUSY] * test.NUM_CHUNKS, failures
assert all("EMFILE" in failure.detail for failure in failures), failures
assert tiers.index.take_disk_counts().quarantined == {}
tiers.clock.now_s += 5
lease = tiers.lease(test.KEYS)
assert tiers.move() == [None] * test.NUM_CHUNKS and lease.is_ready
tiers.close()
"""


def test_a_real_limit_of_open_files_loses_no_chunk(tmp_path: Path) -> None:
    """In its own process, because the limit applies to a whole process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path / "store")],
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((OSError(number, "x"), True) for number in SHORTAGES),
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("Resource temporarily unavailable"), True),
        (OSError(errno.EIO, "x"), False),
        (OSError(errno.ENOSPC, "x"), False),
        (OSError("without a number"), False),
        (RuntimeError("a bug"), False),
        (ValueError("x"), False),
    ],
    ids=str,
)
def test_shortages_are_recognised_by_errno_and_message(error: Exception, expected: bool) -> None:
    assert is_shortage(error) is expected
