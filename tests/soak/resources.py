"""Descriptors, threads and memory of this process: limited while an engine runs, and returned at its end."""

from __future__ import annotations

import contextlib
import os
import time

import patience

from hybridkv.tiers.disk import DiskOptions
from soak.findings import SoakError
from soak.tally import Tally

OTHER_FDS = 40
"""Descriptors of directories, of the few files that an index keeps open, and of this process itself."""


class Resources:
    """Compares with the numbers at its creation."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._fds_before, self._names_before = _num("fd"), _fd_names()
        self._threads_before = _num("task")
        self._most_fds = self._most_threads = 1 << 30
        self._countdown = 0

    def note_open(self, options: DiskOptions, num_ranks: int) -> None:
        """From now on, allow the resources that an engine with these options may use."""
        media = 2 * num_ranks
        self._most_fds = self._fds_before + media * (options.max_open_files + OTHER_FDS)
        self._most_threads = self._threads_before + media * (options.max_in_flight + 4) + 4

    def sample(self) -> None:
        """Check the numbers occasionally, because reading them takes time."""
        self._countdown -= 1
        if self._countdown > 0:
            return
        self._countdown = 20
        try:
            fds, threads, rss_kb = _num("fd"), _num("task"), _rss_kb()
        except OSError:
            return  # a trouble has used up all descriptors
        self._tally.most("most descriptors", fds)
        self._tally.most("most threads", threads)
        self._tally.most("most memory, MiB", rss_kb // 1024)
        if fds > self._most_fds:
            raise SoakError("leaked", f"{fds} descriptors, at most {self._most_fds} expected")
        if threads > self._most_threads:
            raise SoakError("leaked", f"{threads} threads, at most {self._most_threads} expected")

    def require_given_back(self) -> None:
        """Require the initial numbers, after an engine was closed without a stall."""
        fds = _num("fd")
        if fds > self._fds_before:
            detail = ", ".join(sorted(_fd_names() - self._names_before))
            raise SoakError("leaked", f"{fds - self._fds_before} descriptors leaked after the end, including {detail}")
        # The watchdog is a thread too. The system removes a thread a moment after it was joined.
        until_s = time.monotonic() + patience.seconds(1.0)
        while (threads := _num("task")) > self._threads_before + 1:
            if time.monotonic() > until_s:
                names = ", ".join(sorted(_thread_names()))
                raise SoakError("leaked", f"{threads - self._threads_before} threads leaked after the end: {names}")
            time.sleep(0.005)


def _num(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


def _fd_names() -> set[str]:
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            names.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return names


def _thread_names() -> list[str]:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return names


def _rss_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
