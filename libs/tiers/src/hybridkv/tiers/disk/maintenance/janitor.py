"""Janitors run the file work of an index: inline in the caller, or task by task on a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from hybridkv.tiers.threads import MAX_QUEUED, BackgroundThread

Task: TypeAlias = Callable[[], None]
"""File work. It must not raise; it reports results through a queue of its owner."""


class Janitor(Protocol):
    """Runs one task at a time, in order; delayed tasks run when they are due."""

    @property
    def can_wait(self) -> bool:
        """True if `submit_later` accepts a delay."""
        ...

    def submit(self, task: Task) -> bool:
        """False if the task was rejected: too many wait, or the janitor was closed."""
        ...

    def submit_later(self, task: Task, delay_s: float) -> bool:
        """`submit` after a delay, or at the end. False also if this janitor cannot delay."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Run waiting tasks for at most `timeout_s`; accept no more. False if one may still be running; then call it
        again."""
        ...

    def run_at_end(self, last: Task) -> bool:
        """After `close` returned False: run `last` when all tasks have ended. False if they have ended already; `last`
        does not run."""
        ...


class InlineJanitor:
    """Runs a task before `submit` returns."""

    can_wait = False

    def __init__(self) -> None:
        self._is_closed = False

    def submit(self, task: Task) -> bool:
        if self._is_closed:
            return False
        task()
        return True

    def submit_later(self, task: Task, delay_s: float) -> bool:
        return delay_s <= 0 and self.submit(task)

    def close(self, timeout_s: float) -> bool:
        self._is_closed = True
        return True

    def run_at_end(self, last: Task) -> bool:
        return False


class ThreadJanitor:
    """Runs tasks on one daemon thread, so that a blocked device blocks no other thread."""

    can_wait = True

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._thread = BackgroundThread("hybridkv-disk-janitor", max_queued)
        self._thread.start()

    def submit(self, task: Task) -> bool:
        return self._thread.post(task)

    def submit_later(self, task: Task, delay_s: float) -> bool:
        return self._thread.post(task, delay_s)

    def close(self, timeout_s: float) -> bool:
        self._thread.close()
        return self._thread.has_ended(timeout_s)

    def run_at_end(self, last: Task) -> bool:
        return self._thread.at_end(last)
