"""What the disk tier's index costs the thread that asks it, by number of records: ends, pauses, collections, memory.

What is measured: CPU time of the calling thread and wall clock for `close` and `clear`; the longest pauses of a thread
that does nothing but ask, while a snapshot is written and while what a clear forgot is freed; what Python's garbage
collector takes for its oldest generation; and how much memory a snapshot takes. A pause is CPU time that all other
threads of this process had between two answers, so that other processes of the machine are none of it.

What is not: bytes of chunks. Segment files are sparse and no chunk is written.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import disk_subject

from hybridkv.tiers import Slot
from hybridkv.tiers.disk import DiskIndex, DiskOptions, FileIO, Fsync

RECORDS = (100_000, 500_000, 1_000_000)
RECORD_BYTES = 8192
ALONE_S = 1.0
SHORTEST_PAUSE_S = 0.0002
NUM_PAUSES = 8


class SparseFiles(FileIO):
    """Segments take up no space before they are written, which here is never."""

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.truncate(fd, num_bytes)


class Clock:
    """The real one, and ahead of it when somebody wants an interval to be over."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Asker:
    """A thread that does nothing but ask an index, and notes for how long somebody else had the interpreter."""

    def __init__(self, index: DiskIndex, keys: list[bytes]) -> None:
        self._index = index
        self._keys = keys

    def ask_until(self, is_over: Callable[[], bool]) -> list[float]:
        """The longest pauses in milliseconds: CPU time of all other threads of this process between two answers."""
        lookup, everybody, own = self._index.lookup, time.process_time, time.thread_time
        pauses: list[float] = []
        others_s = everybody() - own()
        for turn, key in enumerate(itertools.cycle(self._keys)):
            lookup(key)
            now_s = everybody() - own()
            if now_s - others_s > SHORTEST_PAUSE_S:
                pauses.append(1000 * (now_s - others_s))
            others_s = now_s
            if not turn % 256 and is_over():
                break
        return sorted(pauses, reverse=True)[:NUM_PAUSES]


def measure(root: Path, count: int) -> dict[str, object]:
    """Everything, for a store of so many records."""
    found: dict[str, object] = {}
    clock = Clock()
    with tempfile.TemporaryDirectory(dir=root) as path:
        keys = [number.to_bytes(32, "little") for number in range(count)]
        collection_before_s = collection_s()
        index = opened(Path(path), count, clock)
        fill(index, keys)
        found["collection_ms"] = 1000 * (collection_s() - collection_before_s)
        found |= snapshot_gaps(index, keys, clock)
        found |= closing(index)
        index = opened(Path(path), count, clock)
        found["reopened"] = index.num_keys
        found |= clearing(index, keys)
        index.close()
    return found


def opened(path: Path, count: int, clock: Clock) -> DiskIndex:
    options = DiskOptions(
        capacity_bytes=int(1.3 * count * RECORD_BYTES) + (64 << 20),
        fsync=Fsync.NONE,
        max_records=count + 1,
        snapshot_interval_s=1e9,
        close_timeout_s=600.0,
    )
    return DiskIndex(str(path), disk_subject.fingerprint(), options, io=SparseFiles(), clock=clock)


def fill(index: DiskIndex, keys: list[bytes]) -> None:
    for key in keys:
        while not isinstance(index.reserve(key, RECORD_BYTES // 2), Slot):
            time.sleep(disk_subject.POLL_INTERVAL_S)
        index.commit(key)
    index.drain(600.0)


def collection_s() -> float:
    """Of the oldest generation, which looks at everything; the second one in a row, which finds nothing."""
    gc.collect()
    started_s = time.thread_time()
    gc.collect()
    return time.thread_time() - started_s


def snapshot_gaps(index: DiskIndex, keys: list[bytes], clock: Clock) -> dict[str, object]:
    """While nothing else happens, and while a snapshot is written."""
    asker = Asker(index, keys)
    until_s = time.monotonic() + ALONE_S
    alone = asker.ask_until(lambda: time.monotonic() >= until_s)
    index.take_disk_counts()
    clock.ahead_s += 2e9
    with peak_memory() as peak:
        beside = asker.ask_until(lambda: index.take_disk_counts().snapshots > 0)
    return {"gaps alone": alone, "gaps beside a snapshot": beside, "MiB for a snapshot": peak()}


def closing(index: DiskIndex) -> dict[str, object]:
    with peak_memory() as peak:
        started = time.perf_counter(), time.thread_time()
        index.close()
        wall_s, cpu_s = time.perf_counter() - started[0], time.thread_time() - started[1]
    return {"close": {"s": wall_s, "CPU s of the caller": cpu_s, "MiB": peak()}}


def clearing(index: DiskIndex, keys: list[bytes]) -> dict[str, object]:
    started = time.perf_counter(), time.thread_time()
    index.clear()
    wall_s, cpu_s = time.perf_counter() - started[0], time.thread_time() - started[1]
    gaps = Asker(index, keys).ask_until(lambda: index.take_disk_counts().snapshots > 0)
    return {"clear": {"s": wall_s, "CPU s of the caller": cpu_s}, "gaps after a clear": gaps}


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """How many MiB more the process had at most, since the beginning of the block, than at its beginning."""
    Path("/proc/self/clear_refs").write_text("5")
    before_kib = status_kib("VmRSS")
    yield lambda: (status_kib("VmHWM") - before_kib) / 1024


def status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"no {name} in /proc/self/status")
