"""System calls that fail, are slow, block, or end the process while they run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from hybridkv.tiers.disk import FileIO

CHANGES = ("pwritev", "allocate", "truncate", "remove", "rename", "make_directory", "remove_directory")
"""Calls that change the disk. A process may be ended in each of them."""


class Fault(NamedTuple):
    """Calls that misbehave."""

    name: str
    calls: frozenset[str]
    error: int = 0
    """0 means that calls are slow or block."""
    share: float = 1.0
    """Fraction of the calls that are affected."""
    seconds: float = 0.0
    """Additional seconds per call. Infinite: until the fault ends."""
    is_for_writing: bool = False
    """Whether only those open calls are affected that want to write."""


class SoakIO(FileIO):
    """The real calls, except for active faults.

    Args:
        seed: determines which calls a fault affects.
        end_at: number of the call in `CHANGES` during which `end` is called; 0: never.
        end: ends the process; does not return.
    """

    def __init__(self, seed: str, end_at: int = 0, end: Callable[[], None] | None = None) -> None:
        self._random = Random(f"calls {seed}")
        self._end_at = end_at
        self._end = end or kill_this_process
        self._lock = threading.Lock()
        self._faults: dict[Fault, threading.Event] = {}
        self.num_changes = 0
        self.num_met = 0

    def begin(self, fault: Fault) -> None:
        with self._lock:
            self._faults[fault] = threading.Event()

    def end(self, fault: Fault) -> None:
        with self._lock:
            self._faults.pop(fault).set()

    def end_all(self) -> None:
        for fault in list(self._faults):
            self.end(fault)

    def meet(self, call: str, is_for_writing: bool = True) -> None:
        """Apply the active faults before a call."""
        with self._lock:
            met = [
                (fault, over)
                for fault, over in self._faults.items()
                if call in fault.calls
                and (is_for_writing or not fault.is_for_writing)
                and self._random.random() < fault.share
            ]
            self.num_met += len(met)
        for fault, over in met:
            if fault.error:
                raise OSError(fault.error, os.strerror(fault.error))
            if fault.seconds == float("inf"):
                over.wait()
            else:
                time.sleep(fault.seconds)

    def how_to_end(self) -> int:
        """0: continue; 1 to 3: end the process before, during or after this call."""
        with self._lock:
            self.num_changes += 1
            return 1 + self._end_at % 3 if self.num_changes == self._end_at else 0

    def change(self, name: str, call: Callable[[], Any], part: Callable[[], object] | None = None) -> Any:
        """A call that changes something; `part` performs a part of it."""
        self.meet(name)
        how = self.how_to_end()
        if how == 2 and part is not None:
            part()
        if how in (1, 2):
            self._end()
        result = call()
        if how == 3:
            self._end()
        return result

    def open(self, name: str, flags: int, mode: int = 0o600, dir_fd: int | None = None) -> int:
        self.meet("open", bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)))
        return super().open(name, flags, mode, dir_fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.meet("preadv")
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self.meet("fdatasync")
        super().fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self.meet("fsync")
        super().fsync(fd)

    def list(self, fd: int) -> list[str]:
        self.meet("list")
        return super().list(fd)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
        def part() -> None:
            joined = b"".join(buffers)
            whole = len(joined) // 2 // 4096 * 4096
            # Through another descriptor, since this one may be open with O_DIRECT.
            other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
            os.pwrite(other, joined[: whole or len(joined) // 2], offset)

        written: int = self.change("pwritev", lambda: super(SoakIO, self).pwritev(fd, buffers, offset), part)
        return written

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.change(
            "allocate",
            lambda: super(SoakIO, self).allocate(fd, num_bytes),
            lambda: os.ftruncate(fd, num_bytes // 2),
        )

    def truncate(self, fd: int, num_bytes: int) -> None:
        self.change("truncate", lambda: super(SoakIO, self).truncate(fd, num_bytes))

    def remove(self, name: str, dir_fd: int) -> None:
        self.change("remove", lambda: super(SoakIO, self).remove(name, dir_fd))

    def rename(self, old: str, new: str, dir_fd: int) -> None:
        self.change("rename", lambda: super(SoakIO, self).rename(old, new, dir_fd))

    def make_directory(self, name: str, dir_fd: int | None = None, mode: int = 0o700) -> None:
        self.change("make_directory", lambda: super(SoakIO, self).make_directory(name, dir_fd, mode))

    def remove_directory(self, name: str, dir_fd: int) -> None:
        self.change("remove_directory", lambda: super(SoakIO, self).remove_directory(name, dir_fd))


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
