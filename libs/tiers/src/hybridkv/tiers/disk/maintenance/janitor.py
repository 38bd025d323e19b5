"""Where the index's file work runs: at once in the caller, or one task after another on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

logger = logging.getLogger(__name__)


Task: TypeAlias = Callable[[], None]
"""File work. It must not raise: what it meets it hands back through a queue of its owner."""

MAX_QUEUED_TASKS = 64


class _Waiting(NamedTuple):
    """A task in the queue of a thread."""

    due_s: float
    """0: at once."""
    task: Task


class Janitor(Protocol):
    """Runs tasks in the order in which they were given, those apart that are to wait, and never two at a time."""

    @property
    def can_wait(self) -> bool:
        """Whether a task may be given now that is to run later."""
        ...

    def submit(self, task: Task) -> bool:
        """False when the task was not taken, because too many wait or the janitor was closed."""
        ...

    def submit_later(self, task: Task, delay_s: float) -> bool:
        """As `submit`, when so many seconds have passed, or at the end. False also when it cannot wait."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Run what waits, at most for `timeout_s`; take no more. False when something may still be running, and then it
        may be called again."""
        ...

    def leave(self, last: Task) -> bool:
        """Behind a `close` that was False: the caller waits no more, and `last` runs when all has ended. False when it
        has, and then it does not."""
        ...


class InlineJanitor:
    """Runs a task before `submit` returns: nothing happens behind the caller's back."""

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
    """Runs tasks on one daemon thread, so that a device that stands still stops nobody else."""

    can_wait = True

    def __init__(self, max_queued: int = MAX_QUEUED_TASKS) -> None:
        self._tasks: queue.Queue[_Waiting | None] = queue.Queue(max_queued)
        self._delayed: list[_Waiting] = []
        """The thread's own."""
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
            self._tasks.put_nowait(_Waiting(due_s, task))
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
        # Where too many waited, nobody could say behind them that they were the last.
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
        """Run what is due. How long the next one waits, None when there is none."""
        now_s = time.monotonic()
        due = [item for item in self._delayed if item.due_s <= now_s]
        self._delayed = [item for item in self._delayed if item.due_s > now_s]
        for item in due:
            _run_safely(item.task)
        if not self._delayed:
            return None
        return max(min(item.due_s for item in self._delayed) - time.monotonic(), 0.0)


def _run_safely(task: Task) -> None:
    """A bug in one task is logged, and the thread does the next one."""
    try:
        task()
    except Exception:
        logger.exception("file work of the disk tier met a bug")
