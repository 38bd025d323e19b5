"""Event loop of the manifest store, on a thread of its own, and its log of failed requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hybridkv.tiers.object.store import describe
from hybridkv.tiers.threads import BackgroundThread, DaemonPool

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_NUM_THREADS = 3
_MIN_JOIN_S = 1.0
"""Minimum time for cancelled tasks to end."""


class StoreLoop:
    """Event loop on a daemon thread, with a few more threads for blocking calls. Runs until `close`."""

    def __init__(self) -> None:
        self.is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()
        """Tasks that `close` waits for."""
        self._has_logged_failure = False
        self._pool = DaemonPool(_NUM_THREADS, "hybridkv-object-calls")
        """For blocking calls; coroutines of obstore need no thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = BackgroundThread("hybridkv-object-index")
        self._thread.post(self._run)

    # On any thread.

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call for the loop. Dropped after `close`."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(call)

    def close(self, timeout_s: float) -> None:
        """Close. Writes get `timeout_s` to finish; then all tasks are cancelled."""
        if self.is_closed:
            return
        self.is_closed = True
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: self._finish(done))
        end_s = time.monotonic() + timeout_s
        done.wait(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.close()
        self._thread.wait_until_ended(max(_MIN_JOIN_S, end_s - time.monotonic()))
        self._pool.shutdown(wait=False, cancel_futures=True)

    # On the loop.

    def spawn(self, work: Coroutine[Any, Any, None], *, is_write: bool = False) -> asyncio.Task[None]:
        """Start a task.

        Args:
            work: the coroutine.
            is_write: `close` waits for it.
        """
        task = self._loop.create_task(work)
        for tasks in (self._tasks, self._writes) if is_write else (self._tasks,):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        return task

    async def call(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Make a blocking call on another thread."""
        return await asyncio.wrap_future(self._pool.submit(call, *arguments))

    def log_failure(self, action: str, error: Exception) -> None:
        """Log a failed request: as a warning, but at debug level if `succeeded` was not called since the last failure.

        Args:
            action: action that failed, as a past participle such as "read".
            error: the error.
        """
        log = logger.debug if self._has_logged_failure else logger.warning
        log("the object store could not be %s: %s", action, describe(error))
        self._has_logged_failure = True

    def succeeded(self) -> None:
        """Record that a request succeeded. The next failure is a warning again."""
        self._has_logged_failure = False

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _finish(self, done: threading.Event) -> None:
        async def wait() -> None:
            await asyncio.gather(*self._writes, return_exceptions=True)
            done.set()

        self.spawn(wait())
