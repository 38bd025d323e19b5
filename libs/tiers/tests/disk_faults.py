"""System calls that fail or block on demand."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import disk_store

from hybridkv.tiers import FailureReason
from hybridkv.tiers.disk import DiskIndex, DiskMedium, DiskOptions, FileIO

TIMEOUT_S = disk_store.TIMEOUT_S


class FaultyIO(FileIO):
    """File calls that fail or block on demand.

    Calls named in `failing` raise an `OSError` of that number; calls named in `stalled` wait for their event. Calls
    that open, make or remove a file or directory named in `failing_names` fail too.
    """

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.failing_names: dict[str, int] = {}
        self.stalled: dict[str, threading.Event] = {}
        self.has_stalled = threading.Event()
        self.calls: list[tuple[str, int]] = []

    def apply_faults(self, name: str, num_bytes: int = 0) -> None:
        self.calls.append((name, num_bytes))
        event = self.stalled.get(name)
        if event is not None:
            self.has_stalled.set()
            assert event.wait(TIMEOUT_S)
        number = self.failing.get(name)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def count(self, name: str) -> int:
        return sum(called == name for called, _ in self.calls)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.apply_faults("preadv", sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        self.apply_faults("pwritev", sum(map(len, buffers)))
        return super().pwritev(fd, buffers, offset)


def _wrapped(name: str) -> Callable[..., Any]:
    def call(self: FaultyIO, *arguments: Any, **named: Any) -> Any:
        self.apply_faults(name)
        number = self.failing_names.get(arguments[0]) if isinstance(arguments[0], str) else None
        if number is not None:
            raise OSError(number, os.strerror(number))
        return getattr(FileIO, name)(self, *arguments, **named)

    return call


for _name in (
    "open",
    "close",
    "allocate",
    "truncate",
    "fdatasync",
    "fsync",
    "list",
    "make_directory",
    "remove",
    "rename",
    "lock",
):
    setattr(FaultyIO, _name, _wrapped(_name))


CHUNK = b"chunk" * 1000
OPTIONS = disk_store.options_for(6 * 12288, num_spare=3, direct=False)


class Store:
    """Disk index and medium over system calls that can be made to fail."""

    def __init__(self, path: Path, options: DiskOptions = OPTIONS) -> None:
        self.path = path
        self.options = options
        self.io = FaultyIO()
        self.clock = disk_store.Clock()
        self.index: DiskIndex = disk_store.make_index(path, options, self.io, self.clock)
        self.medium: DiskMedium = disk_store.make_medium(path, options, self.io)
        self.num_stored = 0

    def store(self, key: bytes | None = None) -> bool:
        self.num_stored += 1
        return disk_store.store(self.index, self.medium, key or b"%d" % self.num_stored, CHUNK)

    def fill(self) -> None:
        """Store chunks until every segment is in use."""
        for _ in range(40):
            assert self.store()

    def load_fails_with(self, key: bytes) -> FailureReason | None:
        loaded = disk_store.load(self.index, self.medium, key)
        assert loaded is not None
        return loaded[0].failure.reason if loaded[0].failure else None

    def close(self) -> None:
        self.io.failing.clear()
        self.io.failing_names.clear()
        self.medium.close()
        self.index.close()


class WithoutDirect(FileIO):
    """A file system without O_DIRECT."""

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(name, flags, mode, dir_fd)


class InPieces(FileIO):
    """Reads and writes at most one page per call."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [buffers[0][:4096]], offset)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(fd, [buffers[0][:4096]], offset)
