"""Copies of KV pages in host memory: the extension compared with memcpy, numpy and torch.

    tools/bazel run //bench:cpu_copy -- [--rounds N] [--json FILE]

Measures thread CPU time on one thread: copies of 256 MiB of pages at random places of a pool of 1 GiB, in huge pages if
the kernel provides them, so that no page is in a cache. `gather` copies them to one contiguous buffer, `scatter` copies
them back. All variants alternate in each round of one process. GB/s is the best round. A ratio is the median over
rounds of the time of `memcpy` over that of the variant in the same round: larger is faster, and 1 is a contiguous copy
of the same bytes by the C library.

Variants: `hybridkv` is `MemoryCopier.copy` with the best instructions; `hybridkv avx2` and `scalar` use older ones;
`hybridkv checksum` also computes the XXH3-128 of each record of 1 MiB, or of one page if that is larger, and `checksum
of pages` computes the digest of each page; `hybridkv, then checksum` reads the written bytes again to compute the
digests of the records. `torch int64` handles pages as int64, which is faster in torch; `index_select` and `numpy take`
only gather, `index_copy_` only scatters.

`chunks` copies whole chunks, in the old and the new order of their bytes; see `chunk_order.py`.

Not measured: several threads, memory of another NUMA node, pages in a cache.
"""

import argparse
import json
import mmap
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chunk_order
import numpy as np
import torch

from hybridkv.native import MemoryCopier, copy_with_memcpy, levels
from hybridkv.transfer import CopyRuns

PAGES = {"4 KiB": 4096, "32 KiB": 32768, "320 KiB": 327680, "2 MiB": 2 << 20}
POOL_BYTES = 1 << 30
MOVED_BYTES = 256 << 20
RECORD_BYTES = 1 << 20

Variants = dict[str, Callable[[], object]]


def memory(num_bytes: int) -> np.ndarray:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, dtype=np.uint8)
    array[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8), num_bytes)
    return array


def native(runs: CopyRuns, ends: np.ndarray, page_ends: np.ndarray) -> Variants:
    arrays = (runs.sources, runs.destinations, runs.num_bytes)
    best = MemoryCopier()
    variants: Variants = {"hybridkv": lambda: best.copy(*arrays)}
    for level in levels()[:-1]:
        copier = MemoryCopier(level=level)
        variants[f"hybridkv {level}"] = lambda copier=copier: copier.copy(*arrays)
    variants["hybridkv checksum"] = lambda: best.copy_and_digest(*arrays, ends)
    variants["hybridkv checksum of pages"] = lambda: best.copy_and_digest(*arrays, page_ends)
    written = (arrays[1], arrays[2], ends)
    variants["hybridkv, then checksum"] = lambda: (best.copy(*arrays), best.digest(*written))
    return variants


def variants_of(pool: np.ndarray, buffer: np.ndarray, page_bytes: int) -> tuple[dict[str, Variants], int]:
    """The variants of both directions, and the bytes that each copies."""
    count = MOVED_BYTES // page_bytes
    num_bytes = count * page_bytes
    ids = np.random.default_rng(1).permutation(POOL_BYTES // page_bytes)[:count]
    pages = pool[: POOL_BYTES // page_bytes * page_bytes].reshape(-1, page_bytes)
    packed = buffer[:num_bytes].reshape(count, page_bytes)
    gather = CopyRuns(
        (pool.ctypes.data + ids * page_bytes).astype(np.int64),
        (buffer.ctypes.data + np.arange(count) * page_bytes).astype(np.int64),
        np.full(count, page_bytes, dtype=np.int64),
    )
    page_ends = np.arange(1, count + 1, dtype=np.int64)
    step = max(1, RECORD_BYTES // page_bytes)
    ends = np.append(np.arange(step, count, step), count).astype(np.int64)
    start = pool.ctypes.data
    common: Variants = {"memcpy": lambda: copy_with_memcpy(start, buffer.ctypes.data, num_bytes)}
    index = torch.from_numpy(ids)
    source, target = torch.from_numpy(pages), torch.from_numpy(packed)
    words, packed_words = source.view(torch.int64), target.view(torch.int64)
    gathers = common | native(gather, ends, page_ends)
    gathers["numpy take"] = lambda: np.take(pages, ids, axis=0, out=packed, mode="clip")
    gathers["torch index_select"] = lambda: torch.index_select(source, 0, index, out=target)
    gathers["torch index_select int64"] = lambda: torch.index_select(words, 0, index, out=packed_words)
    scatters = common | native(gather.reversed(), ends, page_ends)
    scatters["torch index_copy_"] = lambda: source.index_copy_(0, index, target)
    scatters["torch index_copy_ int64"] = lambda: words.index_copy_(0, index, packed_words)
    return {"gather": gathers, "scatter": scatters}, num_bytes


def measure(variants: Variants, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            started = time.thread_time()
            run()
            seconds[name].append(time.thread_time() - started)
    return seconds


def summary(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, dict[str, float]]:
    plain = seconds["hybridkv"]
    rows = {}
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["memcpy"], times, strict=True))
        rows[name] = {"gb_per_s": round(num_bytes / min(times) / 1e9, 2), "ratio_to_memcpy": round(ratio, 3)}
        if "checksum" in name:
            cost = statistics.median(a / b for a, b in zip(times, plain, strict=True)) - 1
            rows[name]["checksum_cost"] = round(cost, 3)
    return rows


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description="Copies of KV pages in host memory.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool, buffer = memory(POOL_BYTES), memory(MOVED_BYTES)
    results: dict[str, Any] = {}
    for page, page_bytes in PAGES.items():
        directions, num_bytes = variants_of(pool, buffer, page_bytes)
        results[page] = {}
        for direction, variants in directions.items():
            rows = summary(measure(variants, options.rounds), num_bytes)
            results[page][direction] = rows
            print(f"\n{direction}, pages of {page}")
            for name, row in rows.items():
                cost = f"   checksum costs {row['checksum_cost']:.0%}" if "checksum_cost" in row else ""
                print(f"  {name:28} {row['gb_per_s']:7.2f} GB/s {row['ratio_to_memcpy']:7.2f} of memcpy{cost}")
    chunks = chunk_order.measure(pool, buffer, options.rounds)
    chunk_order.show(chunks)
    if options.json:
        about = {
            "cpu": cpu_name(),
            "levels": levels(),
            "rounds": options.rounds,
            "moved_bytes": MOVED_BYTES,
            "c_library": " ".join(platform.libc_ver()),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"about": about, "pages": results, "chunks": chunks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
