"""Host time of a job of GPU copies before its bytes move. Needs no GPU.

    PYTHONPATH=... python bench/gpu_host.py [--rounds N] [--json FILE]

A job has 256 MiB: blocks at random places of a GPU's memory, stored layer by layer as in the engine, and chunks of four
blocks in host memory. No byte is copied. Thread CPU time in microseconds, the best of N rounds:

- submit: `submit` of both copy engines, on the engine's thread, without the device's events;
- lower: runs of a job, from a table of its copies (`hybridkv.native.Lowering`); check: their addresses;
- batch: `copies: "engine"` prepares its batches and hands over the first batch; calls: it hands over the other batches
  while the GPU copies; both without `swap_blocks_batch` itself;
- plan: `copies: "native"` plans the job in C++ (csrc/cuda/job.cc), without CUDA's calls.

The copy thread's time is lower + check + batch, or lower + check + plan. Goals: 60 us for this time, 10 us for
`submit`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_simulation import row_pointer, simulation

from hybridkv.connectors.vllm.common.copies.devices import MAX_BATCH_COPIES
from hybridkv.native import Lowering
from hybridkv.transfer import CopyRuns, JobId, StreamCopyEngine
from hybridkv.transfer.cuda import CopyTuning
from hybridkv.transfer.memory import RegisteredRanges
from hybridkv.transfer.pinned import REGISTRATION_BYTES
from hybridkv.transfer.streams import StreamCopies

FRAGMENT_BYTES = (4096, 16384, 65536, 262144, 2 << 20)
JOB_BYTES = 256 << 20
LAYERS = 32
BLOCKS_PER_CHUNK = 4
ZEROS, ARENA, CACHE, STAGING = 1 << 40, 1 << 41, 1 << 42, 1 << 50
"""Start address of each memory. The memory does not exist."""
ZERO_BYTES = 65536
COPY_GOAL_US, SUBMIT_GOAL_US = 60.0, 10.0


class IdleEvent:
    """Event and stream that do nothing."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...


class IdleDevice:
    """`CopyDevice` that creates the tensors of batches, like `EngineDevice`, and copies nothing."""

    def __init__(self, most_batches: int) -> None:
        self._most_batches = most_batches

    def enter_thread(self) -> None: ...

    def new_stream(self) -> IdleEvent:
        return IdleEvent()

    new_event = current_stream = new_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def swap_blocks_batch(
        self,
        sources: Any,
        destinations: Any,
        num_bytes: Any,
        *,
        is_src_access_order_any: bool,
    ) -> None:
        columns = [
            torch.from_numpy(each)[: self._most_batches * MAX_BATCH_COPIES]
            for each in (sources, destinations, num_bytes)
        ]
        for _ in zip(*(column.split(MAX_BATCH_COPIES) for column in columns), strict=True):
            pass

    def is_pinned(self, address: int) -> bool:
        return ARENA <= address < ARENA + JOB_BYTES


class SampleJob:
    """A job with fragments of one size, and its memory."""

    def __init__(self, size: int) -> None:
        blocks = JOB_BYTES // (size * LAYERS)
        pool = 2 * blocks + 1
        self.cache_bytes = pool * size * LAYERS
        self._lowering = Lowering(ARENA, JOB_BYTES, ZEROS, ZERO_BYTES)
        columns = [(CACHE + layer * pool * size, size, size, layer * size) for layer in range(LAYERS)]
        self._lowering.add_group(0, 0, np.array(columns, dtype=np.int64).tobytes(), LAYERS * size, pool)
        per_chunk = min(BLOCKS_PER_CHUNK, blocks)
        chunks = blocks // per_chunk
        shape = (chunks, 0, 0, per_chunk, per_chunk, 0, 0, 0, 1, 32)
        block_ids = 1 + np.random.default_rng(0).permutation(pool - 1)[: chunks * per_chunk]
        chunk_bytes = per_chunk * LAYERS * size
        extents = [(chunk * chunk_bytes, chunk_bytes) for chunk in range(chunks)]
        self._table = (
            np.array(shape, dtype=np.int32).tobytes(),
            block_ids.astype(np.int32).tobytes(),
            b"",
            np.array(extents, dtype=np.int64).tobytes(),
        )
        self.memory = RegisteredRanges()
        self.first_batch, self.all_batches = (StreamCopies(IdleDevice(most)) for most in (1, JOB_BYTES))
        for address, num_bytes, name in ((ZEROS, ZERO_BYTES, "zeros"), (ARENA, JOB_BYTES, "arena")):
            self.memory = self.memory.with_region(address, num_bytes, name)
            for copies in (self.first_batch, self.all_batches):
                copies.register(address, num_bytes, name)
        self.memory = self.memory.with_region(CACHE, self.cache_bytes, "kv cache")

    def lower(self, is_store: bool) -> CopyRuns:
        rows, num_runs, total_bytes, spans, _, _ = self._lowering.lower(is_store, *self._table)
        return CopyRuns.of_rows(rows, num_runs, total_bytes, spans)

    def plan_s(self, runs: CopyRuns, rounds: int) -> float:
        tuning = CopyTuning()
        sizes = tuning.large_run_bytes, tuning.direct_job_bytes, tuning.part_bytes, tuning.tile_bytes
        timed = simulation().hybridkv_time_plan
        timed.restype = ctypes.c_double
        return float(
            timed(
                *row_pointer(runs),
                (ctypes.c_uint64 * 2)(CACHE, CACHE + self.cache_bytes),
                ctypes.c_uint64(1),
                ctypes.c_uint64(STAGING),
                (ctypes.c_uint64 * 5)(*sizes, REGISTRATION_BYTES),
                ctypes.c_uint64(rounds),
            )
        )


def best_us(rounds: int, call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(rounds):
        began_s = time.thread_time()
        call()
        best = min(best, time.thread_time() - began_s)
    return best * 1e6


def submit_us(rounds: int) -> float:
    """Microseconds of `StreamCopyEngine.submit`. `CudaCopyEngine` has the same `submit`."""
    engine = StreamCopyEngine(IdleDevice(1))
    best = float("inf")
    for number in range(rounds):
        job_id = JobId(number)
        began_s = time.thread_time()
        engine.submit(job_id, CopyRuns.empty)
        best = min(best, time.thread_time() - began_s)
        engine.wait([job_id], 60.0)
        engine.poll()
    engine.close()
    return best * 1e6


def measure(job: SampleJob, size: int, is_store: bool, rounds: int) -> dict[str, Any]:
    """One row: microseconds of each part of a job of fragments of `size` bytes."""
    runs = job.lower(is_store)
    fence = IdleEvent()
    row: dict[str, Any] = {
        "direction": "store" if is_store else "load",
        "fragment": size,
        "runs": len(runs),
        "lower_us": best_us(rounds, lambda: job.lower(is_store)),
        "check_us": best_us(rounds, lambda: (job.memory.check(runs), runs.total_bytes)),
        "batch_us": best_us(rounds, lambda: job.first_batch.enqueue(runs, fence)),
        "calls_us": best_us(rounds, lambda: job.all_batches.enqueue(runs, fence)),
        "plan_us": job.plan_s(runs, rounds) * 1e6,
    }
    row["calls_us"] -= row["batch_us"]
    before = row["lower_us"] + row["check_us"]
    return row | {"engine_us": before + row["batch_us"], "native_us": before + row["plan_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    submitted = submit_us(options.rounds)
    for size in FRAGMENT_BYTES:
        job = SampleJob(size)
        for is_store in (True, False):
            row = measure(job, size, is_store, options.rounds) | {"submit_us": submitted}
            print(
                json.dumps({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
            )
            rows.append(row)
    for way in ("engine", "native"):
        met = sorted({row["fragment"] for row in rows if row[f"{way}_us"] <= COPY_GOAL_US})
        print(f"{way}: at most {COPY_GOAL_US:.0f} us on the copy thread for fragments of {met} bytes")
    print(f"submit: {submitted:.1f} us, goal {SUBMIT_GOAL_US:.0f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
