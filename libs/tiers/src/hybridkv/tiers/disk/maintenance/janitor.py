"""Janitor: runs the file work of an index on a thread, one task at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hybridkv.tiers.threads import MAX_QUEUED, BackgroundThread

Task: TypeAlias = Callable[[], None]
"""File work. A task must not raise. It puts its result into a queue of its owner."""


class ThreadJanitor:
    """Runs one task at a time, in order; delayed tasks run when they are due. Has one daemon thread, so that a blocked
    device blocks no other thread. Starts the thread; errors as `BackgroundThread.start`."""

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._thread = BackgroundThread("hybridkv-disk-janitor", max_queued)
        self._thread.start()

    def submit(self, task: Task) -> bool:
        """Queue a task. False if it was refused: too many tasks wait, or the janitor was closed."""
        return self._thread.post(task)

    def submit_later(self, task: Task, delay_s: float) -> bool:
        """`submit` a task to run after a delay, or at the end."""
        return self._thread.post(task, delay_s)

    def close(self, timeout_s: float) -> bool:
        """Accept no more tasks, and wait at most `timeout_s` until all tasks have ended. False if a task may still run;
        then call `close` again, or `run_at_end`."""
        self._thread.close()
        return self._thread.wait_until_ended(timeout_s)

    def run_at_end(self, last: Task) -> bool:
        """After `close` returned False: run `last` when all tasks have ended. False if all tasks have ended already;
        then `last` does not run."""
        return self._thread.at_end(last)
