"""Which living process holds a lock: for the words of a refusal, never for a decision.

The process that a LOCK names may have ended while one that it forked goes on holding the lock. What says so is /proc;
where that is not there, or hides other processes, nobody is found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_DESCRIPTORS = 50_000
"""That are looked at. It takes less than a second."""
MAX_COMMAND_CHARACTERS = 80


class Holder(NamedTuple):
    """A process that has the lock now."""

    pid: int
    command: str
    """As it was started, or as it calls itself."""


def find_holder(file: os.stat_result, likely_pid: int | None, processes: Path = Path("/proc")) -> Holder | None:
    """Who holds a lock on the file, None when that cannot be seen. `likely_pid` is asked first."""
    left = MAX_DESCRIPTORS
    for pid in _pids(processes, likely_pid):
        directory = processes / str(pid)
        for name in _names(directory / "fd")[:left]:
            left -= 1
            if _is_file(directory / "fd" / name, file) and _holds_a_lock(directory / "fdinfo" / name):
                return Holder(pid, _command(directory))
        if left <= 0:
            break
    return None


def _pids(processes: Path, likely_pid: int | None) -> Iterator[int]:
    found = sorted(int(name) for name in _names(processes) if name.isdecimal())
    if likely_pid in found:
        yield likely_pid
    yield from (pid for pid in found if pid != likely_pid)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []  # not there, another user's, or ended meanwhile


def _is_file(link: Path, file: os.stat_result) -> bool:
    try:
        found = link.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)


def _holds_a_lock(info: Path) -> bool:
    """A file may be open without being locked: by somebody who is refused just now."""
    try:
        return any(line.startswith("lock:") and "FLOCK" in line for line in info.read_text().splitlines())
    except OSError:
        return False


def _command(directory: Path) -> str:
    for name in ("cmdline", "comm"):
        try:
            words = (directory / name).read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if words:
            return words[:MAX_COMMAND_CHARACTERS]
    return "unknown"
