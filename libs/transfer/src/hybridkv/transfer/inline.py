"""Copy engine that copies in `submit`, on the caller's thread: for synchronous loads and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from hybridkv.transfer.engine import CopyResult, Hook, JobId, RecordDigests, RunsSource
from hybridkv.transfer.jobs import Copier, Job, copy_runs, describe, execute
from hybridkv.transfer.memory import RegisteredRanges
from hybridkv.transfer.runs import CopyEngineError


class InlineCopyEngine:
    """A `CopyEngine` that finishes each job in `submit`. At most `max_queued_jobs` results wait for `poll`.

    `clock` returns seconds. `copier` returns the function that copies the runs of a job. Raises `ValueError` if
    `max_queued_jobs` is below 1.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_queued_jobs: int = 1024,
        copier: Callable[[], Copier] = lambda: copy_runs,
    ) -> None:
        if max_queued_jobs < 1:
            raise ValueError(f"max_queued_jobs: expected a number >= 1, got {max_queued_jobs}")
        self._clock = clock
        self._copier = copier
        self._max_queued_jobs = max_queued_jobs
        self._memory = RegisteredRanges()
        self._results: dict[JobId, CopyResult] = {}
        self._is_closed = False

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
        if self._is_closed:
            raise CopyEngineError(f"submit: job {job_id} came after close")
        if job_id in self._results:
            raise CopyEngineError(f"submit: the result of job {job_id} was not polled yet")
        if len(self._results) >= self._max_queued_jobs:
            return False
        job = Job(job_id, runs, before, after, records)
        copy = self._copier()
        try:
            self._results[job_id] = execute(job, self._memory, copy, self._clock)
        except Exception as error:  # from the copy; `execute` catches errors of hooks
            self._results[job_id] = job.failed_result(describe(error))
        return True

    def poll(self) -> list[CopyResult]:
        results, self._results = self._results, {}
        return list(results.values())

    def wait(self, job_ids: Iterable[JobId], timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self._is_closed = True
