"""Cost of the disk tier's index to the thread that uses it, by number of records: close, clear, pauses, garbage
collections, memory.

Measures CPU time of the calling thread and wall time of `close` and `clear`; the longest pauses of a thread that only
looks up keys, while a snapshot is written and while the memory of a `clear` is freed; the time of Python's garbage
collector for its oldest generation; and the memory of a snapshot. A pause is the CPU time of all other threads of this
process between two answers, so other processes of the machine do not count.

Not measured: bytes of chunks. Segment files are sparse and no chunk is written.
"""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import disk_subject

from hybridkv.tiers import Slot
from hybridkv.tiers.disk import DiskIndex, DiskOptions, FileIO, Fsync

RECORD_BYTES = 8192
ALONE_S = 1.0
NEVER_S = 1e9
TIMEOUT_S = 600.0
SHORTEST_PAUSE_S = 0.0002
NUM_PAUSES = 8


class SparseFiles(FileIO):
    """Segments without disk space. They are never written."""

    def allocate(self, fd: int, num_bytes: int) -> None:
        self.truncate(fd, num_bytes)


class Clock:
    """Monotonic clock plus `ahead_s`. A caller raises `ahead_s` to skip an interval."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def pauses_ms(index: DiskIndex, keys: list[bytes], is_over: Callable[[], bool]) -> list[float]:
    """Looks keys up until `is_over`. Returns the longest pauses: CPU time of all other threads between two answers."""
    lookup, process_s, own_s = index.lookup, time.process_time, time.thread_time
    pauses: list[float] = []
    others_s = process_s() - own_s()
    for turn, key in enumerate(itertools.cycle(keys)):
        lookup(key)
        now_s = process_s() - own_s()
        if now_s - others_s > SHORTEST_PAUSE_S:
            pauses.append(1000 * (now_s - others_s))
        others_s = now_s
        if not turn % 256 and is_over():
            break
    return sorted(pauses, reverse=True)[:NUM_PAUSES]


def measure(root: Path) -> dict[str, dict[str, object]]:
    """Results by number of records."""
    found = {}
    for count in disk_subject.RECORDS:
        with tempfile.TemporaryDirectory(dir=root) as path:
            found[str(count)] = of_store(Path(path), count)
        print(f"{count:9,d} records: {json.dumps(found[str(count)])}", flush=True)
    return found


def of_store(path: Path, count: int) -> dict[str, object]:
    keys = [number.to_bytes(32, "little") for number in range(count)]
    before_s = collection_s()
    clock = Clock()
    index = opened(path, count, clock)
    growth_ms = fill(index, keys)
    found: dict[str, object] = {"longest store, ms": growth_ms, "collection, ms": 1000 * (collection_s() - before_s)}
    found |= during_a_snapshot(index, keys, clock)
    found["close"] = cost_of(index.close)
    index = opened(path, count, clock)
    if index.num_keys != count:
        raise RuntimeError(f"{index.num_keys} of {count} records were restored")
    index.take_disk_counts()
    found["clear"] = cost_of(index.clear)
    # The first snapshot after a clear waits until all old memory is freed.
    pauses = pauses_ms(index, keys, lambda: index.take_disk_counts().snapshots > 0)
    index.close()
    return found | {"pauses after a clear, ms": pauses}


def opened(path: Path, count: int, clock: Clock) -> DiskIndex:
    options = DiskOptions(
        capacity_bytes=int(1.3 * count * RECORD_BYTES) + (64 << 20),
        fsync=Fsync.NONE,
        max_records=count + 1,
        snapshot_interval_s=NEVER_S,
        close_timeout_s=TIMEOUT_S,
    )
    return DiskIndex(str(path), disk_subject.fingerprint(), options, io=SparseFiles(), clock=clock)


def fill(index: DiskIndex, keys: list[bytes]) -> float:
    """Stores the keys. Returns the longest CPU time of one reservation with its commit, when tables grew, in ms."""
    longest_s = 0.0
    for key in keys:
        started_s = time.thread_time()
        while not isinstance(index.reserve(key, RECORD_BYTES // 2), Slot):
            time.sleep(disk_subject.POLL_INTERVAL_S)
        index.commit(key)
        longest_s = max(longest_s, time.thread_time() - started_s)
    index.drain(TIMEOUT_S)
    return 1000 * longest_s


def collection_s() -> float:
    """Seconds of a full garbage collection without garbage: the second of two."""
    gc.collect()
    started_s = time.thread_time()
    gc.collect()
    return time.thread_time() - started_s


def during_a_snapshot(index: DiskIndex, keys: list[bytes], clock: Clock) -> dict[str, object]:
    """Pauses without other work, pauses while a snapshot is written, and the memory of the snapshot."""
    until_s = time.monotonic() + ALONE_S
    alone = pauses_ms(index, keys, lambda: time.monotonic() >= until_s)
    index.reserve(b"something new to write down", RECORD_BYTES // 2)
    index.abort(b"something new to write down")
    index.take_disk_counts()
    clock.ahead_s += 2 * NEVER_S
    with peak_memory() as peak_mib:
        during = pauses_ms(index, keys, lambda: index.take_disk_counts().snapshots > 0)
    return {"pauses alone, ms": alone, "pauses beside a snapshot, ms": during, "snapshot, MiB": peak_mib()}


def cost_of(end: Callable[[], object]) -> dict[str, float]:
    with peak_memory() as peak_mib:
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        end()
        cpu_s, wall_s = time.thread_time() - started_cpu_s, time.perf_counter() - started_s
    return {"s": wall_s, "CPU s of the caller": cpu_s, "MiB": peak_mib()}


@contextmanager
def peak_memory() -> Iterator[Callable[[], float]]:
    """Yields a function that returns the growth of memory since the beginning of the block, at its peak, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before_kib = status_kib("VmRSS")
    yield lambda: (status_kib("VmHWM") - before_kib) / 1024


def status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"no {name} in /proc/self/status")
