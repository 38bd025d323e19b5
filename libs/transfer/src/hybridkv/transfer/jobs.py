"""One job from start to end, on whatever thread calls. Private to the engines of this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from hybridkv.transfer.engine import CopyResult, Hook, JobId, RecordDigests, RunsSource
from hybridkv.transfer.memory import RegisteredMemory
from hybridkv.transfer.runs import CopyRuns, Integers

try:
    from hybridkv.native import Lowering, MemoryCopier
except ImportError as error:
    raise ImportError(
        f"hybridkv.transfer needs hybridkv-native>=0.1,<0.2, which cannot be imported ({error}); "
        "hint: pip install 'hybridkv-native>=0.1,<0.2'"
    ) from error

__all__ = ["Copier", "Lowering", "MemoryCopier"]


class Copier(Protocol):
    """Copies each run. The digest of each record, 16 bytes, if `record_ends` asks for them and it takes any."""

    def __call__(self, runs: CopyRuns, record_ends: Integers | None = None) -> list[bytes] | None: ...


DIGEST_BYTES = 16


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
    """Copies each run, without the interpreter lock. The caller checked every address.

    The digest of each record, where `record_ends` asks for them: taken on the way, for a tenth of the cost of reading
    the bytes once more.
    """
    copier = _copier()
    if record_ends is None:
        copier.copy(runs.sources, runs.destinations, runs.num_bytes)
        return None
    digests = copier.copy_and_digest(runs.sources, runs.destinations, runs.num_bytes, record_ends)
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


@cache
def _copier() -> MemoryCopier:
    """One for the process: it copies on the thread that calls."""
    return MemoryCopier()


def prepare(job: Job, memory: RegisteredMemory) -> tuple[CopyRuns, str | None]:
    """Makes the runs, checks them, calls `before`. The runs, and why they are not to be copied."""
    try:
        runs = job.runs if isinstance(job.runs, CopyRuns) else job.runs()
    except Exception as error:  # as of a hook
        return CopyRuns.empty(), describe(error)
    return runs, memory.why_not(runs) or _ask("before", job.before)


def conclude(job: Job) -> str | None:
    """Calls `after`, once everything is copied. Why the job failed all the same."""
    return _ask("after", job.after)


def execute(job: Job, memory: RegisteredMemory, copy: Copier, clock: Callable[[], float]) -> CopyResult:
    """Make the runs, check, `before`, copy, `after`. Any problem ends the job there, as a result."""
    started = clock()
    num_bytes = 0
    runs, failure = prepare(job, memory)
    if failure is None:
        if job.records is None:
            copy(runs)
        else:
            job.records.digests = copy(runs, job.records.ends)
        num_bytes = runs.total_bytes
        failure = conclude(job)
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
