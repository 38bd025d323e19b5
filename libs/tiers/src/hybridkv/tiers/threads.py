"""Daemon threads. They do not keep a process alive, even if a call waits forever for a dead file system.

`BackgroundThread` is one thread with a queue and runs one call at a time. `DaemonPool` has several threads. Neither
uses `concurrent.futures.ThreadPoolExecutor`: at exit, the interpreter joins the threads of that class without a time
limit.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

MAX_QUEUED = 64
"""Default size of a background thread's queue. More calls are refused."""


def _start(name: str, run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Outcome(Generic[Result]):
    """Result of a submitted call: `value`, or `error` if the call raised an exception. Both are None before the end."""

    def __init__(self) -> None:
        self.value: Result | None = None
        self.error: Exception | None = None
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the call. False on a timeout."""
        return self._done.wait(timeout_s)

    def run(self, call: Callable[[], Result]) -> None:
        """Run the call and keep its result. Called on the thread."""
        try:
            self.value = call()
        except Exception as error:  # kept for the caller
            self.error = error
        self._done.set()


class _QueuedCall(NamedTuple):
    due_s: float
    """Earliest time of the call, in seconds of `time.monotonic`; 0: at once."""
    call: Callable[[], None]


class BackgroundThread:
    """One daemon thread that runs calls one at a time, in order; delayed calls when they are due. The first call starts
    the thread.

    Args:
        name: name of the thread.
        max_queued: size of the queue; more calls are refused. 0: no limit. Delayed calls leave the queue before they
            are due, and then do not count.
    """

    def __init__(self, name: str, max_queued: int = MAX_QUEUED) -> None:
        self._name = name
        self._queue: queue.Queue[_QueuedCall | None] = queue.Queue(max_queued)
        self._delayed: list[_QueuedCall] = []
        """Delayed calls that are not due yet. Used by the thread alone."""
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        """A call is queued before the thread is closed, or refused. `at_end` is called before the end, or refused."""
        self._has_run = False
        self._last: Callable[[], None] | None = None

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    @property
    def is_full(self) -> bool:
        return self._queue.full()

    def start(self) -> None:
        """Start the thread, unless it is started already.

        Raises:
            RuntimeError: the system cannot start a thread.
            MemoryError: no memory for a thread.
        """
        if self._thread is None:
            self._thread = _start(self._name, self._run)

    def post(self, call: Callable[[], None], delay_s: float = 0.0) -> bool:
        """Queue a call; an exception of the call is logged. False if the queue is full or the thread is closed.

        Args:
            call: call to run.
            delay_s: delay in seconds. At the end of the thread, delayed calls run at once.

        Raises:
            RuntimeError, MemoryError: see `start`.
        """
        due_s = time.monotonic() + delay_s if delay_s > 0 else 0.0
        with self._lock:
            if self._is_closed:
                return False
            self.start()
            try:
                self._queue.put_nowait(_QueuedCall(due_s, call))
            except queue.Full:
                return False
        return True

    def submit(self, call: Callable[[], Result]) -> Outcome[Result] | None:
        """`post` a call with a result. None if `post` returns False."""
        outcome: Outcome[Result] = Outcome()
        return outcome if self.post(lambda: outcome.run(call)) else None

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until all earlier queued calls have run, delayed calls excluded. False on a timeout, or if the queue is
        full or the thread is closed."""
        if self._thread is None:
            return True
        last = self.submit(lambda: None)
        return last is not None and last.wait(timeout_s)

    def close(self) -> None:
        """End the thread after the queued calls. Does not wait."""
        with self._lock:
            self._is_closed = True
            if self._thread is not None:
                # If the queue is full, the thread checks `_is_closed` after each call.
                with contextlib.suppress(queue.Full):
                    self._queue.put_nowait(None)

    def wait_until_ended(self, timeout_s: float | None) -> bool:
        """Wait until the thread has ended, which needs `close`. False on a timeout; None: no timeout. True if the
        thread was never started."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def at_end(self, last: Callable[[], None]) -> bool:
        """Run `last` on the thread after all other calls. Does not start the thread. A second `last` replaces the
        first. False if the thread was closed and all other calls have run; then `last` does not run."""
        with self._lock:
            if not self._has_run:
                self._last = last
            return not self._has_run

    def _run(self) -> None:
        self._make_calls()
        with self._lock:
            self._has_run = True
        if self._last is not None:
            self._make(self._last)

    def _make_calls(self) -> None:
        while not (self._is_closed and self._queue.empty()):
            wait_s = self._make_due()
            try:
                queued = self._queue.get(timeout=wait_s)
            except queue.Empty:
                continue
            if queued is None:
                break
            if queued.due_s:
                self._delayed.append(queued)
            else:
                self._make(queued.call)
            del queued  # a call may hold much memory
        for delayed in self._delayed:
            self._make(delayed.call)

    def _make_due(self) -> float | None:
        """Run delayed calls that are due. Returns the seconds until the next delayed call, None if there is none."""
        if not self._delayed:
            return None
        now_s = time.monotonic()
        due = [delayed for delayed in self._delayed if delayed.due_s <= now_s]
        self._delayed = [delayed for delayed in self._delayed if delayed.due_s > now_s]
        for delayed in due:
            self._make(delayed.call)
        if not self._delayed:
            return None
        return max(min(delayed.due_s for delayed in self._delayed) - time.monotonic(), 0.0)

    def _make(self, call: Callable[[], None]) -> None:
        """Run a call. Logs an exception, so that the thread continues."""
        try:
            call()
        except Exception:
            logger.exception("bug on the thread %s", self._name)


_IDLE_S = 5.0
"""Seconds until an idle thread ends, so that a pool that was not closed leaves no threads."""


class DaemonPool(Executor):
    """Executor with daemon threads that start when needed.

    Args:
        max_threads: largest number of threads, 1 or more.
        name: name of the threads.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._changed = threading.Condition()
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False

    def submit(
        self, call: Callable[Parameters, Result], /, *arguments: Parameters.args, **named: Parameters.kwargs
    ) -> Future[Result]:
        """Queue a call. The queue has no limit.

        Raises:
            RuntimeError: the pool was shut down; or it has no thread, and the system cannot start one.
            MemoryError: the pool has no thread, and there is no memory for one.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the pool was shut down")
            if self._num_idle <= len(self._work) and self._num_threads < self._max_threads:
                self._start_thread()
            self._work.append((future, partial(call, *arguments, **named)))
            self._changed.notify()
        return future

    def _start_thread(self) -> None:
        self._num_threads += 1
        try:
            _start(self._name, self._run)
        except (RuntimeError, MemoryError):
            self._num_threads -= 1
            if not self._num_threads:
                raise

    def _run(self) -> None:
        while (work := self._next()) is not None:
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del work, future, call  # a call may hold much memory

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            end_s = time.monotonic() + _IDLE_S
            self._num_idle += 1
            while not self._work and not self._is_closed and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._num_idle -= 1
            if self._work:
                return self._work.popleft()
            self._num_threads -= 1
            self._changed.notify_all()
            return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor`. Queued calls still run, unless `cancel_futures` is set."""
        self.close(None if wait else 0.0, cancel_futures=cancel_futures)

    def close(self, timeout_s: float | None, *, cancel_futures: bool = False) -> bool:
        """Accept no more calls, and wait until all threads have ended. False on a timeout; None: no timeout. Queued
        calls still run, unless `cancel_futures` is set."""
        with self._changed:
            self._is_closed = True
            while cancel_futures and self._work:
                self._work.popleft()[0].cancel()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_threads == 0, timeout_s)
