"""Stores and loads of the disk tier, compared with fio, with one file for each chunk as in vLLM's fs tier, and with
SQLite.

Measures GB/s of payload in wall time, from memory to the file system and back, in one run on one directory. The
subjects alternate in every round. The tier, vLLM's files and fio bypass the page cache if the file system allows it;
SQLite cannot. No subject calls fsync. Only the tier computes checksums of all stored bytes and verifies them for all
loaded bytes. fio moves the same sizes with the same number of calls in flight.

Not measured: durability, other file systems, other load on the disk. The host of a virtual machine caches its disk, so
only ratios within one run are valid.

    tools/bazel run //bench:disk_tier -- --directory /path/on/the/disk --json out.json
    tools/bazel run //bench:disk_tier -- --reopen --directory /path/on/the/disk
    tools/bazel run //bench:disk_tier -- --pauses --directory /path/on/the/disk
    tools/bazel run //bench:disk_tier -- --scheduler --directory /path/on/the/disk
    tools/bazel run //bench:disk_tier -- --burst --directory /path/on/the/disk
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import burst_subject
import disk_pauses
import disk_subject
from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block, probe_o_direct

from hybridkv.native import has_uring

DEPTH = 4
"""Calls in flight of the tier, iodepth of fio, and threads of vLLM's files."""
CAPACITY_BYTES = 64 << 30
"""Capacity of the tier. It is larger than needed, so that segments have their usual size."""
SIZES = (64 << 10, 320 << 10, 2 << 20)
OPERATIONS = ("store", "load in order", "load at random")
Timed = Callable[[Path, int, int], dict[str, float]]


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def keys(count: int) -> list[bytes]:
    return [key_of(number) for number in range(count)]


def filled(num_bytes: int) -> mmap.mmap:
    """Page-aligned memory of random bytes, repeated every MiB."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    piece = random.Random(0).randbytes(1 << 20)
    for start in range(0, num_bytes, len(piece)):
        memory[start : start + len(piece)] = piece[: num_bytes - start]
    return memory


def tier(directory: Path, size: int, count: int) -> dict[str, float]:
    memory = filled(size * count)
    view = memoryview(memory)
    chunks = [view[i * size : (i + 1) * size] for i in range(count)]
    with disk_subject.opened(directory, CAPACITY_BYTES, DEPTH) as subject:
        seconds = {"store": subject.store(keys(count), chunks)}
        for name, order in orders(count).items():
            seconds[name] = subject.load([keys(count)[i] for i in order], [chunks[i] for i in order])
    return seconds


def orders(count: int) -> dict[str, list[int]]:
    shuffled = list(range(count))
    random.Random(1).shuffle(shuffled)
    return {"load in order": list(range(count)), "load at random": shuffled}


def files(directory: Path, size: int, count: int) -> dict[str, float]:
    """Seconds of vLLM's own functions, with one batch for each of `DEPTH` threads."""
    memory = memoryview(filled(size * count))
    direct = probe_o_direct(str(directory))
    paths = [str(directory / f"{key.hex()[:3]}" / f"{key.hex()}.bin") for key in keys(count)]

    def spread(function: Callable[..., None], order: list[int]) -> float:
        batches = [order[i::DEPTH] for i in range(DEPTH)]
        started_s = time.perf_counter()
        with ThreadPoolExecutor(DEPTH) as pool:
            jobs = [
                pool.submit(function, [paths[i] for i in batch], memory, [i * size for i in batch], size, direct)
                for batch in batches
            ]
            for job in jobs:
                job.result()
        return time.perf_counter() - started_s

    seconds = {"store": spread(batch_store_block, list(range(count)))}
    return seconds | {name: spread(batch_load_block, order) for name, order in orders(count).items()}


def sqlite(directory: Path, size: int, count: int) -> dict[str, float]:
    memory = memoryview(filled(size * count))
    connection = sqlite3.connect(directory / "chunks.sqlite", isolation_level=None)
    connection.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; CREATE TABLE chunks (key BLOB PRIMARY KEY, chunk BLOB);"
    )
    started_s = time.perf_counter()
    connection.execute("BEGIN")
    for i, key in enumerate(keys(count)):
        connection.execute("INSERT INTO chunks VALUES (?, ?)", (key, memory[i * size : (i + 1) * size]))
    connection.execute("COMMIT")
    seconds = {"store": time.perf_counter() - started_s}
    for name, order in orders(count).items():
        started_s = time.perf_counter()
        for i in order:
            (chunk,) = connection.execute("SELECT chunk FROM chunks WHERE key = ?", (key_of(i),)).fetchone()
            memory[i * size : (i + 1) * size] = chunk
        seconds[name] = time.perf_counter() - started_s
    connection.close()
    return seconds


def fio(directory: Path, size: int, count: int) -> dict[str, float]:
    """Seconds of fio for the same bytes. Each file is complete before fio reads it."""
    modes = {"store": "write", "load in order": "read", "load at random": "randread"}
    return {name: fio_seconds(directory, size, count, mode) for name, mode in modes.items()}


def fio_seconds(directory: Path, size: int, count: int, mode: str) -> float:
    command = ["fio", "--name=chunks", f"--directory={directory}", f"--rw={mode}", f"--bs={size}"]
    command += [f"--size={size * count}", "--direct=1", "--ioengine=io_uring", f"--iodepth={DEPTH}"]
    command += ["--fallocate=native", "--randrepeat=1", "--output-format=json"]
    # Huge pages, as for the chunks of the tier here and of the RAM tier.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, check=True, text=True, env=environment)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["write" if mode == "write" else "read"]
    if side["io_bytes"] != size * count:
        raise RuntimeError(f"fio moved {side['io_bytes']} bytes, not {size * count}")
    return float(side["runtime"]) / 1000


def measure(root: Path, size: int, total_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median GB/s of every subject and operation."""
    subjects: dict[str, Timed] = {"tier": tier, "fio": fio, "a file a chunk": files, "SQLite": sqlite}
    count = total_bytes // size
    found: dict[str, dict[str, list[float]]] = {name: {} for name in subjects}
    for number in range(rounds):
        names = list(subjects)
        # The order rotates: a disk that was idle is faster for a while.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            run = subjects[name]
            with tempfile.TemporaryDirectory(dir=root) as scratch:
                for operation, seconds in run(Path(scratch), size, count).items():
                    found[name].setdefault(operation, []).append(size * count / seconds / 1e9)
    return {name: {op: statistics.median(values) for op, values in rows.items()} for name, rows in found.items()}


def report(size: int, speeds: dict[str, dict[str, float]]) -> None:
    for operation in OPERATIONS:
        mine = speeds["tier"][operation]
        others = "  ".join(
            f"{name} {rows[operation]:5.2f} ({mine / rows[operation]:4.2f}x)"
            for name, rows in speeds.items()
            if name != "tier"
        )
        print(f"{size >> 10:5d} KiB  {operation:15s} tier {mine:5.2f} GB/s   tier beside: {others}", flush=True)


def about(rounds: int) -> dict[str, object]:
    moved_by = "io_uring" if has_uring() else "threads"
    return {"depth": DEPTH, "rounds": rounds, "cores": os.cpu_count(), "tier moved by": moved_by}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: for temporary files")
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=[size >> 10 for size in SIZES])
    parser.add_argument("--total-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--reopen", action="store_true", help="measure reopening by number of records instead")
    parser.add_argument("--pauses", action="store_true", help="measure the cost of the index to its caller instead")
    parser.add_argument("--scheduler", action="store_true", help="measure the scheduler's thread by segments instead")
    parser.add_argument("--burst", action="store_true", help="measure the share of a burst that can be resumed instead")
    parser.add_argument("--capacities-mib", type=int, nargs="+", help="of --burst")
    parser.add_argument("--largest-offer-mib", type=int, default=4096, help="of --burst; must fit in host memory")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.directory) as scratch:
        if chosen.reopen:
            result: dict[str, object] = {"reopening": disk_subject.reopening(Path(scratch))}
        elif chosen.pauses:
            result = {"pauses": disk_pauses.measure(Path(scratch))}
        elif chosen.scheduler:
            result = {"scheduler_cpu_us_a_record": disk_subject.scheduler_cpu(Path(scratch))}
        elif chosen.burst:
            mib = chosen.capacities_mib
            capacities = tuple(each << 20 for each in mib) if mib else burst_subject.CAPACITIES
            result = {"bursts": burst_subject.bursts(Path(scratch), capacities, chosen.largest_offer_mib << 20)}
        else:
            if shutil.which("fio") is None:
                sys.exit("fio is not installed; on Debian: apt-get install fio")
            speeds = {}
            for size in (kib << 10 for kib in chosen.sizes_kib):
                speeds[str(size)] = measure(Path(scratch), size, chosen.total_mib << 20, chosen.rounds)
                report(size, speeds[str(size)])
            result = {"gigabytes_per_second": speeds, "about": about(chosen.rounds)}
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
