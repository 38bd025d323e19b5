"""GPU copy engines with the kernels of hybridkv-cuda. csrc/cuda/job.h selects the copy method of each run.

`submit` records a fence: the copies of a job run after all compute that the submitting thread has enqueued before, and
in parallel with later compute. So a store waits for the forward pass that wrote its blocks. A load waits for the last
reads of the blocks that it overwrites, but not for the next forward pass.
Compute needs no fence after a job: the result of a job is returned only after its copies.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from typing import Final

from hybridkv.transfer.cuda.device import CudaDevice, MemoryKind
from hybridkv.transfer.engine import CopyResult
from hybridkv.transfer.inline import InlineCopyEngine
from hybridkv.transfer.jobs import Copier, Job, call_after, describe, prepare
from hybridkv.transfer.queued import JobQueue
from hybridkv.transfer.runs import CopyEngineError, CopyRuns, Integers

MAX_WAITING: Final = 1
"""Jobs that wait before each of the two later steps of `CudaCopyEngine`. They hold their runs."""


def _fenced(device: CudaDevice) -> Copier:
    """A copy after all compute that the calling thread has enqueued. Computes no digests."""
    caller = device.caller_event()

    def copy(runs: CopyRuns, record_ends: Integers | None = None) -> None:
        device.copy(runs, caller)

    return copy


def _kind_of(device: CudaDevice, address: int, name: str) -> MemoryKind:
    kind = device.memory_kind(address)
    if kind is MemoryKind.OTHER:
        raise CopyEngineError(f"register {name}: expected this GPU's memory or pinned memory, got neither")
    return kind


@dataclass(slots=True)
class _PreparedJob:
    """A job after `before`. `copy` copies its runs; `num_bytes` is 0 until that."""

    job: Job
    copy: Copier
    runs: CopyRuns
    failure: str | None
    started_s: float
    num_bytes: int = 0


class CudaCopyEngine(JobQueue[Copier]):
    """A `CopyEngine` between GPU memory and pinned host memory, on its own streams and three threads.

    The first thread makes the runs of a job and calls `before`, the second copies, the third calls `after`. So the
    hooks, which compute checksums, run while other jobs are copied.

    `device` must not be shared with another engine. `register` raises `CopyEngineError` for memory that the GPU cannot
    access. A CUDA call that fails is the failure of its job, which names the call.
    """

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        self._device = device
        self._prepared: Queue[_PreparedJob | None] = Queue(MAX_WAITING)
        self._copied: Queue[_PreparedJob | None] = Queue(MAX_WAITING)
        self._last_end_s = -math.inf
        self._later_threads = (
            threading.Thread(target=self._copy_jobs, name="hybridkv-copying", daemon=True),
            threading.Thread(target=self._finish_jobs, name="hybridkv-copied", daemon=True),
        )
        super().__init__(lambda: _fenced(device), clock, max_queued_jobs)
        for thread in self._later_threads:
            thread.start()

    def register(self, address: int, num_bytes: int, name: str) -> None:
        kind = _kind_of(self._device, address, name)
        super().register(address, num_bytes, name)
        if kind is MemoryKind.DEVICE:
            self._device.register(address, num_bytes)

    def _run_job(self, job: Job, prepared: Copier) -> None:
        started_s = self._clock()
        try:
            runs, failure = prepare(job, self._memory)
        except BaseException as error:  # the thread must survive, or all later jobs would hang
            runs, failure = CopyRuns.empty(), describe(error)
        self._prepared.put(_PreparedJob(job, prepared, runs, failure, started_s))

    def _drain(self) -> None:
        self._prepared.put(None)
        for thread in self._later_threads:
            thread.join()

    def _copy_jobs(self) -> None:
        while (started := self._prepared.get()) is not None:
            try:
                if started.failure is None:
                    started.copy(started.runs)
                    started.num_bytes = started.runs.total_bytes
            except BaseException as error:  # the thread must survive, as above
                started.failure = describe(error)
            self._copied.put(started)
            del started  # frees the objects that the hooks refer to
        self._copied.put(None)

    def _finish_jobs(self) -> None:
        while (started := self._copied.get()) is not None:
            result = self._end_of(started)
            del started
            self._finish(result)

    def _end_of(self, started: _PreparedJob) -> CopyResult:
        failure = started.failure
        try:
            failure = failure or call_after(started.job)
        except BaseException as error:  # the thread must survive, as above
            failure = describe(error)
        # The time before the previous job ended was a wait.
        began_s, self._last_end_s = max(started.started_s, self._last_end_s), self._clock()
        return CopyResult(started.job.job_id, failure, started.num_bytes, self._last_end_s - began_s)


class InlineCudaCopyEngine(InlineCopyEngine):
    """Like `CudaCopyEngine`, but `submit` copies on the caller's thread and returns when the job has ended."""

    def __init__(
        self, device: CudaDevice, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        self._device = device
        super().__init__(clock, max_queued_jobs, lambda: _fenced(device))

    def register(self, address: int, num_bytes: int, name: str) -> None:
        kind = _kind_of(self._device, address, name)
        super().register(address, num_bytes, name)
        if kind is MemoryKind.DEVICE:
            self._device.register(address, num_bytes)
