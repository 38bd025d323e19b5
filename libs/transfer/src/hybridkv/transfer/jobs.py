"""One job from start to end, on whatever thread calls. Private to the engines of this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.transfer.engine import CopyResult, Hook, JobId, RecordDigests, RunsSource
from hybridkv.transfer.memory import RegisteredMemory
from hybridkv.transfer.native import Copier, runs_copier
from hybridkv.transfer.runs import CopyRuns, Integers


@dataclass(frozen=True, slots=True)
class Job:
    job_id: JobId
    runs: RunsSource
    before: Hook | None
    after: Hook | None
    records: RecordDigests | None = None

    def failed(self, failure: str, num_bytes: int = 0, seconds: float = 0.0) -> CopyResult:
        return CopyResult(self.job_id, failure, num_bytes, seconds)


def copy_runs(runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None:
    """Copy each run, without the interpreter lock. The caller checked every address."""
    return runs_copier()(runs, record_ends)


def execute(job: Job, memory: RegisteredMemory, copy: Copier, clock: Callable[[], float]) -> CopyResult:
    """Make the runs, check, `before`, copy, `after`. Any problem ends the job there, as a result."""
    started = clock()
    num_bytes = 0
    try:
        runs = job.runs if isinstance(job.runs, CopyRuns) else job.runs()
    except Exception as error:  # as of a hook
        return job.failed(describe(error), seconds=clock() - started)
    failure = memory.why_not(runs) or _ask("before", job.before)
    if failure is None:
        if job.records is None:
            copy(runs)
        else:
            job.records.digests = copy(runs, job.records.ends)
        num_bytes = runs.total_bytes
        failure = _ask("after", job.after)
    return CopyResult(job.job_id, failure, num_bytes, clock() - started)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _ask(name: str, hook: Hook | None) -> str | None:
    if hook is None:
        return None
    try:
        return hook()
    except Exception as error:  # whatever a hook raises must end its job, not the copy thread
        return f"{name}: {describe(error)}"
