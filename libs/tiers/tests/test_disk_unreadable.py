"""An unreadable file does not stop an opening: it counts as damaged and costs only its own contents."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import disk_store
import msgspec
import pytest

from hybridkv.tiers import Slot, TierConfigurationError
from hybridkv.tiers.disk import FileIO
from hybridkv.tiers.disk.format.layout import segment_name

OPTIONS = msgspec.structs.replace(disk_store.options_for(6 * 12288, direct=False), spare_share=0.0)
KEYS = {b"key %d" % number for number in range(8)}
WITHDRAWN = {b"key 0", b"key 1"}
CHUNK = b"x" * 5000


class Unreadable(FileIO):
    """Files of some names cannot be opened for reading, or cannot be read."""

    def __init__(self, names: set[str], number: int, call: str) -> None:
        self.names = names
        self.number = number
        self.call = call
        self.fds: set[int] = set()

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        if name in self.names and self.call == "open" and not flags & os.O_CREAT:
            raise OSError(self.number, os.strerror(self.number), name)
        fd = super().open(name, flags, mode, dir_fd)
        if name in self.names:
            self.fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.fds.discard(fd)
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.call == "preadv" and fd in self.fds:
            raise OSError(self.number, os.strerror(self.number))
        return super().preadv(fd, buffers, offset)

    def list(self, fd: int) -> list[str]:
        if self.call == "list" and fd in self.fds:
            raise OSError(self.number, os.strerror(self.number))
        return super().list(fd)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Store in two segments, with some withdrawn chunks."""
    path = tmp_path / "store"
    index = disk_store.make_index(path, OPTIONS)
    medium = disk_store.make_medium(path, OPTIONS)
    for key in sorted(KEYS):
        assert disk_store.store(index, medium, key, CHUNK)
    for key in WITHDRAWN:
        assert index.invalidate(key)
    medium.close()
    index.close()
    return path


def offered(path: Path, io: FileIO | None = None) -> set[bytes]:
    """Keys that an opening finds. Loads each chunk, stores one more, and closes."""
    index = disk_store.make_index(path, OPTIONS, io)
    medium = disk_store.make_medium(path, OPTIONS)
    found = set(disk_store.records_of(index))
    for key in found:
        loaded = disk_store.load(index, medium, key)
        assert loaded is not None and loaded[0].failure is None and loaded[1] == CHUNK
    assert b"one more" in found or disk_store.store(index, medium, b"one more", CHUNK)
    assert disk_store.disk_bytes(path) <= OPTIONS.capacity_bytes
    medium.close()
    index.close()
    return found - {b"one more"}


@pytest.mark.parametrize(
    ("name", "call"),
    [*product(["snapshot", "changes", "quarantine", "namespace.json"], ["open", "preadv"]), ("LOCK", "preadv")],
)
@pytest.mark.parametrize("number", [errno.EIO, pytest.param(errno.EACCES, marks=pytest.mark.full)])
def test_unreadable_metadata_costs_nothing(path: Path, name: str, call: str, number: int) -> None:
    assert offered(path, Unreadable({name}, number, call)) == KEYS - WITHDRAWN
    assert offered(path) == KEYS - WITHDRAWN


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_unreadable_epoch_hides_older_chunks(path: Path, call: str) -> None:
    assert offered(path, Unreadable({"epoch"}, errno.EIO, call)) == set()
    assert offered(path) == set()


def test_a_segment_that_cannot_be_opened_costs_its_chunks_and_is_left_alone(path: Path) -> None:
    file = path / disk_store.FINGERPRINT.digest().hex() / "rank-0" / segment_name(0)
    before = file.read_bytes()
    index = disk_store.make_index(path, OPTIONS, Unreadable({file.name}, errno.EIO, "open"))
    assert index.num_keys == 2
    medium = disk_store.make_medium(path, OPTIONS)
    for number in range(60):
        assert disk_store.store(index, medium, b"new %d" % number, CHUNK)
        assert disk_store.disk_bytes(path) <= OPTIONS.capacity_bytes
    medium.close()
    index.close()
    assert file.read_bytes() == before


def test_a_segment_that_could_not_be_opened_is_found_again_without_a_snapshot(path: Path) -> None:
    index = disk_store.make_index(path, OPTIONS, Unreadable({segment_name(0)}, errno.EIO, "open"))
    assert index.num_keys == 2
    index._namespace.close()  # as after a crash
    assert offered(path) == KEYS - WITHDRAWN


@pytest.mark.parametrize("number", [errno.EIO, pytest.param(errno.EACCES, marks=pytest.mark.full)])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("is_pending", [True, False])
def test_a_segment_that_could_not_be_opened_once_is_found_again(
    tmp_path: Path, is_pending: bool, is_closed: bool, number: int
) -> None:
    """A snapshot must not cover a segment with unknown records."""
    options = disk_store.options_for(12 * 8192, num_spare=3, changes_interval_s=0.0, direct=False)
    store, clock = tmp_path / "store", disk_store.Clock()
    index, medium = disk_store.make_index(store, options), disk_store.make_medium(store, options)
    for name in range(30):
        assert disk_store.store(index, medium, b"%d" % name, CHUNK[:4000])
    assert isinstance(index.reserve(b"pending", 4000), Slot)
    if not is_pending:
        index.abort(b"pending")
    held, first = set(disk_store.records_of(index)) - {b"pending"}, min(index._segments.by_number)
    medium.close()
    index._namespace.close()
    assert len(held) == 11

    index = disk_store.make_index(store, options, Unreadable({segment_name(first)}, number, "open"), clock)
    medium = disk_store.make_medium(store, options)
    assert set(disk_store.records_of(index)) < held
    clock.now_s += 2 * options.snapshot_interval_s
    assert disk_store.store(index, medium, b"new", CHUNK[:4000])
    assert index.drain(30.0)
    medium.close()
    if is_closed:
        index.close()
    index._namespace.close()

    index = disk_store.make_index(store, options)
    assert set(disk_store.records_of(index)) == held | {b"new"}
    index.close()


def test_a_segment_from_before_a_clear_prevents_no_snapshot(path: Path) -> None:
    """Its records may not be found again, so that a snapshot without them is complete."""
    index = disk_store.make_index(path, OPTIONS, Unreadable({segment_name(0)}, errno.EIO, "open"))
    assert index.take_disk_counts().snapshots == 0
    index.clear()
    assert index.drain(30.0)
    assert index.take_disk_counts().snapshots == 1
    index.close()
    assert offered(path) == set()


def test_a_segment_that_cannot_be_opened_is_not_found_after_a_clear(path: Path) -> None:
    """Also if the epoch file is lost."""
    name = segment_name(0)
    index = disk_store.make_index(path, OPTIONS, Unreadable({name}, errno.EIO, "open"))
    index.clear()
    index._namespace.close()
    (path / disk_store.FINGERPRINT.digest().hex() / "epoch").unlink()
    assert offered(path, Unreadable({name}, errno.EIO, "open")) == set()
    assert offered(path) == set()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_an_unreadable_segment_costs_its_chunks(path: Path, call: str) -> None:
    (path / disk_store.FINGERPRINT.digest().hex() / "snapshot").unlink()
    assert offered(path, Unreadable({segment_name(0)}, errno.EIO, call)) == {b"key 6", b"key 7"}


def test_a_read_only_file_system_loads_its_chunks(path: Path) -> None:
    class ReadOnly(FileIO):
        def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)
            return super().open(name, flags, mode, dir_fd)

    index = disk_store.make_index(path, OPTIONS, ReadOnly())
    assert set(disk_store.records_of(index)) == KEYS - WITHDRAWN
    index.close()


@pytest.mark.parametrize(
    ("name", "call", "number"),
    [
        ("LOCK", "open", errno.EIO),
        ("rank-0", "open", errno.EIO),
        ("rank-0", "list", errno.EIO),
        ("epoch", "open", errno.EMFILE),
        (segment_name(0), "open", errno.ENFILE),
    ],
)
def test_an_error_that_stops_an_opening_names_the_file(path: Path, name: str, call: str, number: int) -> None:
    class LockUnreadable(Unreadable):
        def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
            return (
                super().open(name, flags & ~os.O_CREAT, mode, dir_fd)
                if name == "LOCK"
                else super().open(name, flags, mode, dir_fd)
            )

    with pytest.raises(TierConfigurationError, match=os.strerror(number)) as caught:
        disk_store.make_index(path, OPTIONS, LockUnreadable({name}, number, call))
    assert f"/{name}: " in str(caught.value)
    assert offered(path) == KEYS - WITHDRAWN


@pytest.mark.parametrize("name", ["snapshot", "quarantine", "changes"])
def test_oversized_metadata_is_logged_with_its_size_and_the_bound(
    path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = next(path.glob(f"*/{name}"))
    assert offered(path) == KEYS - WITHDRAWN
    assert not [record for record in caplog.records if name in record.getMessage()], "it is not too large yet"
    os.truncate(file, 1 << 40)
    offered(path)
    [said] = [record for record in caplog.records if name in record.getMessage()]
    assert said.levelname == "WARNING" and str(file) in said.getMessage()
    assert f"{1 << 40} bytes" in said.getMessage() and "the limit is" in said.getMessage()
