"""What a copy engine promises: jobs of runs go in, results come out. CONTRACT.md names the test behind each promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NewType, Protocol, TypeAlias, runtime_checkable

from hybridkv.transfer.runs import CopyRuns, Integers

JobId = NewType("JobId", int)
"""The caller's name for one job; free again once its result was polled."""

Hook: TypeAlias = Callable[[], "str | None"]
"""Runs on a thread of the engine. None: go on. A reason: fail the job. An exception fails it too, with its text."""


RunsSource: TypeAlias = "CopyRuns | Callable[[], CopyRuns]"
"""Runs, or what makes them: called once, on the copy thread, when the job's turn has come. What it raises fails it."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The end of one job."""

    job_id: JobId
    failure: str | None
    """None when every byte was copied and both hooks agreed."""
    num_bytes: int
    """Bytes that were copied: 0 or all of the job's, also when `after` failed it."""
    seconds: float
    """From the start of the job, or the end of the job before if that is later, to its end. The making of runs and
    hooks are included, time in the queue is not."""


@dataclass(slots=True, eq=False)
class RecordDigests:
    """Asks a job for XXH3-128 of what it copies, taken of the very bytes that it writes and on their way.

    Record i is the runs from `ends[i - 1]` to `ends[i]`, in order; the last end is the number of runs. Who has the runs
    made when the job's turn comes sets `ends` then.
    """

    ends: Integers
    digests: list[bytes] | None = None
    """16 bytes for each record, once all is copied, so in `after`. None: this engine takes none; read what it wrote."""


@runtime_checkable
class CopyEngine(Protocol):
    """Moves runs of bytes between registered memory. One thread submits, polls and closes.

    Memory of a job must stay valid, its sources unchanged and its destinations unread until its result was polled.
    """

    def register(self, address: int, num_bytes: int, name: str) -> None:
        """Memory that runs may touch from now on; `name` appears in failures. Registrations may overlap."""
        ...

    def submit(
        self,
        job_id: JobId,
        runs: RunsSource,
        before: Hook | None = None,
        after: Hook | None = None,
        records: RecordDigests | None = None,
    ) -> bool:
        """Queue a job: `before`, then the copies, then `after`; jobs run one after another in order of submission.
        Runs that are made are made first.

        True: taken, and exactly one result will come. False: as many jobs as allowed are waiting or unpolled; nothing
        was done and no result comes, so the caller drops and counts. Never waits. A job with a run that does not lie in
        one registration fails before `before` is called and before a byte moves. `CopyEngineError` after `close` and
        for a `job_id` whose result was not polled yet.

        `records` is filled in before `after` is called, if this engine takes digests while it copies.
        """
        ...

    def poll(self) -> list[CopyResult]:
        """Results that were not handed out yet, in order of submission. Never waits."""
        ...

    def wait(self, job_ids: Iterable[JobId], timeout_s: float) -> bool:
        """Wait until these jobs have ended; their results still come by `poll`. False when `timeout_s` passed first.

        A job id that is not known, because its result was polled, has ended.
        """
        ...

    def close(self) -> None:
        """Finish the running job, fail the queued ones, stop the threads. `poll` still works. Repeatable."""
        ...
