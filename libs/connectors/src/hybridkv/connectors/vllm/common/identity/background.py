"""One thread that does small things in turn, and answers that may be waited for, but not for ever."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_WAITING = 64
"""Things that may wait for the thread; more are refused."""


class Outcome(Generic[T]):
    """What becomes of something submitted: a value, or the exception that it raised."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.error: Exception | None = None
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it was done by then."""
        return self._done.wait(timeout_s)

    def run(self, work: Callable[[], T]) -> None:
        """Does the work, in the thread's turn."""
        try:
            self.value = work()
        except Exception as error:  # whatever it was, whoever asked has to go without
            self.error = error
        self._done.set()


class Background:
    """A daemon thread, begun with the first work: one that a file system keeps must not keep the process.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_closing = False

    @property
    def is_full(self) -> bool:
        """Whether too much is waiting for anything more to be submitted."""
        return self._work.full()

    def submit(self, work: Callable[[], T]) -> Outcome[T] | None:
        """None where too much is waiting already."""
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
        """Waits until all that was submitted before is done."""
        if self._thread is None:
            return True
        last = self.submit(lambda: None)
        return last is not None and last.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread when it has done what waits, or leaves it where it is kept."""
        self._is_closing = True
        if self._thread is not None:
            # Where there is no room the thread has something to do, and looks when it has done it.
            with contextlib.suppress(queue.Full):
                self._work.put_nowait(None)

    def has_ended(self, timeout_s: float) -> bool:
        """Whether, by then, nothing is done any more. It does not end before `close`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            if self._is_closing and self._work.empty():
                return
