"""Steps of one copy job, on the calling thread. Private to the engines of this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from hybridkv.transfer.engine import CopyResult, Hook, JobId, RecordDigests, RunsSource
from hybridkv.transfer.memory import RegisteredRanges
from hybridkv.transfer.runs import CopyRuns, Integers, MemoryCopier


class Copier(Protocol):
    """Copies each run. Returns a digest of 16 bytes per record if `record_ends` is given and this copier computes
    digests, else None."""

    def __call__(self, runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None: ...


DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Job:
    job_id: JobId
    runs: RunsSource
    before: Hook | None
    after: Hook | None
    records: RecordDigests | None = None

    def failed_result(self, failure: str, num_bytes: int = 0, seconds: float = 0.0) -> CopyResult:
        return CopyResult(self.job_id, failure, num_bytes, seconds)


def copy_runs(runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None:
    """Copy each run without the GIL. Returns the digest of each record if `record_ends` is given.

    The caller has checked every address. Digests that are computed during the copy take a tenth of the time of a second
    read of the bytes.
    """
    copier = _copier()
    if record_ends is None:
        copier.copy(runs.sources, runs.destinations, runs.num_bytes)
        return None
    digests = copier.copy_and_digest(runs.sources, runs.destinations, runs.num_bytes, record_ends)
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


@cache
def _copier() -> MemoryCopier:
    return MemoryCopier()


def prepare(job: Job, memory: RegisteredRanges) -> tuple[CopyRuns, str | None]:
    """Make the runs, check them, call `before`; stop at the first failure. Returns the runs, and the failure or None.

    After a failure the runs must not be copied.
    """
    try:
        runs = job.runs if isinstance(job.runs, CopyRuns) else job.runs()
    except Exception as error:
        return CopyRuns.empty(), describe(error)
    return runs, memory.check(runs) or _call_hook("before", job.before)


def call_after(job: Job) -> str | None:
    """Call `after` of a job that was copied. Returns its failure."""
    return _call_hook("after", job.after)


def execute(job: Job, memory: RegisteredRanges, copy: Copier, clock: Callable[[], float]) -> CopyResult:
    """Run the whole job, and set its digests. The first failure of the runs or of a hook ends the job and is in the
    result. Raises the errors of `copy`."""
    started = clock()
    num_bytes = 0
    runs, failure = prepare(job, memory)
    if failure is None:
        if job.records is None:
            copy(runs)
        else:
            job.records.digests = copy(runs, job.records.ends)
        num_bytes = runs.total_bytes
        failure = call_after(job)
    return CopyResult(job.job_id, failure, num_bytes, clock() - started)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _call_hook(name: str, hook: Hook | None) -> str | None:
    if hook is None:
        return None
    try:
        return hook()
    except Exception as error:  # must end the job, not the copy thread
        return f"{name}: {describe(error)}"
