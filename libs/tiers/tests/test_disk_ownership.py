"""A store has one engine, which notices the loss of its ownership and touches no files that may be another's."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import disk_store
import pytest
from disk_faults import CHUNK, OPTIONS, FaultyIO, Store

from hybridkv.planner import LookupResult
from hybridkv.tiers import TierConfigurationError
from hybridkv.tiers.disk import DiskIndex, FileIO
from hybridkv.tiers.disk.files.locks import find_holder

NAME = disk_store.FINGERPRINT.digest().hex()
OTHER_USER = 12345
FEW = 3
"""Chunks; a store has room for three times as many."""


class WithoutDirectoryLocks(FaultyIO):
    """File system that locks only files."""

    def lock(self, fd: int) -> bool:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return super().lock(fd)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store")
    store.fill()
    yield store
    store.close()


@pytest.fixture
def small_store(tmp_path: Path) -> Iterator[Store]:
    """Store with room for as many chunks again."""
    store = Store(tmp_path / "store")
    assert all(store.store() for _ in range(FEW))
    yield store
    store.close()


@pytest.fixture
def lonely_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Store with only LOCK to keep other engines out."""
    monkeypatch.setattr("disk_faults.FaultyIO", WithoutDirectoryLocks)
    store = Store(tmp_path / "store")
    assert all(store.store() for _ in range(FEW))
    yield store
    store.close()


def held(index: DiskIndex) -> set[bytes]:
    return set(disk_store.records_of(index))


def files_below(path: Path) -> dict[Path, bytes]:
    return {found: found.read_bytes() for found in sorted(path.rglob("*")) if found.is_file()}


def segments_below(path: Path) -> set[str]:
    return {found.name for found in path.rglob("segment-*")}


@contextmanager
def another_process(path: Path, words: str, io: str = "None") -> Iterator[subprocess.Popen[str]]:
    """Engine that opens the store, runs the given statements, reports the end, and lives until the end of the block."""
    program = f"""
import disk_store, disk_faults, test_disk_ownership, sys
from pathlib import Path
from hybridkv.tiers import TierConfigurationError
try:
    index = disk_store.make_index(Path({str(path)!r}), disk_faults.OPTIONS, {io})
except TierConfigurationError as error:
    print("refused:", str(error).replace(chr(10), " "), flush=True)
    sys.exit()
medium = disk_store.make_medium(Path({str(path)!r}), disk_faults.OPTIONS)
{words}
print("done", flush=True)
sys.stdin.read()
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


STORES_SOMETHING = f"""
for number in range({FEW}):
    assert disk_store.store(index, medium, b"another's %d" % number, disk_faults.CHUNK)
"""

# A deleted lock.


def test_no_second_engine_gets_in_after_a_cleaner_deletes_the_lock(store: Store) -> None:
    (store.path / NAME / "LOCK").unlink()
    with another_process(store.path, STORES_SOMETHING) as process:
        assert said_by(process).startswith("refused:")
    store.fill()
    assert store.load_fails_with(b"%d" % store.num_stored) is None


def test_a_cache_with_a_deleted_lock_is_not_deleted_by_another_engine(tmp_path: Path) -> None:
    living = disk_store.make_index(tmp_path / "store", OPTIONS, model="living")
    medium = disk_store.make_medium(tmp_path / "store", OPTIONS, model="living")
    assert disk_store.store(living, medium, b"key", CHUNK)
    directory = tmp_path / "store" / disk_store.fingerprint(model="living").digest().hex()
    (directory / "LOCK").unlink()
    neighbour = Store(tmp_path / "store")
    for _ in range(60):
        neighbour.store()
    assert segments_below(directory)
    loaded = disk_store.load(living, medium, b"key")
    assert loaded is not None and loaded[1] == CHUNK
    for each in (neighbour, medium, living):
        each.close()


def test_a_deleted_lock_is_made_again_and_holds(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    (store.path / NAME / "LOCK").unlink()
    store.fill()
    assert (store.path / NAME / "LOCK").read_text() == f"{os.getpid()}\n"
    assert caplog.text.count("LOCK was deleted; made anew") == 1
    with pytest.raises(TierConfigurationError, match=f"process {os.getpid()}"):
        disk_store.make_index(store.path, OPTIONS, WithoutDirectoryLocks())


def test_an_engine_that_lost_its_lock_deletes_and_writes_nothing_more(
    lonely_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store = lonely_store
    (store.path / NAME / "LOCK").unlink()
    with another_process(store.path, STORES_SOMETHING, "test_disk_ownership.WithoutDirectoryLocks()") as process:
        assert said_by(process) == "done\n"
        before = files_below(store.path)
        last = b"%d" % store.num_stored
        assert store.load_fails_with(last) is None
        assert sum(store.store() for _ in range(60)) < 20
        assert not store.store()
        store.index.invalidate(last)
        store.index.clear()
        store.clock.now_s += 1000
        assert store.index.drain(disk_store.TIMEOUT_S)
        failures = store.index.take_disk_counts().failures
        store.medium.close()
        store.index.close()
        after = files_below(store.path)
    assert before.keys() == after.keys()
    assert all(after[path] == data for path, data in before.items() if "segment" not in path.name)
    assert any("EBUSY" in what for what in failures)
    assert "nothing is written or deleted here any more" in caplog.text
    reopened = disk_store.make_index(store.path, OPTIONS)
    assert all(reopened.lookup(b"another's %d" % number) is LookupResult.HIT for number in range(FEW))
    reopened.close()


# A moved directory.


def test_a_root_that_was_moved_is_made_again_and_the_moved_one_stays_whole(
    small_store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = small_store
    assert store.index.drain(disk_store.TIMEOUT_S)
    before = held(store.index)
    store.path.rename(tmp_path / "backup")
    copied = files_below(tmp_path / "backup")
    for _ in range(30):
        store.clock.now_s += OPTIONS.retry_interval_s
        store.store()
    assert segments_below(store.path)
    assert store.load_fails_with(b"%d" % store.num_stored) is None
    assert caplog.text.count("was removed; making it anew") == 1
    # Open and ready files may still be written until the move is noticed; they hold no records.
    assert files_below(tmp_path / "backup").keys() == copied.keys()
    store.index.close()
    moved = disk_store.make_index(tmp_path / "backup", OPTIONS)
    assert before <= held(moved)
    moved.close()
    again = disk_store.make_index(store.path, OPTIONS)
    assert again.lookup(b"%d" % store.num_stored) is LookupResult.HIT
    again.close()


def test_a_medium_follows_its_index_to_the_new_directory(store: Store, tmp_path: Path) -> None:
    store.path.rename(tmp_path / "backup")
    for _ in range(30):
        store.clock.now_s += OPTIONS.retry_interval_s
        store.store()
    slot = store.index.pin(b"%d" % store.num_stored)
    assert slot is not None
    store.index.unpin(b"%d" % store.num_stored)
    assert disk_store.segment_path(store.path, slot).exists()
    assert CHUNK in disk_store.segment_path(store.path, slot).read_bytes()


@pytest.mark.parametrize("copy", [shutil.copy2, os.link], ids=["copied", "linked"])
def test_a_store_put_in_the_place_of_another_is_left_alone(
    store: Store, tmp_path: Path, copy: Callable[[str, str], object]
) -> None:
    """An operator puts a copy back while the engine runs."""
    assert store.index.drain(disk_store.TIMEOUT_S)
    before = held(store.index)
    shutil.copytree(store.path, tmp_path / "copy", copy_function=copy)
    (tmp_path / "copy").chmod(0o700)
    store.path.rename(tmp_path / "moved away")
    (tmp_path / "copy").rename(store.path)
    copied = files_below(store.path)
    for _ in range(60):
        store.clock.now_s += OPTIONS.retry_interval_s
        store.store()
    assert not store.store()
    store.medium.close()
    store.index.close()
    after = files_below(store.path)
    assert after.keys() == copied.keys()
    # A copy by hard links shares files that the medium was still writing to; only its directories are copies.
    is_kept = [path for path in copied if path.name != "LOCK" and path.stat().st_nlink == 1]
    assert is_kept or copy is os.link
    assert [after[path] for path in is_kept] == [copied[path] for path in is_kept]
    reopened = disk_store.make_index(store.path, OPTIONS)
    # Later writes of the medium are whole, and replace older records.
    assert len(held(reopened)) >= len(before) if copy is os.link else held(reopened) == before
    reopened.close()


# Parent directories.


def opened_below(parent: Path, caplog: pytest.LogCaptureFixture) -> str:
    disk_store.make_index(parent / "store", OPTIONS).close()
    return "\n".join(record.getMessage() for record in caplog.records if "exchanged" in record.getMessage())


@pytest.mark.parametrize(("mode", "is_said"), [(0o777, True), (0o1777, False), (0o700, False), (0o755, False)])
def test_a_parent_writable_by_everybody_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_said: bool
) -> None:
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent").chmod(mode)
    said = opened_below(tmp_path / "parent", caplog)
    assert (f"{tmp_path / 'parent'} may be written to by everybody" in said) == is_said


def test_a_parent_of_another_user_is_logged_also_further_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "theirs" / "ours").mkdir(parents=True)
    try:
        os.chown(tmp_path / "theirs", OTHER_USER, OTHER_USER)
    except OSError as error:
        pytest.skip(f"this process cannot give files away: {error.strerror}")
    said = opened_below(tmp_path / "theirs" / "ours", caplog)
    assert f"{tmp_path / 'theirs'} belongs to user {OTHER_USER}" in said


# Holders of the lock.

HOLDS_IN_A_FORKED_CHILD = """
import fcntl, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
os.truncate(fd, 0)
os.pwrite(fd, b"%d\\n" % os.getpid(), 0)
child = os.fork()
if child == 0:
    os.close(0)
    time.sleep(600)
print(child, flush=True)
"""


def test_a_refusal_names_a_living_holder_after_its_parent_has_ended(tmp_path: Path) -> None:
    disk_store.make_index(tmp_path / "store", OPTIONS).close()
    lock = tmp_path / "store" / NAME / "LOCK"
    done = subprocess.Popen(
        [sys.executable, "-c", HOLDS_IN_A_FORKED_CHILD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    child = int(said_by(done))
    try:
        assert done.wait(disk_store.TIMEOUT_S) == 0
        with pytest.raises(TierConfigurationError) as caught:
            disk_store.make_index(tmp_path / "store", OPTIONS)
        assert f"process {child} ({sys.executable[:40]}" in str(caught.value)
        assert lock.read_text() == f"{done.pid}\n"
    finally:
        os.kill(child, signal.SIGKILL)
        assert done.stdout is not None
        done.stdout.close()


def test_without_proc_the_holder_is_read_from_the_lock(tmp_path: Path) -> None:
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    lock = (tmp_path / "store" / NAME / "LOCK").stat()
    assert find_holder(lock, os.getpid(), tmp_path / "no proc") is None
    holder = find_holder(lock, None)
    assert holder is not None and holder.pid == os.getpid()
    index.close()


def test_an_open_file_without_a_lock_has_no_holder(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("")
    with (tmp_path / "LOCK").open():
        assert find_holder((tmp_path / "LOCK").stat(), os.getpid()) is None


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"x"  # the child releases the lock only when it runs
        index.close()
        disk_store.make_index(tmp_path / "store", OPTIONS).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_forked_child_does_not_release_its_parents_lock(tmp_path: Path) -> None:
    index = disk_store.make_index(tmp_path / "store", OPTIONS)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(TierConfigurationError, match="no other engine"):
        disk_store.make_index(tmp_path / "store", OPTIONS)
    index.close()


# Copies by hard links.


def test_a_copy_by_hard_links_keeps_the_bytes_of_deleted_segments(store: Store, tmp_path: Path) -> None:
    assert store.index.drain(disk_store.TIMEOUT_S)
    shutil.copytree(store.path, tmp_path / "copy", copy_function=os.link)
    copied = {path: data for path, data in files_below(tmp_path / "copy").items() if "segment" in path.name}
    full = {path: data for path, data in copied.items() if data.count(CHUNK) == OPTIONS.capacity_bytes}
    for _ in range(3):
        store.fill()
    gone = {path for path in copied if not (store.path / path.relative_to(tmp_path / "copy")).exists()}
    assert gone and not full
    assert all(path.stat().st_size == len(copied[path]) for path in copied)
    assert all(CHUNK in path.read_bytes() for path in gone if CHUNK in copied[path])


def test_a_deleted_segment_takes_no_space_while_a_medium_has_it_open(store: Store) -> None:
    assert store.medium._cache._open
    fds = {number: segment.fd for number, segment in store.medium._cache._open.items()}
    for _ in range(3):
        store.fill()
    sizes = {number: os.fstat(fd) for number, fd in fds.items() if _is_open(fd)}
    gone = [found for found in sizes.values() if not found.st_nlink]
    assert gone and all(found.st_blocks == 0 for found in gone)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_half_written_file_is_not_written_through_its_hard_link(store: Store, tmp_path: Path) -> None:
    left = store.path / NAME / "epoch.new"
    left.write_bytes(b"left")
    left.chmod(0o600)
    os.link(left, tmp_path / "copy")
    store.index.clear()
    assert (tmp_path / "copy").read_bytes() == b"left"
    assert not left.exists()


# Loss of power.


class Recorder(FileIO):
    """Tracks new names in directories that were not synced since."""

    def __init__(self) -> None:
        self.unsafe: set[str] = set()
        """Paths that a loss of power may remove."""

    def _path(self, name: str, dir_fd: int | None) -> str:
        return name if dir_fd is None else f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{name}"

    def make_directory(self, name: str, dir_fd: int | None = None, mode: int = 0o700) -> None:
        super().make_directory(name, dir_fd, mode)
        self.unsafe.add(self._path(name, dir_fd))

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        path = self._path(name, dir_fd)
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
        fd = super().open(name, flags, mode, dir_fd)
        if is_new:
            self.unsafe.add(path)
        return fd

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        super().rename(old, new, dir_fd)
        self.unsafe.discard(self._path(old, dir_fd))
        self.unsafe.add(self._path(new, dir_fd))

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        synced = os.readlink(f"/proc/self/fd/{fd}")
        self.unsafe = {path for path in self.unsafe if os.path.dirname(path) != synced}

    def copy_what_is_left(self, root: Path, to: Path) -> None:
        """Copy of the tree after a loss of power that removes as much as it may."""
        if str(root) in self.unsafe:
            return
        shutil.copytree(
            root, to, ignore=lambda at, names: [name for name in names if os.path.join(at, name) in self.unsafe]
        )


def offered_after_a_loss_of_power(io: Recorder, path: Path, to: Path) -> set[bytes]:
    io.copy_what_is_left(path, to)
    if to.exists():
        to.chmod(0o700)
    index = disk_store.make_index(to, disk_store.options_for(6 * 12288, num_spare=3, direct=False))
    found = held(index)
    index.close()
    return found


@pytest.mark.parametrize("fsync", list(disk_store.Fsync))
@pytest.mark.parametrize("is_removed", [False, True], ids=["at first", "made anew"])
def test_a_loss_of_power_removes_no_directory_above_synced_records(
    tmp_path: Path, fsync: disk_store.Fsync, is_removed: bool
) -> None:
    io = Recorder()
    options = disk_store.options_for(6 * 12288, num_spare=3, direct=False, fsync=fsync)
    clock = disk_store.Clock()
    index = disk_store.make_index(tmp_path / "store", options, io, clock)
    medium = disk_store.make_medium(tmp_path / "store", options)
    if is_removed:
        shutil.rmtree(tmp_path / "store")
        io.unsafe.clear()
        for number in range(60):
            clock.now_s += options.retry_interval_s
            disk_store.store(index, medium, b"%d" % number, CHUNK)
    assert disk_store.store(index, medium, b"key", CHUNK)
    found = offered_after_a_loss_of_power(io, tmp_path / "store", tmp_path / "left")
    assert (b"key" in found) == (fsync is not disk_store.Fsync.NONE)
    medium.close()
    index.close()


def test_a_failed_sync_of_directories_does_not_stop_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = FaultyIO()
    io.failing["fsync"] = errno.EINVAL
    options = disk_store.options_for(6 * 12288, num_spare=3, fsync=disk_store.Fsync.ALWAYS)
    disk_store.make_index(tmp_path / "store", options, io).close()
    assert "could not be synced" in caplog.text
