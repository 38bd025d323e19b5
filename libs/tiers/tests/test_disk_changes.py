"""Log of changes: records are on disk soon after a change, also if the process is killed; a damaged log costs only
reading.
"""

from __future__ import annotations

import errno
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import disk_store
import msgspec
import pytest
from disk_faults import FaultyIO
from examples import examples, thinned

from hybridkv.planner import LookupResult
from hybridkv.tiers import Slot, Ticket
from hybridkv.tiers.disk import (
    DiskIndex,
    DiskMedium,
    DiskOptions,
    FileIO,
    Fsync,
    ThreadJanitor,
)
from hybridkv.tiers.disk.format import changes, snapshot
from hybridkv.tiers.disk.format.layout import number_of
from hybridkv.tiers.disk.index.change_log import MAX_USES_IN_A_BATCH, ChangeLog
from hybridkv.tiers.disk.recovery import recovery

TIMEOUT_S = disk_store.TIMEOUT_S
OPTIONS = disk_store.options_for(12 * 8192, num_spare=3, changes_interval_s=0.0, direct=False)
SMALL_OPTIONS = disk_store.options_for(4 * 8192, num_spare=3, changes_interval_s=0.0, direct=False)
NAMESPACE = disk_store.FINGERPRINT.digest().hex()


def chunk(key: bytes) -> bytes:
    return random.Random(key.hex()).randbytes(4000)


def opened(path: Path, options: DiskOptions = OPTIONS, io: FileIO | None = None) -> tuple[DiskIndex, DiskMedium]:
    return disk_store.make_index(path, options, io), disk_store.make_medium(path, options)


def kill(index: DiskIndex, medium: DiskMedium) -> None:
    """Stop writing and release the lock."""
    medium.close()
    index._namespace.close()


def order_of(index: DiskIndex) -> list[tuple[bytes, int]]:
    """Keys and addresses, least recently used first."""
    return [(key, disk_store.records_of(index)[key].address) for key in index._records.eviction_order()]


def offered(path: Path, options: DiskOptions = OPTIONS) -> list[bytes]:
    """Every key that the next process finds. Checks that each loads its own bytes."""
    index, medium = opened(path, options)
    keys = list(disk_store.records_of(index))
    for key in keys:
        loaded = disk_store.load(index, medium, key)
        assert loaded is not None and loaded[0].failure is None and loaded[1] == chunk(key)
    kill(index, medium)
    return keys


def opening_line(caplog: pytest.LogCaptureFixture) -> str:
    return [record.getMessage() for record in caplog.records if "opened in" in record.getMessage()][-1]


def live(index: DiskIndex, medium: DiskMedium, seed: int, num_steps: int) -> None:
    """Store, use, withdraw and abort records, more than fit."""
    chooser = random.Random(seed)
    for _ in range(num_steps):
        key = b"%d" % chooser.randrange(24)
        what = chooser.random()
        if what < 0.6:
            disk_store.store(index, medium, key, chunk(key))
        elif what < 0.8:
            index.touch([key, b"%d" % chooser.randrange(24)])
        elif what < 0.9:
            disk_store.load(index, medium, key)
        elif what < 0.95:
            index.invalidate(key)
        elif isinstance(index.reserve(key, 4000), Slot):
            index.abort(key)


moved_records: list[int] = []


@pytest.mark.parametrize("seed", range(examples(20, 7)))
def test_a_reopened_index_has_all_records_of_the_killed_one(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The same records at the same addresses in the same order of use. No segment is read for it."""
    path = tmp_path / "store"
    before: list[tuple[bytes, int]] = []
    for life in range(3):
        with caplog.at_level("INFO", "hybridkv.tiers.disk"):
            index, medium = opened(path)
        if life:
            assert order_of(index) == before
            assert "(0 of " in opening_line(caplog)
        live(index, medium, 10 * seed + life, 120)
        assert index.drain(TIMEOUT_S)
        before = order_of(index)
        kill(index, medium)
        moved_records.append(index.take_disk_counts().moved_records)


def test_some_of_these_runs_moved_records() -> None:
    assert sum(map(bool, moved_records)) > examples(5, 7)


def test_a_store_without_its_changes_is_scanned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Control: without the log the segments are read, and the order of use is lost."""
    path = tmp_path / "store"
    index, medium = opened(path)
    for number in range(6):
        assert disk_store.store(index, medium, b"%d" % number, chunk(b"%d" % number))
    index.touch([b"0"])
    before = order_of(index)
    kill(index, medium)
    (path / NAMESPACE / "changes").unlink()
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        index, medium = opened(path)
    assert sorted(order_of(index)) == sorted(before) and order_of(index) != before
    assert "(0 of " not in opening_line(caplog)
    kill(index, medium)


def test_a_clean_start_continues_the_existing_log(tmp_path: Path) -> None:
    """A start writes no snapshot if the log on disk is complete."""
    path = tmp_path / "store"
    index, medium = opened(path)
    assert disk_store.store(index, medium, b"a", chunk(b"a"))
    kill(index, medium)
    index, medium = opened(path)
    assert index.take_disk_counts().snapshots == 0
    assert disk_store.store(index, medium, b"b", chunk(b"b"))
    kill(index, medium)
    assert offered(path) == [b"a", b"b"]


class Killed(BaseException):
    """Derived from BaseException, so that no handler catches it."""


class KillingIO(FileIO):
    """Raises `Killed` at a modifying call: before it, halfway through it, or after it."""

    def __init__(self, kill_at: int, how: str) -> None:
        self._kill_at = kill_at
        self._how = how
        self._num_calls = 0
        self._lock_fds: list[int] = []

    def lock(self, fd: int) -> bool:
        self._lock_fds.append(fd)
        return super().lock(fd)

    def unlock(self) -> None:
        """Releases the locks, as the system does for an ended process."""
        for fd in self._lock_fds:
            self.close(fd)

    def _around(self, call: Callable[[], object], half: Callable[[], object]) -> None:
        self._num_calls += 1
        if self._num_calls < self._kill_at:
            call()
            return
        if self._num_calls == self._kill_at and self._how != "before":
            (half if self._how == "within" else call)()
        raise Killed

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        data = b"".join(buffers)
        write = super().pwritev
        self._around(lambda: write(fd, [data], offset), lambda: write(fd, [data[: len(data) // 2]], offset))
        return len(data)

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        rename = super().rename
        self._around(lambda: rename(old, new, dir_fd), lambda: None)

    def remove(self, name: str, dir_fd: int) -> None:
        remove = super().remove
        self._around(lambda: remove(name, dir_fd), lambda: None)

    def truncate(self, fd: int, num_bytes: int) -> None:
        truncate = super().truncate
        self._around(lambda: truncate(fd, num_bytes), lambda: None)


def held_at_its_end(path: Path, io: KillingIO) -> tuple[bool, set[bytes]]:
    """Whether the run ended by itself, and the keys that were committed and not given up by then."""
    medium = disk_store.make_medium(path, SMALL_OPTIONS)
    held: set[bytes] = set()
    index: DiskIndex | None = None
    try:
        index = disk_store.make_index(path, SMALL_OPTIONS, io)
        for step in range(20):
            live(index, medium, step, 2)
            held = {key for key, _ in order_of(index)}
        index.close()
    except Killed:
        io.unlock()
        # Keys that the index was about to give up may be gone or not.
        return False, held & {key for key, _ in order_of(index)} if index is not None else set()
    finally:
        medium.close()
    return True, held


@pytest.mark.parametrize(("how", "first"), [("before", 0), ("within", 2), ("behind", 4)])
def test_an_end_at_any_write_loses_no_committed_record(how: str, first: int, tmp_path: Path) -> None:
    """The first ring tests every second write, in one of the three ways."""
    is_alive = False
    for kill_at in thinned(range(1, 1000), 6, first):
        path = tmp_path / str(kill_at)
        is_alive, held = held_at_its_end(path, KillingIO(kill_at, how))
        if path.exists():
            assert held <= set(offered(path, SMALL_OPTIONS))
            shutil.rmtree(path)
        if is_alive:
            break
    assert is_alive and kill_at > 60


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[bytes]]:
    """Store of a killed process, and its keys. No segment is sealed, and none was deleted."""
    path = tmp_path_factory.mktemp("changes") / "store"
    index, medium = opened(path)
    for number in range(3):
        assert disk_store.store(index, medium, b"%d" % number, chunk(b"%d" % number))
    index._maintenance.state.is_snapshot_wanted = True
    for number in range(3, 7):
        assert disk_store.store(index, medium, b"%d" % number, chunk(b"%d" % number))
    index.touch([b"1"])
    assert index.invalidate(b"2")
    held = {key for key, _ in order_of(index)}
    kill(index, medium)
    return path, held


def copied(store: Path, path: Path) -> Path:
    shutil.copytree(store, path)
    for directory in (path, *path.rglob("*/")):
        directory.chmod(0o700)
    return path / NAMESPACE / "changes"


def test_a_damaged_or_cut_log_costs_only_reading(written: tuple[Path, set[bytes]], tmp_path: Path) -> None:
    store, held = written
    whole = (store / NAMESPACE / "changes").read_bytes()
    damaged = [whole[:end] for end in range(0, len(whole), 7)]
    damaged += [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(0, len(whole), 7)
    ]
    damaged += [whole + b"\0" * 100, whole + whole[-40:], whole[:80] + whole[140:]]
    assert len(damaged) > 80
    for number, data in enumerate(thinned(damaged, 5)):
        path = tmp_path / str(number)
        copied(store, path).write_bytes(data)
        assert set(offered(path)) == held
        shutil.rmtree(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_an_unreadable_log_costs_only_reading(written: tuple[Path, set[bytes]], tmp_path: Path, number: int) -> None:
    store, held = written
    copied(store, tmp_path / "store")
    io = FaultyIO()
    io.failing_names["changes"] = number
    index, medium = opened(tmp_path / "store", io=io)
    assert {key for key, _ in order_of(index)} == held
    kill(index, medium)


def test_a_log_of_another_snapshot_is_not_read(written: tuple[Path, set[bytes]], tmp_path: Path) -> None:
    """As after an end between the two files of a new snapshot; and a snapshot that is older than the log."""
    store, held = written
    of_the_fixture = (store / NAMESPACE / "changes").read_bytes()
    path = tmp_path / "store"
    copied(store, path)
    snapshot_of_then = (path / NAMESPACE / "snapshot").read_bytes()
    index, medium = opened(path)
    assert index.invalidate(b"3")
    assert disk_store.store(index, medium, b"new", chunk(b"new"))
    index.close()
    medium.close()
    snapshot_of_now = (path / NAMESPACE / "snapshot").read_bytes()
    (path / NAMESPACE / "changes").write_bytes(of_the_fixture)
    assert set(offered(path)) == held - {b"3"} | {b"new"}
    assert (
        changes.decode(of_the_fixture, disk_store.FINGERPRINT.digest(), snapshot.checksum_of(snapshot_of_now)) is None
    )
    assert changes.decode(of_the_fixture, disk_store.FINGERPRINT.digest(), snapshot.checksum_of(snapshot_of_then))


def test_a_log_of_another_epoch_brings_no_record(written: tuple[Path, set[bytes]], tmp_path: Path) -> None:
    store, held = written
    path = tmp_path / "store"
    copied(store, path)
    saved = {name: (path / NAMESPACE / name).read_bytes() for name in ("snapshot", "changes", "epoch")}
    index, medium = opened(path)
    assert index.clear() == len(held)
    kill(index, medium)
    for name in ("snapshot", "changes"):
        (path / NAMESPACE / name).write_bytes(saved[name])
    assert offered(path) == []


def test_a_record_stored_after_a_clear_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    index, medium = opened(path)
    assert disk_store.store(index, medium, b"a", chunk(b"a"))
    assert index.clear() == 1
    assert disk_store.store(index, medium, b"b", chunk(b"b"))
    assert index.drain(TIMEOUT_S)
    kill(index, medium)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        assert offered(path) == [b"b"]
    assert "(0 of " in opening_line(caplog)


def test_a_record_written_and_not_committed_is_found_at_its_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the places that may have been in use for writes are read."""
    path = tmp_path / "store"
    index, medium = opened(path)
    slot = index.reserve(b"whole", 4000)
    torn = index.reserve(b"torn", 4000)
    assert isinstance(slot, Slot) and isinstance(torn, Slot)
    for number in range(30):
        assert disk_store.store(index, medium, b"%d" % number, chunk(b"%d" % number))
    medium.store(Ticket(1), b"whole", slot, [chunk(b"whole")])
    assert disk_store.finish(medium)[0].failure is None
    assert number_of(slot.first_offset) < number_of(index._segments.next_address)
    kill(index, medium)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        keys = offered(path)
    assert b"whole" in keys and b"torn" not in keys
    assert "(1 of " in opening_line(caplog)


def test_the_log_stays_within_its_share(tmp_path: Path) -> None:
    """A new snapshot replaces it before."""
    path = tmp_path / "store"
    options = msgspec.structs.replace(disk_store.options_for(4 * 8192), changes_interval_s=0.0)
    index, medium = opened(path, options)
    largest = num_snapshots = 0
    for number in range(300):
        key = b"%03d" % number * 80
        assert disk_store.store(index, medium, key, b"x")
        largest = max(largest, (path / NAMESPACE / "changes").stat().st_size)
        num_snapshots += index.take_disk_counts().snapshots
        assert disk_store.disk_bytes(path) <= options.capacity_bytes
    assert index._sizes.changes_bytes // 3 < largest <= index._sizes.changes_bytes
    assert 2 < num_snapshots < 100
    kill(index, medium)


def test_an_idle_index_logs_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine without requests makes no calls and may be killed then."""
    path = tmp_path / "store"
    options = msgspec.structs.replace(OPTIONS, changes_interval_s=0.2)
    index = DiskIndex(str(path), disk_store.FINGERPRINT, options, ThreadJanitor())
    medium = disk_store.make_medium(path, options)
    for number in range(5):
        assert disk_store.store(index, medium, b"%d" % number, chunk(b"%d" % number))
    index.touch([b"1"])
    deadline_s = time.monotonic() + TIMEOUT_S
    while (names := names_on_disk(path))[-2:] != [b"4", b"1"]:
        assert time.monotonic() < deadline_s, names
        time.sleep(0.01)
    kill(index, medium)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        assert offered(path) == [b"0", b"2", b"3", b"4", b"1"]
    assert "(0 of " in opening_line(caplog)


def names_on_disk(path: Path) -> list[bytes]:
    """Keys committed or used since the snapshot, in that order, as read from the log."""
    try:
        base = snapshot.checksum_of((path / NAMESPACE / "snapshot").read_bytes())
        data = (path / NAMESPACE / "changes").read_bytes()
    except FileNotFoundError:
        return []
    decoded = changes.decode(data, disk_store.FINGERPRINT.digest(), base)
    key_at: dict[int, bytes] = {}
    names = []
    for change in decoded.changes if decoded is not None else ():
        if isinstance(change, changes.Committed):
            key_at[change.address] = change.key
            names.append(change.key)
        elif isinstance(change, changes.Used) and change.address in key_at:
            names.append(key_at[change.address])
    return names


def test_changes_that_failed_to_write_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    io = FaultyIO()
    clock = disk_store.Clock()
    index = disk_store.make_index(path, OPTIONS, io, clock)
    medium = disk_store.make_medium(path, OPTIONS)
    io.failing_names["changes"] = errno.EIO
    assert disk_store.store(index, medium, b"a", chunk(b"a"))
    assert index.take_disk_counts().failures == {"log: EIO": 1}
    io.failing_names.clear()
    assert disk_store.store(index, medium, b"b", chunk(b"b"))
    assert names_on_disk(path) == []
    clock.now_s += OPTIONS.retry_interval_s
    assert disk_store.store(index, medium, b"c", chunk(b"c"))
    assert names_on_disk(path) == [b"a", b"b", b"c"]
    kill(index, medium)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        assert offered(path) == [b"a", b"b", b"c"]
    assert "(0 of " in opening_line(caplog)


def test_changes_that_failed_to_write_are_written_without_new_events(tmp_path: Path) -> None:
    path = tmp_path / "store"
    io, clock = FaultyIO(), disk_store.Clock()
    index = disk_store.make_index(path, OPTIONS, io, clock)
    medium = disk_store.make_medium(path, OPTIONS)
    assert disk_store.store(index, medium, b"a", chunk(b"a"))
    calls: list[Callable[[], object]] = [lambda: index.touch([]), lambda: index.drain(TIMEOUT_S)]
    for num_uses, call in enumerate(calls, 1):
        io.failing_names["changes"] = errno.EIO
        index.touch([b"a"])
        io.failing_names.clear()
        call()
        assert names_on_disk(path) == [b"a"] * num_uses
        clock.now_s += OPTIONS.retry_interval_s
        call()
        assert names_on_disk(path) == [b"a"] * (num_uses + 1)
    kill(index, medium)


def test_changes_do_not_wait_for_a_snapshot_that_cannot_begin(tmp_path: Path) -> None:
    path = tmp_path / "store"
    io, clock = FaultyIO(), disk_store.Clock()
    index = disk_store.make_index(path, OPTIONS, io, clock)
    medium = disk_store.make_medium(path, OPTIONS)
    assert disk_store.store(index, medium, b"a", chunk(b"a"))
    (path / NAMESPACE / "LOCK").unlink()  # the next write makes it again first
    io.failing["open"] = errno.EMFILE
    clock.now_s += OPTIONS.snapshot_interval_s - 3
    index.touch([b"a"])
    assert index.take_disk_counts().failures.keys() == {"log: EMFILE"}
    clock.now_s += 3
    assert index.take_disk_counts().failures == {"save: EMFILE": 1}
    io.failing.clear()
    clock.now_s += OPTIONS.retry_interval_s - 2  # changes may be retried, the snapshot not yet
    index.touch([b"a"])
    assert names_on_disk(path) == [b"a", b"a"]
    index.touch([b"a"])
    draining = threading.Thread(target=index.drain, args=(TIMEOUT_S,), daemon=True)
    draining.start()
    draining.join(TIMEOUT_S)
    assert not draining.is_alive()
    assert names_on_disk(path) == [b"a", b"a", b"a"]
    kill(index, medium)


def test_a_removed_log_is_replaced_by_a_snapshot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    index, medium = opened(path)
    assert disk_store.store(index, medium, b"a", chunk(b"a"))
    (path / NAMESPACE / "changes").unlink()
    assert disk_store.store(index, medium, b"b", chunk(b"b"))
    assert disk_store.store(index, medium, b"c", chunk(b"c"))
    assert index.drain(TIMEOUT_S)
    kill(index, medium)
    with caplog.at_level("INFO", "hybridkv.tiers.disk"):
        assert offered(path) == [b"a", b"b", b"c"]
    assert "(0 of " in opening_line(caplog)


def test_a_log_above_the_size_limit_is_not_read(
    written: tuple[Path, set[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The amount read at a start is bounded, also if a snapshot may be large."""
    store, held = written
    num_read = []
    for num_more in (0, -1):
        path = tmp_path / str(num_more)
        monkeypatch.setattr(recovery, "LARGEST_CHANGES_BYTES", copied(store, path).stat().st_size + num_more)
        with caplog.at_level("INFO", "hybridkv.tiers.disk"):
            assert set(offered(path)) == held
        num_read.append(int(opening_line(caplog).split()[-3]))
    assert num_read[0] > 0 and num_read[1] == 0


@pytest.mark.parametrize(("fsync", "expected"), [(Fsync.NONE, 0), (Fsync.INTERVAL, 2), (Fsync.ALWAYS, 4)])
def test_changes_are_synced_as_often_as_records(tmp_path: Path, fsync: Fsync, expected: int) -> None:
    options = msgspec.structs.replace(OPTIONS, fsync=fsync)
    io, clock = FaultyIO(), disk_store.Clock()
    index = disk_store.make_index(tmp_path / "store", options, io, clock)
    assert isinstance(index.reserve(b"a", 4000), Slot)
    index.abort(b"a")
    index.drain(TIMEOUT_S)
    synced: list[int] = []
    for number in range(4):
        before = io.count("fdatasync")
        clock.now_s += options.fsync_interval_s / 2
        assert isinstance(index.reserve(b"%d" % number, 4000), Slot)
        synced.append(io.count("fdatasync") - before)
    assert sum(synced) == expected
    index.close()


def test_a_full_change_log_drops_its_entries_and_reports_a_gap() -> None:
    log = ChangeLog(max_waiting=4)
    for address in range(4):
        log.gone(address)
    assert log.take() == ([changes.Gone(address) for address in range(4)], False)
    for address in range(6):
        log.gone(address)
    assert log.take() == ([changes.Gone(4), changes.Gone(5)], True)


def test_uses_leave_room_in_the_log_for_other_changes() -> None:
    log = ChangeLog(max_waiting=8)
    for address in range(10):
        log.used([address])
    for address in range(4):
        log.gone(address)
    taken, has_gap = log.take()
    assert not has_gap
    assert taken == [*map(changes.Used, range(4)), *map(changes.Gone, range(4))]


def test_a_log_stops_at_a_cut_until_it_ends() -> None:
    log = ChangeLog()
    log.gone(1)
    cut = log.cut()
    log.gone(2)
    assert log.take() == ([changes.Gone(1)], False)
    assert log.take() == ([], False)
    assert log.skip_to(cut)
    assert log.take() == ([changes.Gone(2)], False)
    cut = log.cut()
    log.gone(3)
    cut.is_cancelled = True
    assert log.take() == ([changes.Gone(3)], False)
    cut = log.cut()
    log.drop_until_snapshot()
    assert not log.skip_to(cut)


def test_a_log_keeps_the_last_uses_in_order() -> None:
    log = ChangeLog()
    log.used([1, 2, 1])
    log.gone(2)
    log.used([3, 1])
    assert log.take()[0] == [changes.Used(2), changes.Gone(2), changes.Used(3), changes.Used(1)]
    log.used(range(MAX_USES_IN_A_BATCH + 10))
    assert log.take()[0] == [changes.Used(address) for address in range(10, MAX_USES_IN_A_BATCH + 10)]


def test_a_janitor_runs_delayed_tasks_when_due_or_at_close() -> None:
    janitor = ThreadJanitor()
    ran, done = threading.Event(), []
    assert janitor.submit_later(ran.set, 0.01)
    assert ran.wait(TIMEOUT_S)
    assert janitor.submit_later(lambda: done.append("late"), 1e6)
    assert janitor.submit(lambda: done.append("at once"))
    assert janitor.close(TIMEOUT_S)
    assert done == ["at once", "late"]
    assert not janitor.submit_later(ran.set, 0.0)


def test_a_record_evicted_long_ago_is_not_found_again(tmp_path: Path) -> None:
    """Evictions are logged too: after a restart the most recently used records are kept within the capacity."""
    path = tmp_path / "store"
    index, medium = opened(path)
    for number in range(14):
        assert disk_store.store(index, medium, b"%d" % number, chunk(b"%d" % number))
    assert index.lookup(b"0") is LookupResult.MISS
    kill(index, medium)
    assert offered(path) == [b"%d" % number for number in range(2, 14)]
