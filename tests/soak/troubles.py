"""Troubles around a running engine: calls, limits, files, directories, clocks. Each begins and ends."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import NamedTuple

from soak.damage import flip_in_metadata, flip_in_segment, scatter_strays
from soak.engine import Clock
from soak.ledger import Log
from soak.small_disk import SmallDisk
from soak.system_calls import Fault, SoakIO


class Blame(StrEnum):
    """What a trouble may cause."""

    SHORTAGE = "shortage"
    """Chunks that are not stored; the process lacks resources."""
    STORES = "stores"
    """Chunks that are not stored. Reads must work."""
    READS = "reads"
    """Reads that fail."""
    TIME = "time"
    """Chunks that are not stored, because of time."""
    FILES = "files"
    """Lost content of files, as recorded in the ledger."""


class Around(NamedTuple):
    """The objects that troubles change."""

    root: Path
    io: SoakIO
    clock: Clock
    log: Log
    random: Random
    small_disk: SmallDisk | None
    is_threaded: bool


class Trouble(NamedTuple):
    """`begin` returns the function that ends it, or None if it is not possible here."""

    name: str
    blame: Blame
    begin: Callable[[Around], Callable[[], None] | None]


def _nothing() -> None:
    """For troubles that end immediately."""


def _calls(fault: Fault, needs_thread: bool = False) -> Callable[[Around], Callable[[], None] | None]:
    def begin(around: Around) -> Callable[[], None] | None:
        if needs_thread and not around.is_threaded:
            return None
        around.io.begin(fault)
        return lambda: around.io.end(fault)

    return begin


def _failing(number: int, calls: str, blame: Blame, share: float = 1.0, is_for_writing: bool = False) -> Trouble:
    of = "changes" if is_for_writing else calls
    name = f"{errno.errorcode[number]} in {of}{'' if share == 1 else ', sometimes'}"
    fault = Fault(name, frozenset(calls.split()), number, share, is_for_writing=is_for_writing)
    return Trouble(name, blame, _calls(fault))


def _slow(calls: str, seconds: float) -> Trouble:
    frozen = seconds == float("inf")
    name = f"{'frozen' if frozen else 'slow'} {calls if calls.count(' ') < 2 else 'calls'}"
    fault = Fault(name, frozenset(calls.split()), seconds=seconds)
    return Trouble(name, Blame.TIME, _calls(fault, needs_thread=frozen))


def _limit(which: int, soft: Callable[[], int]) -> Callable[[Around], Callable[[], None]]:
    def begin(around: Around) -> Callable[[], None]:
        before = resource.getrlimit(which)
        resource.setrlimit(which, (soft(), before[1]))
        return lambda: resource.setrlimit(which, before)

    return begin


def _highest_fd() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _read_only(around: Around) -> Callable[[], None] | None:
    disk = around.small_disk
    if disk is None or not disk.make_read_only():
        return None
    return disk.make_writable


def _full(around: Around) -> Callable[[], None] | None:
    """Another process fills the file system."""
    if around.small_disk is None:
        return None
    filler = around.root.parent / "somebody else's"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    return lambda: filler.unlink(missing_ok=True)


def _jump(around: Around) -> Callable[[], None]:
    around.clock.skew_s += around.random.choice([1.0, 40.0, 4000.0])
    return _nothing


def _removed(levels: int) -> Callable[[Around], Callable[[], None]]:
    """Remove the root, its only namespace, or a rank's directory."""

    def begin(around: Around) -> Callable[[], None]:
        target = around.root
        for _ in range(levels):
            inner = sorted(path for path in target.iterdir() if path.is_dir())
            if not inner:
                return _nothing
            target = around.random.choice(inner)
        around.log.say("forgotten")
        shutil.rmtree(target, ignore_errors=True)
        return _nothing

    return begin


def _renamed(around: Around) -> Callable[[], None]:
    away = around.root.with_name("away")
    shutil.rmtree(away, ignore_errors=True)
    around.log.say("forgotten")
    around.root.rename(away)
    return lambda: shutil.rmtree(away, ignore_errors=True)


def _lock_deleted(around: Around) -> Callable[[], None]:
    for lock in around.root.glob("*/LOCK"):
        lock.unlink()
    return _nothing


def _damaged(damage: Callable[[Path, Log, Random], None]) -> Callable[[Around], Callable[[], None]]:
    def begin(around: Around) -> Callable[[], None]:
        damage(around.root, around.log, around.random)
        return _nothing

    return begin


INF = float("inf")
TROUBLES = [
    _failing(errno.EIO, "preadv", Blame.READS),
    _failing(errno.EIO, "preadv", Blame.READS, share=0.2),
    _failing(errno.EIO, "pwritev", Blame.STORES),
    _failing(errno.EIO, "pwritev", Blame.STORES, share=0.2),
    _failing(errno.EIO, "fsync fdatasync", Blame.STORES),
    _failing(errno.EIO, "rename remove list", Blame.STORES),
    _failing(errno.ENOSPC, "pwritev allocate make_directory", Blame.STORES),
    _failing(errno.ENOSPC, "allocate", Blame.STORES, share=0.5),
    _failing(errno.EDQUOT, "pwritev allocate", Blame.STORES),
    _failing(errno.EROFS, "open pwritev allocate truncate rename remove make_directory", Blame.STORES, 1.0, True),
    _failing(errno.EACCES, "rename remove make_directory", Blame.STORES),
    _failing(errno.EMFILE, "open", Blame.SHORTAGE),
    _failing(errno.ENFILE, "open", Blame.SHORTAGE, share=0.3),
    _failing(errno.ENOMEM, "open preadv pwritev", Blame.SHORTAGE),
    _failing(errno.ENOMEM, "open preadv pwritev", Blame.SHORTAGE, share=0.2),
    _failing(errno.EAGAIN, "open preadv pwritev", Blame.SHORTAGE, share=0.3),
    _slow("preadv pwritev", 0.005),
    _slow("fsync fdatasync", 0.02),
    _slow("preadv", INF),
    _slow("pwritev", INF),
    _slow("open preadv pwritev allocate truncate rename remove fsync fdatasync", INF),
    Trouble("RLIMIT_NOFILE", Blame.SHORTAGE, _limit(resource.RLIMIT_NOFILE, lambda: _highest_fd() + 1)),
    Trouble("RLIMIT_FSIZE", Blame.STORES, _limit(resource.RLIMIT_FSIZE, lambda: 100_000)),
    Trouble("file system full", Blame.STORES, _full),
    Trouble("remounted read-only", Blame.STORES, _read_only),
    Trouble("clock jumps", Blame.TIME, _jump),
]
DAMAGES = [
    Trouble("bits flipped in a segment", Blame.FILES, _damaged(flip_in_segment)),
    Trouble("bits flipped in metadata", Blame.FILES, _damaged(flip_in_metadata)),
    Trouble("stray files", Blame.FILES, _damaged(scatter_strays)),
    Trouble("LOCK deleted", Blame.FILES, _lock_deleted),
    Trouble("root removed", Blame.FILES, _removed(0)),
    Trouble("namespace removed", Blame.FILES, _removed(1)),
    Trouble("rank removed", Blame.FILES, _removed(2)),
    Trouble("root renamed", Blame.FILES, _renamed),
]
