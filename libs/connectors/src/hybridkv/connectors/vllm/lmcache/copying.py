"""Copy jobs of a worker, each with what follows from it. For the thread that submits and polls."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from hybridkv.connectors.vllm.lowering import Zeros
from hybridkv.connectors.vllm.rank_work import CopyPaths
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.transfer import CopyEngine, CopyRuns, Hook, JobId, RunsSource

logger = logging.getLogger("vllm.hybridkv.worker")

QUEUE_IS_FULL = "the copy queue is full"


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One copy.

    Args:
        is_load: into the engine's blocks.
        runs: of bytes, or what makes them on the copy thread.
        before: on the copy thread; a reason fails the job.
        after: the same.
        on_end: told why it failed, or None.
        zeros: from where runs copy what is no page's.
    """

    is_load: bool
    runs: RunsSource
    before: Hook | None
    after: Hook | None
    on_end: Callable[[str | None], None]
    zeros: Zeros | None = None


@dataclass(slots=True)
class _Open:
    job: CopyJob
    zero_bytes: int = 0
    """Of its runs, once they are made."""

    def runs(self) -> CopyRuns:
        runs = self.job.runs if isinstance(self.job.runs, CopyRuns) else self.job.runs()
        self.zero_bytes = 0 if self.job.zeros is None else self.job.zeros.num_bytes_in(runs)
        return runs


class Copies:
    """The jobs of one worker.

    Args:
        paths: carry them out.
        recorder: counts them.
    """

    def __init__(self, paths: CopyPaths, recorder: Recorder) -> None:
        self._paths = paths
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._open: dict[JobId, _Open] = {}

    def submit(self, job: CopyJob) -> None:
        """Have it done. Its end is told by `poll`, or at once where it could not begin."""
        engine: CopyEngine = self._paths.loads if job.is_load else self._paths.stores
        number = JobId(next(self._numbers))
        self._open[number] = opened = _Open(job)
        try:
            is_taken, failure = engine.submit(number, opened.runs, job.before, job.after), QUEUE_IS_FULL
        except Exception as error:  # whatever it was, it is this copy's failure and not the engine's
            logger.exception("a copy could not be submitted")
            is_taken, failure = False, f"{type(error).__name__}: {error}"
        if not is_taken:
            del self._open[number]
            job.on_end(failure)

    def poll(self) -> None:
        """Tell of jobs that ended."""
        for engine in self._paths.engines():
            for copied in engine.poll():
                opened = self._open.pop(copied.job_id)
                num_bytes = copied.num_bytes and copied.num_bytes - opened.zero_bytes
                self._recorder.copied(opened.job.is_load, copied.seconds, num_bytes)
                opened.job.on_end(copied.failure)

    def close(self) -> None:
        """End what runs, and fail what waits."""
        for engine in self._paths.engines():
            engine.close()
        self.poll()
