"""Thread pool with daemon threads, which never keep a process alive: a call may wait forever for a dead file system.

`concurrent.futures.ThreadPoolExecutor` joins its threads at interpreter exit, however long that takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_IDLE_S = 5.0
"""An idle thread ends after so long, so an abandoned pool leaves no threads."""


class DaemonPool(Executor):
    """Executor with daemon threads, started when needed.

    Args:
        max_threads: 1 or more.
        name: of the threads.
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
        """Run a call in a thread.

        Raises:
            RuntimeError: the pool was shut down, or the system gives no first thread.
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
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
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
            del work, future, call  # they may hold much memory until the next call

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
        """See `Executor`. Queued calls run, unless they are cancelled."""
        self.close(None if wait else 0.0, cancel_futures=cancel_futures)

    def close(self, timeout_s: float | None, *, cancel_futures: bool = False) -> bool:
        """Accept no more calls, and wait for the threads. False on a timeout; None: no timeout."""
        with self._changed:
            self._is_closed = True
            while cancel_futures and self._work:
                self._work.popleft()[0].cancel()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._num_threads == 0, timeout_s)
