"""Copy engine for host memory, on its own thread. Needs neither torch nor a GPU.

One thread runs the jobs in order. With more threads, the runs of one large job are split between them; jobs never
overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 - a copy of memory waits for nothing

from hybridkv.transfer.jobs import copy_runs
from hybridkv.transfer.queued import QueuedCopyEngine
from hybridkv.transfer.runs import CopyRuns, Integers

SHARED_JOB_BYTES = 4 * 1024 * 1024
"""Smaller jobs are not split between threads."""


class CpuCopyEngine(QueuedCopyEngine):
    """A `CopyEngine` for host memory.

    Args:
        num_threads: threads that copy, at least 1. The first starts now.
        clock: returns seconds.
        max_queued_jobs: limit of jobs that were submitted and not polled yet, at least 1.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(
        self, num_threads: int = 1, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads: expected a number >= 1, got {num_threads}")
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(num_threads - 1, "hybridkv-copy-helper") if num_threads > 1 else None
        super().__init__(lambda: self._copy, clock, max_queued_jobs)

    def close(self) -> None:
        super().close()
        if self._helpers is not None:
            self._helpers.shutdown()

    def _copy(self, runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None:
        if self._helpers is None or runs.total_bytes < SHARED_JOB_BYTES:
            return copy_runs(runs, record_ends)
        first, *others = runs.split(self._num_threads)
        shared = [self._helpers.submit(copy_runs, part) for part in others]
        copy_runs(first)
        for future in shared:
            future.result()
        return None  # no digests: a record can be split between threads
