"""Where the index's file work runs: at once in the caller, or one job after another on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

Job: TypeAlias = Callable[[], None]
"""File work. It must not raise: what it meets it hands back through a queue of its owner."""

MAX_QUEUED_JOBS = 64


class _Waiting(NamedTuple):
    """A job in the queue of a thread."""

    due_s: float
    """0: at once."""
    job: Job


class Janitor(Protocol):
    """Runs jobs in the order in which they were given, those apart that are to wait, and never two at a time."""

    @property
    def can_wait(self) -> bool:
        """Whether a job may be given now that is to run later."""
        ...

    def submit(self, job: Job) -> bool:
        """False when the job was not taken, because too many wait or the janitor was closed."""
        ...

    def submit_later(self, job: Job, delay_s: float) -> bool:
        """As `submit`, when so many seconds have passed, or at the end. False also when it cannot wait."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Run what waits, at most for `timeout_s`; take no more. False when something may still be running, and then it
        may be called again."""
        ...

    def leave(self, last: Job) -> bool:
        """Behind a `close` that was False: the caller waits no more, and `last` runs when all has ended. False when it
        has, and then it does not."""
        ...


class InlineJanitor:
    """Runs a job before `submit` returns: nothing happens behind the caller's back."""

    can_wait = False

    def __init__(self) -> None:
        self._is_closed = False

    def submit(self, job: Job) -> bool:
        if self._is_closed:
            return False
        job()
        return True

    def submit_later(self, job: Job, delay_s: float) -> bool:
        return delay_s <= 0 and self.submit(job)

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        return True

    def leave(self, last: Job) -> bool:
        return False


class ThreadJanitor:
    """Runs jobs on one daemon thread, so that a device that stands still stops nobody else."""

    can_wait = True

    def __init__(self, max_queued: int = MAX_QUEUED_JOBS) -> None:
        self._jobs: queue.Queue[_Waiting | None] = queue.Queue(max_queued)
        self._delayed: list[_Waiting] = []
        """The thread's own."""
        self._is_closed = False
        self._has_end = False
        self._end_lock = threading.Lock()
        self._has_ended = False
        self._last: Job | None = None
        self._thread = threading.Thread(target=self._run, name="hybridkv-disk-janitor", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        return self.submit_later(job, 0.0)

    def submit_later(self, job: Job, delay_s: float) -> bool:
        if self._is_closed:
            return False
        due_s = time.monotonic() + delay_s if delay_s > 0 else 0.0
        try:
            self._jobs.put_nowait(_Waiting(due_s, job))
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        self._is_closed = True
        if not self._has_end:
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return False
            self._has_end = True
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def leave(self, last: Job) -> bool:
        with self._end_lock:
            if not self._has_ended:
                self._last = last
            return not self._has_ended

    def _run(self) -> None:
        self._run_jobs()
        with self._end_lock:
            self._has_ended = True
        if self._last is not None:
            self._last()

    def _run_jobs(self) -> None:
        # Where too many waited, nobody could say behind them that they were the last.
        while not (self._is_closed and self._jobs.empty()):
            wait_s = self._run_delayed()
            try:
                item = self._jobs.get(timeout=wait_s)
            except queue.Empty:
                continue
            if item is None:
                break
            if item.due_s:
                self._delayed.append(item)
            else:
                item.job()
        for item in self._delayed:
            item.job()

    def _run_delayed(self) -> float | None:
        """Run what is due. How long the next one waits, None when there is none."""
        now_s = time.monotonic()
        due = [item for item in self._delayed if item.due_s <= now_s]
        self._delayed = [item for item in self._delayed if item.due_s > now_s]
        for item in due:
            item.job()
        if not self._delayed:
            return None
        return max(min(item.due_s for item in self._delayed) - time.monotonic(), 0.0)
