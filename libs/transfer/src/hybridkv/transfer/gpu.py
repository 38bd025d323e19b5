"""Copy engines for a GPU, which executes enqueued copies later. `streams` and `cuda` enqueue the copies."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from typing import Any, Protocol

from hybridkv.transfer.engine import CopyResult
from hybridkv.transfer.inline import InlineCopyEngine
from hybridkv.transfer.jobs import Copier, Job, call_after, describe, prepare
from hybridkv.transfer.queued import JobQueue
from hybridkv.transfer.runs import CopyRuns, Integers

MAX_WAITING_JOBS = 8
"""Maximum number of begun jobs in the queue of the second thread. Two more can be in flight: the thread waits for one,
and one waits for its place in the queue. A higher limit would not be faster, and `before` would run long before the
copies of its job."""


class EnqueuedCopies(Protocol):
    """All copies of one job, after they were enqueued."""

    def synchronize(self) -> None:
        """Wait for the copies, without the GIL. Called once. Raises the errors of earlier work."""
        ...


class GpuCopies(Protocol):
    """Enqueues the copies of jobs. One thread at a time calls `enqueue`."""

    def register(self, address: int, num_bytes: int, name: str) -> None:
        """Prepare for copies in this memory. `KernelCopies` raises `CopyEngineError` if the GPU cannot access it."""
        ...

    def fence(self) -> Any:
        """A mark after all compute that the calling thread has enqueued."""
        ...

    def enter_thread(self) -> None:
        """Prepare one of the engine's own threads for `enqueue` and `synchronize`. Can be called again."""
        ...

    def enqueue(self, runs: CopyRuns, fence: Any) -> EnqueuedCopies:
        """Enqueue the copies of a job after `fence`. After an exception, no copy of the job still writes."""
        ...


@dataclass(frozen=True, slots=True)
class _StartedJob:
    """A job that the copy thread has begun. `copies` is None if nothing was enqueued."""

    job: Job
    started_s: float
    copies: EnqueuedCopies | None
    failure: str | None
    num_bytes: int


class GpuCopyEngine(JobQueue[Any]):
    """A `CopyEngine` with two threads. Computes no digests.

    The copy thread makes the runs of a job, calls `before` and enqueues the copies. The second thread waits for the
    copies in order and calls `after`. So the hooks of one job run while another job is copied.
    """

    def __init__(self, copies: GpuCopies, clock: Callable[[], float], max_queued_jobs: int) -> None:
        self._copies = copies
        self._started: Queue[_StartedJob | None] = Queue(MAX_WAITING_JOBS)
        self._last_end_s = -math.inf
        self._finish_thread = threading.Thread(target=self._finish_jobs, name="hybridkv-copied", daemon=True)
        super().__init__(copies.fence, clock, max_queued_jobs)
        self._finish_thread.start()

    def register(self, address: int, num_bytes: int, name: str) -> None:
        memory = self._memory.with_region(address, num_bytes, name)
        self._copies.register(address, num_bytes, name)
        self._memory = memory

    def _run_job(self, job: Job, prepared: Any) -> None:
        started_s = self._clock()
        copies, num_bytes = None, 0
        try:
            self._copies.enter_thread()
            runs, failure = prepare(job, self._memory)
            if failure is None and len(runs):
                copies = self._copies.enqueue(runs, prepared)
            if failure is None:
                num_bytes = runs.total_bytes
        except BaseException as error:  # the thread must go on, or all later jobs would hang
            failure = describe(error)
        self._started.put(_StartedJob(job, started_s, copies, failure, num_bytes))

    def _drain(self) -> None:
        self._started.put(None)
        self._finish_thread.join()

    def _finish_jobs(self) -> None:
        while (started := self._started.get()) is not None:
            result = self._wait_for(started)
            del started  # frees the objects that the hooks refer to
            self._finish(result)

    def _wait_for(self, started: _StartedJob) -> CopyResult:
        failure, num_bytes = started.failure, started.num_bytes
        try:
            self._copies.enter_thread()
        except Exception as error:
            failure, num_bytes = describe(error), 0
        try:
            if started.copies is not None:
                started.copies.synchronize()
        except Exception as error:
            failure, num_bytes = failure or describe(error), 0
        try:
            failure = failure or call_after(started.job)
        except BaseException as error:  # the thread must go on, as above
            failure = describe(error)
        # Until the end of the previous job, this job waited.
        began_s, self._last_end_s = max(started.started_s, self._last_end_s), self._clock()
        return CopyResult(started.job.job_id, failure, num_bytes, self._last_end_s - began_s)


class InlineGpuCopyEngine(InlineCopyEngine):
    """Like `GpuCopyEngine`, but `submit` copies on the caller's thread and returns when the job has ended."""

    def __init__(
        self, copies: GpuCopies, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024
    ) -> None:
        self._copies = copies
        super().__init__(clock, max_queued_jobs, self._fenced)

    def register(self, address: int, num_bytes: int, name: str) -> None:
        memory = self._memory.with_region(address, num_bytes, name)
        self._copies.register(address, num_bytes, name)
        self._memory = memory

    def _fenced(self) -> Copier:
        fence = self._copies.fence()

        def copy(runs: CopyRuns, record_ends: Integers | None = None) -> None:
            if len(runs):
                self._copies.enqueue(runs, fence).synchronize()

        return copy
