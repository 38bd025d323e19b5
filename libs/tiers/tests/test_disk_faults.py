"""System errors become refusals or failed operations, are counted by reason, and end with their cause."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import disk_faults
import disk_store
import msgspec
import pytest
from disk_faults import CHUNK, Store

from hybridkv.planner import LookupResult
from hybridkv.tiers import FailureReason, Refusal, Slot, Ticket
from hybridkv.tiers.disk import DiskIndex, FileIO, ThreadJanitor

OPTIONS = disk_faults.OPTIONS


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
def test_segments_that_cannot_be_made_are_refusals_until_they_can(tmp_path: Path, number: int) -> None:
    store = Store(tmp_path / "store")
    store.io.failing["allocate"] = number
    taken = sum(store.store() for _ in range(60))
    assert 0 < taken < 60
    name = errno.errorcode[number]
    assert store.index.take_counts().refusals == {Refusal.NO_ROOM: 60 - taken}
    assert store.index.take_disk_counts().failures.keys() == {f"create: {name}"}
    store.io.failing.clear()
    assert not store.store(), "file work backs off for a while"
    store.clock.now_s += OPTIONS.retry_interval_s
    store.fill()
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_file_system_that_stays_full_keeps_most_records(tmp_path: Path, number: int) -> None:
    options = disk_store.options_for(6 * 12288, num_spare=9, direct=False)
    store = Store(tmp_path / "store", msgspec.structs.replace(options, spare_share=0.0))
    store.fill()
    before = store.index.num_keys
    assert before > 30
    store.io.failing["allocate"] = number
    num_taken = 0
    for _ in range(200):
        store.clock.now_s += options.retry_interval_s
        num_taken += store.store()
    assert store.index.num_keys > before - 4 * 6, "only a segment or two were given up to make room"
    assert num_taken < 4 * 6, "stores are dropped meanwhile"
    for key in list(disk_store.records_of(store.index)):
        assert store.load_fails_with(key) is None
    store.io.failing.clear()
    store.clock.now_s += options.retry_interval_s
    store.fill()
    store.close()


def test_a_file_system_smaller_than_the_capacity_is_used_fully(tmp_path: Path) -> None:
    """Each segment that is given up makes room for another."""
    options = msgspec.structs.replace(disk_store.options_for(6 * 12288, direct=False), spare_share=0.0)
    store = Store(tmp_path / "store", options)
    most_bytes = 5 * (options.segment_bytes or 0)

    class Small(FileIO):
        def allocate(self, fd: int, num_bytes: int) -> None:
            if sum(file.stat().st_size for file in store.path.rglob("segment-*")) + num_bytes > most_bytes:
                raise OSError(errno.ENOSPC, "full")
            super().allocate(fd, num_bytes)

    store.index.close()
    store.index = disk_store.make_index(store.path, options, Small(), store.clock)
    assert all([store.store() for _ in range(120)][60:])
    assert store.index.take_disk_counts().failures.keys() == {"create: ENOSPC"}
    assert store.index.num_keys >= 2 * 6
    store.close()


def test_a_file_system_full_from_the_start_is_a_refusal(tmp_path: Path) -> None:
    io = disk_faults.FaultyIO()
    io.failing["allocate"] = errno.ENOSPC
    index = disk_store.make_index(tmp_path / "store", OPTIONS, io)
    assert index.reserve(b"key", 100) is Refusal.NO_ROOM
    assert index.used_bytes == 0
    index.close()


@pytest.mark.parametrize("call", ["truncate", "remove"])
def test_segments_that_cannot_be_deleted_stop_new_ones_until_they_can(tmp_path: Path, call: str) -> None:
    store = Store(tmp_path / "store")
    store.fill()
    store.io.failing[call] = errno.EIO
    refused = sum(not store.store() for _ in range(60))
    assert refused
    assert disk_store.disk_bytes(store.path) <= OPTIONS.capacity_bytes
    store.io.failing.clear()
    store.clock.now_s += OPTIONS.retry_interval_s
    store.fill()
    assert disk_store.disk_bytes(store.path) <= OPTIONS.capacity_bytes
    store.close()


def test_a_segment_that_cannot_be_deleted_does_not_block_other_deletions(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.store()
    slot = store.index.pin(b"1")
    assert slot is not None
    store.index.unpin(b"1")
    store.io.failing_names[disk_store.segment_path(store.path, slot).name] = errno.EIO
    taken = []
    for _ in range(120):
        store.clock.now_s += OPTIONS.retry_interval_s
        taken.append(store.store())
    assert "drop: EIO" in store.index.take_disk_counts().failures
    assert sum(taken[-60:]) > 30
    assert disk_store.disk_bytes(store.path) <= OPTIONS.capacity_bytes
    store.close()


def test_compaction_goes_on_beside_a_segment_that_cannot_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A random half of the records is used again and again, so that hardly any segment dies by itself."""
    options = msgspec.structs.replace(disk_store.options_for(6 * 12288, num_spare=15, direct=False), spare_share=0.0)
    store = Store(tmp_path / "store", options)
    store.fill()
    slot = store.index.pin(b"1")
    assert slot is not None
    store.index.unpin(b"1")
    stuck = disk_store.segment_path(store.path, slot)
    store.io.failing_names[stuck.name] = errno.EIO
    taken, noise = [], random.Random(0)
    with caplog.at_level("INFO", logger="hybridkv.tiers.disk"):
        for number in range(400):
            held = sorted(disk_store.records_of(store.index))
            store.index.touch(noise.sample(held, len(held) // 2))
            store.clock.now_s += number % 2 * options.retry_interval_s
            taken.append(store.store())
        counts = store.index.take_disk_counts()
        assert stuck.exists() and counts.failures["drop: EIO"] > 1 and counts.moved_records > 10
        assert all(taken[-300:])
        assert disk_store.disk_bytes(store.path) <= options.capacity_bytes
        assert caplog.text.count("drop: EIO") == 1 and "works again" not in caplog.text
        store.io.failing_names.clear()
        store.clock.now_s += options.retry_interval_s
        assert store.store() and not stuck.exists()
        assert caplog.text.count("works again after drop: EIO") == 1
    store.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
def test_a_disk_without_deletions_gives_up_few_records(tmp_path: Path, number: int) -> None:
    options = msgspec.structs.replace(disk_store.options_for(6 * 12288, num_spare=15, direct=False), spare_share=0.0)
    store = Store(tmp_path / "store", options)
    for _ in range(90):
        assert store.store()
    before = store.index.num_keys
    store.io.failing["remove"] = number
    for _ in range(300):
        store.clock.now_s += options.retry_interval_s
        store.store()
    assert store.index.num_keys > before - 4 * 6
    store.io.failing.clear()
    store.clock.now_s += options.retry_interval_s
    store.fill()
    store.close()


def test_a_read_that_fails_is_one_failed_load(store: Store) -> None:
    assert store.store(b"key")
    store.io.failing["preadv"] = errno.EIO
    assert store.load_fails_with(b"key") is FailureReason.IO
    store.io.failing.clear()
    assert store.load_fails_with(b"key") is None
    store.close()


def test_a_damaged_record_does_not_fail_its_neighbours(store: Store) -> None:
    slots: dict[bytes, Slot] = {}
    for key in (b"a", b"b", b"c"):
        assert store.store(key)
        slot = store.index.pin(key)
        assert slot is not None
        slots[key] = slot
    disk_store.flip(disk_store.segment_path(store.path, slots[b"b"]), disk_store.payload_offset(slots[b"b"]))
    event = store.io.stalled["open"] = threading.Event()
    store.medium._cache.forget(0)
    for ticket, (key, slot) in enumerate(slots.items()):
        store.medium.load(Ticket(ticket), key, slot, [bytearray(len(CHUNK))])
    event.set()
    reasons = {completion.ticket: completion.failure for completion in disk_store.finish(store.medium)}
    assert reasons[Ticket(0)] is None and reasons[Ticket(2)] is None
    failure = reasons[Ticket(1)]
    assert failure is not None and failure.reason is FailureReason.CHECKSUM
    store.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failed_write_is_a_failed_store_that_leaves_nothing(store: Store, number: int) -> None:
    assert store.store(b"before")
    store.io.failing["pwritev"] = number
    assert not store.store(b"key")
    assert store.index.lookup(b"key") is LookupResult.MISS
    store.io.failing.clear()
    store.clock.now_s += OPTIONS.retry_interval_s
    assert store.store(b"key")
    assert store.load_fails_with(b"before") is None
    store.close()


def test_a_removed_directory_is_made_again(store: Store) -> None:
    for number in range(8):
        assert store.store(b"old %d" % number)
    shutil.rmtree(store.path)
    outcomes = []
    for _ in range(60):
        store.clock.now_s += OPTIONS.retry_interval_s
        outcomes.append(store.store())
    assert all(outcomes[-20:]), "it works again"
    assert all(store.index.lookup(b"old %d" % number) is LookupResult.MISS for number in range(8))
    assert store.store(b"new")
    assert store.load_fails_with(b"new") is None
    store.close()
    reopened = disk_store.make_index(store.path, OPTIONS)
    assert reopened.lookup(b"new") is LookupResult.HIT
    reopened.close()


def test_loads_from_a_removed_directory_fail_or_are_right(store: Store) -> None:
    assert store.store(b"key")
    shutil.rmtree(store.path)
    store.medium._cache.forget(0)
    assert store.load_fails_with(b"key") is FailureReason.MISSING
    store.close()


def test_failed_writes_of_metadata_are_retried(store: Store) -> None:
    assert store.store(b"a") and store.store(b"b")
    store.io.failing["rename"] = errno.EIO
    assert store.index.invalidate(b"a", "checksum")
    store.clock.now_s += 1000
    counts = store.index.take_disk_counts()
    assert counts.quarantined == {"checksum": 1}
    assert {"rewrite: EIO", "save: EIO"} <= counts.failures.keys()
    store.io.failing.clear()
    store.clock.now_s += OPTIONS.retry_interval_s
    assert store.index.take_disk_counts().snapshots == 1
    store.medium.close()
    store.index._namespace.close()  # as a crash
    index = disk_store.make_index(store.path, OPTIONS)
    assert (index.lookup(b"a"), index.lookup(b"b")) == (LookupResult.MISS, LookupResult.HIT)
    index.close()


def test_a_clear_that_cannot_be_written_is_written_later(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert store.store(b"a")
    store.io.failing["rename"] = errno.EIO
    store.index.clear()
    assert "writeepoch: EIO" in caplog.text
    assert store.index.lookup(b"a") is LookupResult.MISS
    store.io.failing.clear()
    store.clock.now_s += OPTIONS.retry_interval_s
    assert store.store(b"b")
    store.medium.close()
    store.index._namespace.close()
    index = disk_store.make_index(store.path, OPTIONS)
    assert (index.lookup(b"a"), index.lookup(b"b")) == (LookupResult.MISS, LookupResult.HIT)
    index.close()


def _close(store: Store) -> Path:
    store.index.close()
    return store.path


def _crash(store: Store) -> Path:
    return Path(shutil.copytree(store.path, store.path.with_name("as it was")))


def _answers(path: Path, *keys: bytes) -> tuple[LookupResult, ...]:
    index = disk_store.make_index(path, OPTIONS)
    answers = tuple(index.lookup(key) for key in keys)
    index.close()
    return answers


@pytest.mark.parametrize("end", [_close, _crash])
@pytest.mark.parametrize("is_pinned", [False, True], ids=["unused", "pinned"])
def test_nothing_is_stored_in_an_epoch_that_is_not_on_disk(
    store: Store, end: Callable[[Store], Path], is_pinned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.store(b"a")
    assert not is_pinned or store.index.pin(b"a")
    store.io.failing_names["epoch.new"] = errno.ENOSPC
    store.index.clear()
    assert "clear is not on disk yet" in caplog.text
    store.io.failing_names.clear()
    is_stored = store.store(b"b")
    a, b = _answers(end(store), b"a", b"b")
    assert b is (LookupResult.HIT if is_stored else LookupResult.MISS)
    # A crash may undo the clear only if nothing was stored after it; the log message says so.
    assert a is LookupResult.MISS or (end is _crash and not is_stored)


@pytest.mark.parametrize("is_pinned", [False, True], ids=["unused", "pinned"])
def test_a_clear_on_disk_logs_no_warning(store: Store, is_pinned: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert store.store(b"a")
    assert not is_pinned or store.index.pin(b"a")
    store.index.clear()
    assert store.store(b"b")
    assert _answers(_close(store), b"a", b"b") == (LookupResult.MISS, LookupResult.HIT)
    assert "clear" not in caplog.text


def test_a_close_that_cannot_write_the_clear_leaves_epoch_and_snapshot(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.store(b"a")
    assert store.index.pin(b"a")
    store.index._maintenance.finish()  # writes a snapshot
    cache = store.path / disk_store.FINGERPRINT.digest().hex()
    before = {name: (cache / name).read_bytes() for name in ("epoch", "snapshot")}
    store.io.failing_names["epoch.new"] = errno.ENOSPC
    store.index.clear()
    store.index.close()
    assert "the last clear of" in caplog.text
    assert {name: (cache / name).read_bytes() for name in before} == before


def test_a_directory_made_again_takes_no_record_before_its_epoch(store: Store) -> None:
    assert store.store(b"a")
    shutil.rmtree(store.path)
    store.io.failing_names["epoch.new"] = errno.EIO
    for number in range(30):
        store.clock.now_s += OPTIONS.retry_interval_s / 2
        store.store(b"early %d" % number)
    assert not list(store.path.glob("*/rank*/*"))
    store.io.failing_names.clear()
    store.clock.now_s += OPTIONS.retry_interval_s
    stored = [key for key in (b"%d" % number for number in range(30)) if store.store(key)]
    assert stored
    assert set(_answers(_crash(store), *stored[-3:])) == {LookupResult.HIT}
    store.close()


def test_a_damaged_record_found_by_compaction_is_quarantined(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert store.store(b"bad")
    slot = store.index.pin(b"bad")
    assert slot is not None
    store.index.unpin(b"bad")
    disk_store.flip(disk_store.segment_path(store.path, slot), disk_store.payload_offset(slot) + 17)
    for _ in range(60):
        store.index.touch([b"bad"])
        assert store.store()
    assert store.index.lookup(b"bad") is LookupResult.MISS
    assert store.index.take_disk_counts().quarantined == {"checksum": 1}
    store.close()


def test_a_blocked_read_holds_up_no_other_operation(tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, max_queued=2, max_in_flight=2, close_timeout_s=0.05)
    store = Store(tmp_path / "store", options)
    assert store.store(b"key")
    slot = store.index.pin(b"key")
    assert slot is not None
    event = store.io.stalled["preadv"] = threading.Event()
    store.medium.load(Ticket(1), b"key", slot, [bytearray(len(CHUNK))])
    assert store.io.has_stalled.wait(disk_faults.TIMEOUT_S)
    assert store.medium.poll() == []
    assert not store.medium.drain(0.0)
    other = store.index.reserve(b"other", len(CHUNK))
    assert isinstance(other, Slot)
    store.medium.store(Ticket(2), b"other", other, [CHUNK])
    while not (completions := store.medium.poll()):
        pass
    assert [(completion.ticket, completion.failure) for completion in completions] == [(Ticket(2), None)]
    event.set()
    assert [completion.failure for completion in disk_store.finish(store.medium)] == [None]
    store.close()


def test_a_full_queue_refuses_at_once(tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, max_queued=2, max_in_flight=1)
    store = Store(tmp_path / "store", options)
    assert store.store(b"key")
    slot = store.index.pin(b"key")
    assert slot is not None
    event = store.io.stalled["preadv"] = threading.Event()
    for ticket in range(4):
        store.medium.load(Ticket(ticket), b"key", slot, [bytearray(len(CHUNK))])
        assert store.io.has_stalled.wait(disk_faults.TIMEOUT_S)
    [completion] = store.medium.poll()
    assert completion.ticket == 3
    assert completion.failure is not None and completion.failure.reason is FailureReason.BUSY
    event.set()
    assert {completion.failure for completion in disk_store.finish(store.medium)} == {None}
    store.close()


def test_close_does_not_wait_for_a_blocked_read(tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, max_in_flight=1, close_timeout_s=0.05)
    store = Store(tmp_path / "store", options)
    assert store.store(b"key")
    slot = store.index.pin(b"key")
    assert slot is not None
    event = store.io.stalled["preadv"] = threading.Event()
    store.medium.load(Ticket(1), b"key", slot, [bytearray(len(CHUNK))])
    assert store.io.has_stalled.wait(disk_faults.TIMEOUT_S)
    store.medium.load(Ticket(2), b"key", slot, [bytearray(len(CHUNK))])
    store.medium.close()
    [completion] = store.medium.poll()
    assert completion.ticket == 2
    assert completion.failure is not None and completion.failure.reason is FailureReason.CLOSED
    event.set()
    assert store.medium.drain(disk_faults.TIMEOUT_S)
    store.close()


@pytest.mark.parametrize("call", ["allocate", "rename", "truncate", "open"])
def test_blocked_file_work_holds_up_no_call_of_the_index(tmp_path: Path, call: str) -> None:
    options = msgspec.structs.replace(OPTIONS, close_timeout_s=0.05)
    io = disk_faults.FaultyIO()
    index = DiskIndex(str(tmp_path / "store"), disk_store.FINGERPRINT, options, ThreadJanitor(), io, disk_store.Clock())
    event = io.stalled[call] = threading.Event()
    for number in range(60):
        key = b"%d" % number
        if isinstance(index.reserve(key, 5000), Slot):
            index.commit(key)
        index.lookup(key)
        index.invalidate(key)
    assert not index.drain(0.0)
    index.close()
    event.set()


def test_a_file_size_limit_is_a_full_file_system(tmp_path: Path) -> None:
    """With a real limit: the system itself refuses to allocate."""
    program = textwrap.dedent(
        """
        import pathlib, resource, signal, sys
        import disk_store
        from hybridkv.tiers import Refusal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        options = disk_store.options_for(64 * 8192)
        index = disk_store.make_index(pathlib.Path(sys.argv[1]), options)
        assert index.reserve(b"key", 100) is Refusal.NO_ROOM
        assert index.take_disk_counts().failures == {"create: EFBIG": 1}, "counted"
        index.close()
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 65536


MOUNTED = """
import pathlib, subprocess, sys
import disk_store
from hybridkv.planner import LookupResult
from hybridkv.tiers import Refusal
from hybridkv.tiers.disk import DiskOptions, Fsync
path = pathlib.Path(sys.argv[1])
def mount(*options):
    subprocess.run(["mount", *options], check=True)
mount("-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path))
clock = disk_store.Clock()
options = DiskOptions(capacity_bytes=8 << 20, segment_bytes=256 << 10, fsync=Fsync.NONE, max_in_flight=1)
index = disk_store.make_index(path, options, clock=clock)
medium = disk_store.make_medium(path, options)
stored = [key for key in (b"%d" % n for n in range(30)) if disk_store.store(index, medium, key, b"x" * 60000)]
assert stored, "the file system has room for a few segments"
failures = index.take_disk_counts().failures
assert set(failures) == {"create: ENOSPC"}, failures
kept = [key for key in stored if index.lookup(key) is LookupResult.HIT]
assert kept
for key in kept:
    completion, data = disk_store.load(index, medium, key)
    assert completion.failure is None and data == b"x" * 60000
medium.close()  # the system mounts nothing read-only while somebody may write to a file in it
mount("-o", "remount,ro", str(path))
clock.now_s += 1000
medium = disk_store.make_medium(path, options)
for key in kept:
    completion, data = disk_store.load(index, medium, key)
    assert completion.failure is None and data == b"x" * 60000, completion
assert not any(disk_store.store(index, medium, b"new %d" % n, b"x" * 60000) for n in range(30))
assert any(name.endswith("EROFS") for name in index.take_disk_counts().failures)
mount("-o", "remount,rw,size=16m", str(path))
clock.now_s += 1000
medium.close()
medium = disk_store.make_medium(path, options)
assert all([disk_store.store(index, medium, b"newer %d" % n, b"x" * 60000) for n in range(30)][5:])
medium.close()
index.close()
"""


def test_a_small_file_system_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mounts in a user namespace")
    path = tmp_path / "mounted"
    path.mkdir(mode=0o700)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [*namespace, sys.executable, "-c", MOUNTED, str(path)], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_closed_janitor_accepts_no_task() -> None:
    janitor, done = ThreadJanitor(), list[int]()
    assert janitor.submit(lambda: done.append(1))
    assert janitor.close(disk_faults.TIMEOUT_S)
    assert done == [1]
    assert not janitor.submit(lambda: None)


def test_a_janitor_goes_on_after_a_task_that_raises() -> None:
    janitor = ThreadJanitor()
    done = threading.Event()

    def fail() -> None:
        raise KeyError("a bug")

    assert janitor.submit(fail)
    assert janitor.submit_later(fail, 0.001)
    assert janitor.submit_later(done.set, 0.002)
    assert done.wait(disk_faults.TIMEOUT_S)
    assert janitor.close(disk_faults.TIMEOUT_S)


def test_a_janitor_queues_a_bounded_number_of_tasks() -> None:
    janitor = ThreadJanitor(max_queued=2)
    event = threading.Event()
    taken = [janitor.submit(lambda: event.wait(disk_faults.TIMEOUT_S) and None) for _ in range(5)]
    assert not all(taken) and taken[0]
    event.set()
    assert janitor.close(disk_faults.TIMEOUT_S)
