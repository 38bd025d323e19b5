"""The `CopyEngine` protocol and its values. CONTRACT.md names the test of each claim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NewType, Protocol, TypeAlias, runtime_checkable

from hybridkv.transfer.runs import CopyRuns, Integers

JobId = NewType("JobId", int)
"""The caller's number of one job. Can be reused after the job's result was polled."""

Hook: TypeAlias = Callable[[], "str | None"]
"""Callback of a job, on a thread of the engine; an inline engine calls it in `submit`. Returns None to go on, or the
reason to fail the job. An exception fails the job with the text of the exception."""


RunsSource: TypeAlias = "CopyRuns | Callable[[], CopyRuns]"
"""Runs, or a function that makes them. The function is called once, when the job starts: on the copy thread, or in
`submit` of an inline engine. If the function raises, the job fails."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Result of one job."""

    job_id: JobId
    failure: str | None
    """None if every byte was copied and both hooks returned None."""
    num_bytes: int
    """Copied bytes: 0, or all bytes of the job. Also all bytes if only `after` failed."""
    seconds: float
    """Duration, from the start of the job (or the end of the previous job, if later) to its end. Includes the hooks and
    the making of runs, not the time in the queue. 0 if the job did not begin, or if the copy of an inline
    engine or a CPU engine raised."""


@dataclass(slots=True, eq=False)
class RecordDigests:
    """Request for the XXH3-128 digest of each record of a job, computed from the bytes while they are copied.

    Record i consists of runs [ends[i - 1], ends[i]), in order; the last end is the number of runs. If a function makes
    the runs, this function also sets `ends`.
    """

    ends: Integers
    digests: list[bytes] | None = None
    """16 bytes per record, set after the copy and before `after`. None if the job failed before, or if this engine
    computes no digests; then the caller reads the written bytes."""


@runtime_checkable
class CopyEngine(Protocol):
    """Moves runs of bytes between registered memory. One thread submits, polls and closes.

    Until the result of a job was polled, its memory must stay valid, its sources must not change, and its destinations
    must not be read or written, also not by other jobs.
    """

    def register(self, address: int, num_bytes: int, name: str) -> None:
        """Allow runs in this memory from now on. `name` appears in failures. Registrations may overlap.

        Raises:
            CopyEngineError: not a valid address range, or the engine found that its GPU cannot access the memory.
        """
        ...

    def submit(
        self,
        job_id: JobId,
        runs: RunsSource,
        before: Hook | None = None,
        after: Hook | None = None,
        records: RecordDigests | None = None,
    ) -> bool:
        """Queue a job. Never waits, except in an inline engine: it runs the whole job here.

        Jobs begin and end in order of submission. Engines of a GPU copy several at the same time. A job makes its runs
        (if `runs` is a function), checks them, calls `before`, copies, and calls `after`. If a run does not lie in one
        registration, the job fails before `before` and before a byte moves. `records.digests` is set before `after`, if
        this engine computes digests.

        Returns:
            True if the job was accepted; exactly one result follows. False if the queue is full: nothing was done and
            no result follows, so the caller drops the job and counts the drop.

        Raises:
            CopyEngineError: after `close`, or if the result of a job with this `job_id` was not polled yet.
            Exception: the GPU cannot record the fence. The job was not accepted.
        """
        ...

    def poll(self) -> list[CopyResult]:
        """Results that were not returned yet, in order of submission. Never waits."""
        ...

    def wait(self, job_ids: Iterable[JobId], timeout_s: float) -> bool:
        """Wait until these jobs have ended. `poll` still returns their results. False on timeout.

        An unknown job id counts as ended: its result was polled, or the job was not accepted.
        """
        ...

    def close(self) -> None:
        """Finish the jobs that have begun, fail the queued jobs, stop the threads. `poll` still works. Can be called
        again."""
        ...
