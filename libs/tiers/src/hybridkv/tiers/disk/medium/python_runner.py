"""Carries out a medium's operations in Python, on threads: the reference, and what tests make system calls fail in.

Loads go before stores, since somebody waits for them, and neighbours in a file are moved together.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hybridkv.tiers.contract import Completion, Failure
from hybridkv.tiers.disk.files.record_io import Scratch
from hybridkv.tiers.disk.format.layout import record_bytes
from hybridkv.tiers.disk.medium.operations import DirectMode, Headers, Operation, RecordExecutor
from hybridkv.tiers.disk.medium.runner import CLOSED, NO_THREAD, busy
from hybridkv.tiers.disk.medium.segment_cache import SegmentCache
from hybridkv.tiers.disk.medium.syncer import Syncer
from hybridkv.tiers.disk.options import DiskOptions
from hybridkv.tiers.files.file_io import FileIO

MAX_LOADS_BEFORE_A_STORE = 8
"""A store that waits is overtaken by no more."""


class PythonRunner:
    """A `Runner`."""

    def __init__(
        self, io: FileIO, cache: SegmentCache, headers: Headers, options: DiskOptions, clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._cache = cache
        direct = DirectMode(options.direct)
        self._executor = RecordExecutor(io, cache, headers, options, direct)
        self._syncer = Syncer(io, cache, options, clock, direct)
        self._condition = threading.Condition()
        self._loads: deque[Operation] = deque()
        self._stores: deque[Operation] = deque()
        self._loads_in_a_row = 0
        self._num_running = 0
        self._completions: list[Completion] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, operation: Operation) -> Failure | None:
        with self._condition:
            if self._is_closed:
                return CLOSED
            queue = self._stores if operation.is_store else self._loads
            if len(queue) >= self._options.max_queued:
                return busy(len(queue))
            if len(self._threads) < self._options.max_in_flight and not self._start_thread():
                return NO_THREAD
            queue.append(operation)
            self._condition.notify()
        return None

    def take(self) -> list[Completion]:
        with self._condition:
            completions, self._completions = self._completions, []
        return completions

    def wait_until_idle(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(self._is_idle, timeout_s)

    def close(self) -> None:
        with self._condition:
            if self._is_closed:
                return
            self._is_closed = True
            for operation in (*self._loads, *self._stores):
                self._completions.append(Completion(operation.ticket, CLOSED))
            self._loads.clear()
            self._stores.clear()
            self._condition.notify_all()
        # A thread that a device holds longer is left.
        ending = threading.Thread(target=self._end, name="hybridkv-disk-end", daemon=True)
        try:
            ending.start()
        except (RuntimeError, MemoryError):  # there is no other thread: as far as it goes in this one
            self._end(self._options.close_timeout_s)
            return
        ending.join(self._options.close_timeout_s)

    def _end(self, timeout_s: float | None = None) -> None:
        """In a thread of its own: any of it may wait for a device."""
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                return
        self._syncer.sync()
        self._cache.close()

    def _is_idle(self) -> bool:
        return not (self._loads or self._stores or self._num_running)

    def _start_thread(self) -> bool:
        """False when there is no thread at all: the process may have no more, or no memory for one."""
        name = f"hybridkv-disk-{len(self._threads)}"
        try:
            scratch = Scratch(self._options.batch_bytes)
            thread = threading.Thread(target=self._work, args=(scratch,), name=name, daemon=True)
            thread.start()
        except (RuntimeError, OSError, MemoryError):
            return bool(self._threads)
        self._threads.append(thread)
        return True

    def _work(self, scratch: Scratch) -> None:
        while True:
            with self._condition:
                while not (self._loads or self._stores or self._is_closed or self._syncer.is_due):
                    self._condition.wait(self._syncer.wait_s)
                if self._is_closed:
                    return
                batch = self._next_batch()
                self._num_running += len(batch)
            if not batch:
                self._syncer.sync()
                continue
            completions = self._executor.run(batch, scratch)
            for operation, completion in zip(batch, completions, strict=True):
                self._syncer.ended(operation, completion)
            self._cache.close_unused()
            with self._condition:
                self._completions += completions
                self._num_running -= len(batch)
                if self._is_idle():
                    self._condition.notify_all()

    def _next_batch(self) -> list[Operation]:
        """The first operation that waits, and those behind it that continue it in the file."""
        has_turn = not self._stores or self._loads_in_a_row < MAX_LOADS_BEFORE_A_STORE
        queue = self._loads if self._loads and has_turn else self._stores
        self._loads_in_a_row = self._loads_in_a_row + 1 if queue is self._loads else 0
        batch: list[Operation] = []
        num_bytes = 0
        while queue and num_bytes < self._options.batch_bytes:
            if batch and not queue[0].continues(batch[-1]):
                break
            operation = queue.popleft()
            num_bytes += record_bytes(operation.num_bytes)
            batch.append(operation)
        return batch
