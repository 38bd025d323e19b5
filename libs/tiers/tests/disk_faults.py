"""System calls that fail or stand still as a test says."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hybridkv.tiers.disk import FileIO

TIMEOUT_S = 30.0


class FaultyIO(FileIO):
    """Calls named in `failing` raise an `OSError` of that number; calls named in `stalled` wait for their event."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.stalled: dict[str, threading.Event] = {}
        self.has_stalled = threading.Event()
        self.calls: list[tuple[str, int]] = []

    def meet(self, name: str, num_bytes: int = 0) -> None:
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
        self.meet("preadv", sum(map(len, buffers)))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        self.meet("pwritev", sum(map(len, buffers)))
        return super().pwritev(fd, buffers, offset)


def _wrapped(name: str) -> Callable[..., Any]:
    def call(self: FaultyIO, *arguments: Any, **named: Any) -> Any:
        self.meet(name)
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


class WithoutDirect(FileIO):
    """A file system without O_DIRECT."""

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(name, flags, mode, dir_fd)


class InPieces(FileIO):
    """Reads and writes no more than a page at a time."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [buffers[0][:4096]], offset)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(fd, [buffers[0][:4096]], offset)
