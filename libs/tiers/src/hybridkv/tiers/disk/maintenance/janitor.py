"""Janitors run the file work of an index: inline in the caller, or task by task on a thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

logger = logging.getLogger(__name__)


Task: TypeAlias = Callable[[], None]
"""File work. It must not raise; it reports results through a queue of its owner."""

MAX_QUEUED_TASKS = 64


class _QueuedTask(NamedTuple):
    """Task in the queue of a thread."""

    due_s: float
    """0: at once."""
    task: Task


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

    def leave(self, last: Task) -> bool:
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

    def leave(self, last: Task) -> bool:
        return False


class ThreadJanitor:
    """Runs tasks on one daemon thread, so that a blocked device blocks no other thread."""

    can_wait = True

    def __init__(self, max_queued: int = MAX_QUEUED_TASKS) -> None:
        self._tasks: queue.Queue[_QueuedTask | None] = queue.Queue(max_queued)
        self._delayed: list[_QueuedTask] = []
        """Used by the thread alone."""
        self._is_closed = False
        self._has_end = False
        self._end_lock = threading.Lock()
        self._has_ended = False
        self._last: Task | None = None
        self._thread = threading.Thread(target=self._run, name="hybridkv-disk-janitor", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> bool:
        return self.submit_later(task, 0.0)

    def submit_later(self, task: Task, delay_s: float) -> bool:
        if self._is_closed:
            return False
        due_s = time.monotonic() + delay_s if delay_s > 0 else 0.0
        try:
            self._tasks.put_nowait(_QueuedTask(due_s, task))
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        self._is_closed = True
        if not self._has_end:
            try:
                self._tasks.put(None, timeout=timeout_s)
            except queue.Full:
                return False
            self._has_end = True
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not self._thread.is_alive()

    def leave(self, last: Task) -> bool:
        with self._end_lock:
            if not self._has_ended:
                self._last = last
            return not self._has_ended

    def _run(self) -> None:
        self._run_tasks()
        with self._end_lock:
            self._has_ended = True
        if self._last is not None:
            self._last()

    def _run_tasks(self) -> None:
        # If the queue was full, the end marker is missing.
        while not (self._is_closed and self._tasks.empty()):
            wait_s = self._run_delayed()
            try:
                item = self._tasks.get(timeout=wait_s)
            except queue.Empty:
                continue
            if item is None:
                break
            if item.due_s:
                self._delayed.append(item)
            else:
                _run_safely(item.task)
        for item in self._delayed:
            _run_safely(item.task)

    def _run_delayed(self) -> float | None:
        """Run tasks that are due. Returns the seconds until the next one, None if there is none."""
        now_s = time.monotonic()
        due = [item for item in self._delayed if item.due_s <= now_s]
        self._delayed = [item for item in self._delayed if item.due_s > now_s]
        for item in due:
            _run_safely(item.task)
        if not self._delayed:
            return None
        return max(min(item.due_s for item in self._delayed) - time.monotonic(), 0.0)


def _run_safely(task: Task) -> None:
    """A bug in one task is logged, and the thread continues."""
    try:
        task()
    except Exception:
        logger.exception("bug in the janitor of the disk tier")
