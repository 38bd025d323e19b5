"""Copies of KV pages between a GPU and pinned host memory, compared with other methods and with the link's limit.

    tools/bazel build //csrc/cuda:wheel && pip install bazel-bin/csrc/cuda/wheel/*.whl
    PYTHONPATH=libs/transfer/src python bench/gpu_copy.py [--mebibytes N] [--rounds N] [--json FILE]

Measures bytes of pages per second of wall time, from the call to the last byte: scattered pages of one size from GPU
memory to one contiguous range of pinned memory (store), and back (load). A result is the best of N rounds, in which all
variants alternate. The bytes of every variant are compared once before it is timed.

- engine: `InlineCudaCopyEngine`, which chooses the copy method;
- staged, direct, batched: the same engine, limited to one copy method;
- per block: one copy for each page on one stream, as in vLLM's swap_blocks;
- index: torch's index_select or index_copy_ through a buffer on the GPU, and one copy;
- link: one copy of all bytes by torch, in one piece: the upper limit.

The results also have the GPU's own copy speed. The crossover is the smallest page from which the copy engines without
the kernel are at least as fast as the kernel. Use it as the value of `CopyTuning.large_run_bytes`.

Not measured: the slowdown of compute during copies. Without a GPU the program reports this and ends.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hybridkv.transfer import CopyRuns, JobId
from hybridkv.transfer.cuda import CopyTuning, InlineCudaCopyEngine, open_device, pin_memory

PAGE_BYTES = tuple(4096 * 2**power for power in range(10))
"""4 KiB to 2 MiB."""
ABOVE_ALL = 4 * 1024 * 1024
WAYS = {
    "engine": CopyTuning(),
    "staged": CopyTuning(large_run_bytes=ABOVE_ALL, direct_job_bytes=1),
    "direct": CopyTuning(large_run_bytes=ABOVE_ALL, direct_job_bytes=1 << 40),
    "batched": CopyTuning(large_run_bytes=1),
}
POISON = 0xA5


class Pages:
    """Scattered pages of GPU memory, and a range of pinned memory for them."""

    def __init__(self, torch: Any, page_bytes: int, total_bytes: int) -> None:
        self.torch = torch
        self.page_bytes, self.count = page_bytes, total_bytes // page_bytes
        self.total_bytes = self.count * page_bytes
        self.cache = torch.randint(0, 256, (2 * self.count, page_bytes), dtype=torch.uint8, device="cuda")
        self.arena_array = pin_memory(self.total_bytes)
        self.arena = torch.from_numpy(self.arena_array).view(self.count, page_bytes)
        self.order = np.random.default_rng(1).permutation(2 * self.count)[: self.count].astype(np.int64)
        self.index = torch.from_numpy(self.order).cuda()
        self.buffer = torch.empty((self.count, page_bytes), dtype=torch.uint8, device="cuda")
        self.wanted = self.cache[self.index].cpu()

    def runs(self, is_store: bool) -> CopyRuns:
        sources = self.cache.data_ptr() + self.order * self.page_bytes
        destinations = int(self.arena_array.ctypes.data) + np.arange(self.count, dtype=np.int64) * self.page_bytes
        runs = CopyRuns(sources, destinations, np.full(self.count, self.page_bytes, dtype=np.int64))
        return runs if is_store else runs.reversed()

    def poison(self, is_store: bool) -> None:
        if is_store:
            self.arena.fill_(POISON)
        else:
            self.arena.copy_(self.wanted)
            self.cache[self.index] = POISON
        self.torch.cuda.synchronize()

    def require_same(self, is_store: bool, name: str) -> None:
        found = self.arena if is_store else self.cache[self.index].cpu()
        if not self.torch.equal(found, self.wanted):
            sys.exit(f"{name} with pages of {self.page_bytes} bytes copied wrong bytes")


def engine_copy(pages: Pages, is_store: bool, tuning: CopyTuning) -> Callable[[], None]:
    engine = InlineCudaCopyEngine(open_device(pages.torch.cuda.current_device(), tuning))
    engine.register(pages.cache.data_ptr(), pages.cache.nbytes, "kv cache")
    engine.register(int(pages.arena_array.ctypes.data), pages.total_bytes, "arena")
    runs = pages.runs(is_store)

    def copy() -> None:
        engine.submit(JobId(1), runs)
        [result] = engine.poll()
        if result.failure is not None:
            sys.exit(result.failure)

    return copy


def per_block(pages: Pages, is_store: bool) -> Callable[[], None]:
    pairs = [(pages.cache[block], pages.arena[place]) for place, block in enumerate(pages.order.tolist())]
    moves = [(host, device) if is_store else (device, host) for device, host in pairs]

    def copy() -> None:
        for destination, source in moves:
            destination.copy_(source, non_blocking=True)
        pages.torch.cuda.synchronize()

    return copy


def index(pages: Pages, is_store: bool) -> Callable[[], None]:
    def store() -> None:
        pages.torch.index_select(pages.cache, 0, pages.index, out=pages.buffer)
        pages.arena.copy_(pages.buffer, non_blocking=True)
        pages.torch.cuda.synchronize()

    def load() -> None:
        pages.buffer.copy_(pages.arena, non_blocking=True)
        pages.cache.index_copy_(0, pages.index, pages.buffer)
        pages.torch.cuda.synchronize()

    return store if is_store else load


def link(pages: Pages, is_store: bool) -> Callable[[], None]:
    source, destination = (pages.buffer, pages.arena) if is_store else (pages.arena, pages.buffer)

    def copy() -> None:
        destination.copy_(source, non_blocking=True)
        pages.torch.cuda.synchronize()

    return copy


def best_rates(copies: dict[str, Callable[[], None]], num_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s of each copy. The copies alternate."""
    seconds = dict.fromkeys(copies, float("inf"))
    for _ in range(rounds):
        for name, copy in copies.items():
            started = time.perf_counter()
            copy()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return {name: num_bytes / best / 1e9 for name, best in seconds.items()}


def measure(torch: Any, page_bytes: int, is_store: bool, total_bytes: int, rounds: int) -> dict[str, Any]:
    pages = Pages(torch, page_bytes, total_bytes)
    copies = {name: engine_copy(pages, is_store, tuning) for name, tuning in WAYS.items()}
    copies |= {"per block": per_block(pages, is_store), "index": index(pages, is_store)}
    for name, copy in copies.items():
        pages.poison(is_store)
        copy()
        pages.require_same(is_store, name)
    copies["link"] = link(pages, is_store)
    rates = best_rates(copies, pages.total_bytes, rounds)
    return {"direction": "store" if is_store else "load", "page_bytes": page_bytes, "gigabytes_per_s": rates}


def device_copy_rate(torch: Any, total_bytes: int, rounds: int) -> float:
    """GB/s of copies within GPU memory. Each byte counts once."""
    source, destination = (torch.empty(total_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy() -> None:
        destination.copy_(source)
        torch.cuda.synchronize()

    return best_rates({"copy": copy}, total_bytes, rounds)["copy"]


def crossover(rows: list[dict[str, Any]], direction: str) -> int | None:
    """The smallest page size from which batched copies are at least as fast as both methods of the kernel."""
    found = None
    for row in reversed([row for row in rows if row["direction"] == direction]):
        rates = row["gigabytes_per_s"]
        if rates["batched"] < max(rates["staged"], rates["direct"]):
            break
        found = row["page_bytes"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("no GPU: torch is not installed")
        return 0
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none")
        return 0
    total_bytes = options.mebibytes << 20
    rows = []
    for is_store in (True, False):
        for page_bytes in PAGE_BYTES:
            row = measure(torch, page_bytes, is_store, total_bytes, options.rounds)
            rows.append(row)
            rates = row["gigabytes_per_s"]
            shown = "  ".join(f"{name} {rate:6.2f} ({rate / rates['link']:4.0%})" for name, rate in rates.items())
            print(f"{row['direction']:5} {page_bytes // 1024:5} KiB  {shown}", flush=True)
    result = {
        "machine": {"gpu": torch.cuda.get_device_name(), "host": platform.platform()},
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "command": " ".join(sys.argv),
        "mebibytes": options.mebibytes,
        "rounds": options.rounds,
        "device_copy_gigabytes_per_s": device_copy_rate(torch, total_bytes, options.rounds),
        "crossover_bytes": {direction: crossover(rows, direction) for direction in ("store", "load")},
        "rows": rows,
    }
    print(f"device copy {result['device_copy_gigabytes_per_s']:.0f} GB/s; crossover {result['crossover_bytes']}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
