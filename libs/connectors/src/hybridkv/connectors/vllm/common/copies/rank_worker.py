"""Base class of the workers of connectors that store: copy jobs of one rank, and reports to the scheduler's half."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hybridkv.connectors.vllm.common.messages import LoadFailure, StepOutcome, StoreOutcome
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.tiers.stack import MoveOutcome
from hybridkv.transfer import CopyEngine, CopyRuns, JobId, RecordDigests

logger = logging.getLogger("vllm.hybridkv.worker")

QUEUE_IS_FULL = LoadFailure("busy", "the copy queue is full")
UNMAPPED = LoadFailure("busy", "the engine sleeps, and its KV cache is not mapped")


@dataclass(frozen=True, slots=True)
class CopyPaths:
    """Copy engines of one rank.

    Args:
        stores: engine for stores.
        loads: engine for loads: the same as `stores`, another one, or one that copies on the calling thread.
        load_timeout_s: maximum seconds that a load waits in the copy queue. Then the load fails, and the engine
            computes the request.
        clock: returns the current time in seconds.
    """

    stores: CopyEngine
    loads: CopyEngine
    load_timeout_s: float
    clock: Callable[[], float]

    def engines(self) -> tuple[CopyEngine, ...]:
        return (self.stores, self.loads) if self.stores is not self.loads else (self.stores,)


@dataclass(slots=True)
class LoadResults:
    """Ids of requests with a load that ended since the last step. A failed load is in both sets."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Outcomes:
    """Collects the outcomes of one rank for the engine and for the scheduler's half."""

    def __init__(self) -> None:
        self._outcome = StepOutcome()
        self._results = LoadResults()
        self._facts: dict[str, str] | None = None

    def stored(self, store_id: int, failure: str | None, reason: str | None) -> None:
        """Records the end of a store. `failure`: description of a failure, or None; `reason`: its label in metrics."""
        self._outcome.stores[store_id] = StoreOutcome(1, failure, reason)

    def loaded(self, request_id: str, failures: Sequence[LoadFailure]) -> None:
        """Records the end of a load. The load succeeded if `failures` is empty."""
        self._results.finished.add(request_id)
        if failures:
            self._results.failed.add(request_id)
            self._outcome.load_failures[request_id] = tuple(failures)

    def moved(self, moves: Mapping[int, MoveOutcome]) -> None:
        """Records the end of moves between tiers."""
        self._outcome.moves.update(moves)

    def measured(self, step: int) -> None:
        """Records the end of a step that the scheduler measures."""
        self._outcome.measured_step = step

    def set_facts(self, facts: dict[str, str]) -> None:
        """Sets the facts of this rank. The scheduler needs them before it opens a store that outlives the engine."""
        self._facts = facts

    def take_facts(self) -> dict[str, str] | None:
        """Facts that were not taken yet; None if there are none."""
        facts, self._facts = self._facts, None
        return facts

    def take_results(self) -> LoadResults:
        """Ended loads, for the engine."""
        results, self._results = self._results, LoadResults()
        return results

    def take_outcome(self) -> StepOutcome | None:
        """Outcomes for the scheduler; None if there are none."""
        outcome, self._outcome = self._outcome, StepOutcome()
        return None if outcome.is_empty else outcome


@dataclass(slots=True, eq=False)
class CopyJob:
    """Copy of one load or store.

    Args:
        is_load: True for a load: the job copies into the engine's blocks.
        make_runs: makes the runs of bytes, on the thread that copies.
        on_end: called at the end with the failures; empty after a success.
        before: hook on the thread that copies, before the first byte. Returns a description of a failure, or None.
        after: hook on the thread that copies, after the last byte. Returns the same as `before`.
        records: checksums that the copy engine takes during the copy.
        zero_bytes: bytes of padding in the runs. Set by `make_runs`.
        failures: failures that the hooks have found, with their chunks.
    """

    is_load: bool
    make_runs: Callable[[CopyJob], CopyRuns]
    on_end: Callable[[tuple[LoadFailure, ...]], None]
    before: Callable[[CopyJob], str | None] | None = None
    after: Callable[[CopyJob], str | None] | None = None
    records: RecordDigests | None = None
    zero_bytes: int = 0
    failures: list[LoadFailure] = field(default_factory=list)


class CopyJobs:
    """Copy jobs of one worker. Not thread-safe.

    Args:
        paths: the copy engines.
        metrics: counts the copies.
    """

    def __init__(self, paths: CopyPaths, metrics: ConnectorMetrics) -> None:
        self._paths = paths
        self._metrics = metrics
        self._job_ids = itertools.count(1)
        self._open: dict[JobId, CopyJob] = {}
        self._is_suspended = False

    def submit(self, job: CopyJob) -> None:
        """Queues a job. `on_end` is called by `poll`, or immediately if the job cannot be queued."""
        if self._is_suspended:
            job.on_end((UNMAPPED,))
            return
        engine = self._paths.loads if job.is_load else self._paths.stores
        job_id = JobId(next(self._job_ids))
        self._open[job_id] = job
        failure = QUEUE_IS_FULL
        before = partial(job.before, job) if job.before is not None else None
        after = partial(job.after, job) if job.after is not None else None
        try:
            is_taken = engine.submit(job_id, partial(job.make_runs, job), before, after, job.records)
        except Exception as error:  # any error fails this copy, not the engine
            logger.exception("a copy could not be submitted")
            is_taken, failure = False, LoadFailure("io", f"{type(error).__name__}: {error}")
        if not is_taken:
            del self._open[job_id]
            job.on_end((failure,))

    def poll(self) -> None:
        """Calls `on_end` of the jobs that have ended."""
        for engine in self._paths.engines():
            for copied in engine.poll():
                job = self._open.pop(copied.job_id)
                num_bytes = copied.num_bytes and copied.num_bytes - job.zero_bytes
                self._metrics.copied(job.is_load, copied.seconds, num_bytes)
                if copied.failure is None:
                    job.on_end(())
                else:
                    job.on_end(tuple(job.failures) or (LoadFailure("io", copied.failure),))

    def wait_for_loads(self, timeout_s: float) -> None:
        """Waits until all loads have ended, at most `timeout_s`. Does not call `on_end`; `poll` does."""
        if loads := [job_id for job_id, job in self._open.items() if job.is_load]:
            self._paths.loads.wait(loads, timeout_s)

    def suspend(self, timeout_s: float) -> bool:
        """Waits until all jobs have ended, and calls their `on_end`. False after a timeout, without these calls. After
        True, later jobs fail at once until `resume`."""
        ends_s = self._paths.clock() + timeout_s
        for engine in self._paths.engines():
            is_loads = engine is self._paths.loads
            is_stores = engine is self._paths.stores
            jobs = [job_id for job_id, job in self._open.items() if (is_loads if job.is_load else is_stores)]
            if not engine.wait(jobs, max(0.0, ends_s - self._paths.clock())):
                return False
        self._is_suspended = True
        self.poll()
        return True

    def resume(self) -> None:
        """Ends the effect of `suspend`: later jobs are queued again."""
        self._is_suspended = False

    def close(self) -> None:
        """Waits for the running job of each engine, and fails the queued jobs."""
        for engine in self._paths.engines():
            engine.close()
        self.poll()


class RankWorker:
    """Base class of the workers of connectors that store: copy jobs, and outcomes for the scheduler.

    Args:
        paths: the copy engines.
        metrics: counts the copies.
    """

    def __init__(self, paths: CopyPaths, metrics: ConnectorMetrics) -> None:
        self._paths = paths
        self._metrics = metrics
        self._copies = CopyJobs(paths, metrics)
        self._outcomes = Outcomes()

    def set_facts(self, facts: dict[str, str]) -> None:
        """Sets the facts of this rank. The scheduler needs them before it opens a store that outlives the engine."""
        self._outcomes.set_facts(facts)

    def take_facts(self) -> dict[str, str] | None:
        """Facts that were not taken yet; None if there are none."""
        return self._outcomes.take_facts()

    def suspend(self, timeout_s: float) -> bool:
        """Waits until no copy uses the engine's KV memory. False after a timeout. After True, loads and stores fail
        without a copy until `resume`, and their failures are reported with the next step."""
        return self._copies.suspend(timeout_s)

    def resume(self) -> None:
        """Allows copies again. The engine's KV memory must be mapped at the same addresses as before."""
        self._copies.resume()

    def outcome(self) -> StepOutcome | None:
        """Ended stores and moves, failed loads and the end of a measured step since the last call; None if there are
        none."""
        return self._outcomes.take_outcome()
