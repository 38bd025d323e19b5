"""A background thread for short work, with results that a caller waits for with a timeout."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_WAITING = 64
"""Size of the thread's queue; more work is refused."""


class Outcome(Generic[T]):
    """Result of submitted work: a value, or the exception that it raised."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: Exception | None = None
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the work was done within the timeout."""
        return self._done.wait(timeout_s)

    def run(self, work: Callable[[], T]) -> None:
        """Does the work. Called on the thread."""
        try:
            self.value = work()
        except Exception as error:  # any error is kept for the caller
            self.error = error
        self._done.set()


class BackgroundThread:
    """A daemon thread, started with the first work. A stuck file system cannot keep the process alive.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @property
    def is_full(self) -> bool:
        """Whether the queue is full."""
        return self._work.full()

    def submit(self, work: Callable[[], T]) -> Outcome[T] | None:
        """Queues work; None if the queue is full."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        outcome: Outcome[T] = Outcome()
        try:
            self._work.put_nowait(lambda: outcome.run(work))
        except queue.Full:
            return None
        return outcome

    def settle(self, timeout_s: float) -> bool:
        """Waits until all work submitted before is done. False after the timeout."""
        if self._thread is None:
            return True
        last = self.submit(lambda: None)
        return last is not None and last.wait(timeout_s)

    def close(self) -> None:
        """Asks the thread to end after the queued work. Does not wait."""
        self._is_closing = True
        if self._thread is not None:
            # If the queue is full, the thread checks `_is_closing` after its work.
            with contextlib.suppress(queue.Full):
                self._work.put_nowait(None)

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the thread ended within the timeout. It ends only after `close`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            if self._is_closing and self._work.empty():
                return
