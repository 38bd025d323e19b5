"""Locks of a namespace, the directory of one cache. Takes a lock; if the lock is held already, finds the process that
holds it, for the error.

A namespace has two locks. One is on its directory, because `systemd-tmpfiles` ignores locked directories, and because a
directory cannot be removed before its files. The other is on the file LOCK in the directory, for file systems that
cannot lock directories.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybridkv.tiers.disk.format.layout import LOCK_NAME
from hybridkv.tiers.errors import TierConfigurationError
from hybridkv.tiers.files.directory import Directory

MAX_DESCRIPTORS = 50_000
"""Limit of descriptors in one search, which then takes less than a second."""
MAX_COMMAND_CHARACTERS = 80


class LockHolder(NamedTuple):
    """Process that holds the lock now."""

    pid: int
    command: str
    """Command line of the process, or its name."""


def find_holder(file: os.stat_result, likely_pid: int | None, processes: Path = Path("/proc")) -> LockHolder | None:
    """Process that holds a lock on the file; None if the first `MAX_DESCRIPTORS` descriptors in /proc do not show it.
    Examines `likely_pid` first.

    Use the result for texts only, never for a decision. `likely_pid` is the process id that the file LOCK contains.
    That process may have ended while its child still holds the lock.
    """
    left = MAX_DESCRIPTORS
    for pid in _pids(processes, likely_pid):
        directory = processes / str(pid)
        for name in _names(directory / "fd")[:left]:
            left -= 1
            if _is_file(directory / "fd" / name, file) and _holds_a_lock(directory / "fdinfo" / name):
                return LockHolder(pid, _command(directory))
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
        return []  # no such directory, no permission, or the process has just ended


def _is_file(link: Path, file: os.stat_result) -> bool:
    try:
        found = link.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)


def _holds_a_lock(info: Path) -> bool:
    """True if this descriptor holds a lock. Another engine may have the file open without the lock: it tries to lock
    the file, and is refused shortly after."""
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


class NamespaceTakenError(OSError):
    """Another engine has or had the namespace open, so this engine's index may not match the files any more."""

    def __init__(self, path: str) -> None:
        super().__init__(
            errno.EBUSY,
            "another engine has or had it open: nothing is written or deleted here any more, loads go on; "
            "hint: stop the other engine, and restart this one",
            path,
        )


def try_to_lock(directory: Directory) -> bool:
    """Lock the directory. False if the lock is held already, by any process. True also if the directory cannot be
    locked, for example because the file system has no such locks."""
    try:
        return directory.io.lock(directory.fd)
    except OSError:
        return True


def refused_lock(directory: Directory, fd: int) -> TierConfigurationError:
    """Error that names the process that holds the lock. `fd`: descriptor of the locked file or directory."""
    try:
        named = (directory.read_file(LOCK_NAME) or b"").decode(errors="replace").strip()
    except OSError:
        named = ""
    holder = find_holder(directory.io.stat(fd), int(named) if named.isdecimal() else None)
    if holder is not None:
        words = f"process {holder.pid} ({holder.command})"
    else:
        words = f"process {named or 'unknown'}, which cannot be seen from here"
    return TierConfigurationError(
        "path",
        "a namespace that no other engine has open",
        f"{directory.path}, open in {words}",
        hint="give each engine a path of its own, or end the other engine",
    )


def is_same(one: os.stat_result, other: os.stat_result) -> bool:
    """True if both describe the same file."""
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
