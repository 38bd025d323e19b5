"""Where the index's file work runs: at once in the caller, or one job after another on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

Job: TypeAlias = Callable[[], None]
"""File work. It must not raise: what it meets it hands back through a queue of its owner."""

MAX_QUEUED_JOBS = 64


class Janitor(Protocol):
    """Runs jobs in the order in which they were given, never two at a time."""

    def submit(self, job: Job) -> bool:
        """False when the job was not taken, because too many wait or the janitor was closed."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Run what waits, at most for `timeout_s`; take no more. False when something may still be running."""
        ...


class InlineJanitor:
    """Runs a job before `submit` returns: nothing happens behind the caller's back."""

    def __init__(self) -> None:
        self._is_closed = False

    def submit(self, job: Job) -> bool:
        if self._is_closed:
            return False
        job()
        return True

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        return True


class ThreadJanitor:
    """Runs jobs on one daemon thread, so that a device that stands still stops nobody else."""

    def __init__(self, max_queued: int = MAX_QUEUED_JOBS) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_queued)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hybridkv-disk-janitor", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        if self._is_closed:
            return False
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        if not self._is_closed:
            self._is_closed = True
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
