"""Janitors: run the file work of an index, inline in the caller or on a thread, one task at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from hybridkv.tiers.threads import MAX_QUEUED, BackgroundThread

Task: TypeAlias = Callable[[], None]
"""File work. A task must not raise. It puts its result into a queue of its owner."""


class Janitor(Protocol):
    """Runs one task at a time, in order; delayed tasks run when they are due."""

    @property
    def can_delay(self) -> bool:
        """True if `submit_later` accepts a delay."""
        ...

    def submit(self, task: Task) -> bool:
        """Run or queue a task. False if it was refused: too many tasks wait, or the janitor was closed."""
        ...

    def submit_later(self, task: Task, delay_s: float) -> bool:
        """`submit` a task to run after a delay, or at the end. False also if this janitor accepts no delay."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Accept no more tasks, and wait at most `timeout_s` until all tasks have ended. False if a task may still run;
        then call `close` again, or `run_at_end`."""
        ...

    def run_at_end(self, last: Task) -> bool:
        """After `close` returned False: run `last` when all tasks have ended. False if all tasks have ended already;
        then `last` does not run."""
        ...


class InlineJanitor:
    """Runs a task before `submit` returns."""

    can_delay = False

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
    """Runs tasks on one daemon thread, so that a blocked device blocks no other thread. Starts the thread; errors as
    `BackgroundThread.start`."""

    can_delay = True

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._thread = BackgroundThread("hybridkv-disk-janitor", max_queued)
        self._thread.start()

    def submit(self, task: Task) -> bool:
        return self._thread.post(task)

    def submit_later(self, task: Task, delay_s: float) -> bool:
        return self._thread.post(task, delay_s)

    def close(self, timeout_s: float) -> bool:
        self._thread.close()
        return self._thread.wait_until_ended(timeout_s)

    def run_at_end(self, last: Task) -> bool:
        return self._thread.at_end(last)
