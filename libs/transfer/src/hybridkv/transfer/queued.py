"""Job queue with its own thread, and the copy engine for host memory, which needs neither torch nor a GPU."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from hybridkv.transfer.engine import CopyResult, Hook, JobId, RecordDigests, RunsSource
from hybridkv.transfer.jobs import Copier, Job, copy_runs, describe, execute
from hybridkv.transfer.memory import RegisteredRanges
from hybridkv.transfer.runs import CopyEngineError

logger = logging.getLogger(__name__)

CLOSED = "the copy engine was closed before the job began"

EXIT_TIMEOUT_S = 30.0
"""The interpreter's exit waits at most this long for the running jobs of all engines. A hook that never returns must
not block the exit."""

Prepared = TypeVar("Prepared")
"""Value that `on_submit` returns for a job."""


class JobQueue(ABC, Generic[Prepared]):
    """Base of copy engines with a thread that runs the jobs in order. Does not copy; subclasses do.

    `on_submit` is called in `submit`, on the caller's thread; its result is passed with the job to `_run_job`.
    `max_queued_jobs` is the limit of jobs that were submitted and not polled yet; `ValueError` below 1. `clock` returns
    seconds.

    The exit of the interpreter closes open queues. Otherwise a running copy would write to memory that the interpreter
    frees.
    """

    def __init__(self, on_submit: Callable[[], Prepared], clock: Callable[[], float], max_queued_jobs: int) -> None:
        if max_queued_jobs < 1:
            raise ValueError(f"max_queued_jobs: expected a number >= 1, got {max_queued_jobs}")
        self._on_submit = on_submit
        self._clock = clock
        self._max_queued_jobs = max_queued_jobs
        self._memory = RegisteredRanges()
        self._changed = threading.Condition()
        self._queue: deque[tuple[Job, Prepared]] = deque()
        self._unfinished: set[JobId] = set()
        self._results: dict[JobId, CopyResult] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-copy", daemon=True)
        self._thread.start()
        _running.add(self)

    def register(self, address: int, num_bytes: int, name: str) -> None:
        self._memory = self._memory.with_region(address, num_bytes, name)

    def submit(
        self,
        job_id: JobId,
        runs: RunsSource,
        before: Hook | None = None,
        after: Hook | None = None,
        records: RecordDigests | None = None,
    ) -> bool:
        with self._changed:
            if self._is_closed:
                raise CopyEngineError(f"submit: job {job_id} came after close")
            if job_id in self._unfinished or job_id in self._results:
                raise CopyEngineError(f"submit: the result of job {job_id} was not polled yet")
            if len(self._unfinished) + len(self._results) >= self._max_queued_jobs:
                return False
            prepared = self._on_submit()
            self._unfinished.add(job_id)
            self._queue.append((Job(job_id, runs, before, after, records), prepared))
            self._changed.notify_all()
        return True

    def poll(self) -> list[CopyResult]:
        with self._changed:
            results, self._results = self._results, {}
        return list(results.values())

    def wait(self, job_ids: Iterable[JobId], timeout_s: float) -> bool:
        wanted = set(job_ids)
        with self._changed:
            return self._changed.wait_for(lambda: wanted.isdisjoint(self._unfinished), timeout_s)

    def close(self) -> None:
        self._end()
        self._thread.join()

    def _end(self) -> None:
        """Start no more jobs."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @abstractmethod
    def _run_job(self, job: Job, prepared: Prepared) -> None:
        """Run a job on the copy thread. `_finish` must follow for each job, in order of submission, now or on another
        thread. Must not raise."""

    def _drain(self) -> None:
        """Wait, on the copy thread, for the jobs that were started and not finished. Called after the last job."""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    break
                job, prepared = self._queue.popleft()
            self._run_job(job, prepared)
            del job, prepared  # frees the objects that the hooks refer to
        self._drain()
        while self._queue:
            self._finish(self._queue.popleft()[0].failed_result(CLOSED))

    def _finish(self, result: CopyResult) -> None:
        with self._changed:
            self._unfinished.discard(result.job_id)
            self._results[result.job_id] = result
            self._changed.notify_all()


class CpuCopyEngine(JobQueue[Copier]):
    """A `CopyEngine` for host memory: copies each job on its thread before it starts the next.

    Args:
        clock: returns seconds.
        max_queued_jobs: limit of jobs that were submitted and not polled yet; `ValueError` below 1.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_queued_jobs: int = 1024) -> None:
        super().__init__(lambda: copy_runs, clock, max_queued_jobs)

    def _run_job(self, job: Job, prepared: Copier) -> None:
        try:
            result = execute(job, self._memory, prepared, self._clock)
        except BaseException as error:  # the thread must go on, or all later jobs would hang
            result = job.failed_result(describe(error))
        self._finish(result)


# All engines that are not freed. An engine stays in this set while its thread runs, because the thread refers to it.
_running: WeakSet[JobQueue[Any]] = WeakSet()


def _close_all() -> None:
    """Close all engines at exit, while the interpreter still runs."""
    engines = list(_running)
    for engine in engines:
        engine._end()
    end_s = time.monotonic() + EXIT_TIMEOUT_S
    for engine in engines:
        engine._thread.join(max(0.0, end_s - time.monotonic()))
        if engine._thread.is_alive():
            logger.warning("a copy job still runs after %.0f s; the interpreter exits without it", EXIT_TIMEOUT_S)


atexit.register(_close_all)
# A forked child has none of these threads, but has copies of locks that the threads may hold.
os.register_at_fork(after_in_child=_running.clear)
