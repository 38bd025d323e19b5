"""Disk medium that moves bytes in Python, on threads: tests can make any of its system calls fail."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

from hybridkv.tiers.contract import Completion, Failure, FailureReason
from hybridkv.tiers.disk import DiskMedium, DiskOptions, FileIO, Fsync
from hybridkv.tiers.disk.format.layout import checksum_of, number_of, offset_of, record_bytes
from hybridkv.tiers.disk.format.segment import encode_record, verify
from hybridkv.tiers.disk.medium.disk_medium import (
    CLOSED,
    NO_THREAD,
    DiskOperation,
    Headers,
    busy,
    failure_of,
)
from hybridkv.tiers.disk.medium.segment_cache import OpenSegment, SegmentCache
from hybridkv.tiers.disk.medium.syncer import Syncer
from hybridkv.tiers.errors import is_shortage
from kits.record_io import FilePosition, RecordReader, RecordWriter, Scratch

logger = logging.getLogger(__name__)

MAX_LOADS_BEFORE_A_STORE = 8
"""A waiting store is overtaken by no more loads."""


class PlainDiskMedium(DiskMedium):
    """Makes every system call through `io`."""

    def _make_runner(  # type: ignore[override]
        self, io: FileIO, headers: Headers, options: DiskOptions, clock: Callable[[], float]
    ) -> PlainRunner:
        return PlainRunner(io, self._cache, headers, options, clock)


class PlainRunner:
    """Has the members of `Runner`. Loads go before stores, and adjacent records are moved together."""

    def __init__(
        self, io: FileIO, cache: SegmentCache, headers: Headers, options: DiskOptions, clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._cache = cache
        self._executor = RecordExecutor(io, cache, headers, options)
        self._syncer = Syncer(io, cache, options, clock)
        self._condition = threading.Condition()
        self._loads: deque[DiskOperation] = deque()
        self._stores: deque[DiskOperation] = deque()
        self._loads_in_a_row = 0
        self._num_running = 0
        self._completions: list[Completion] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, operation: DiskOperation) -> Failure | None:
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
        # A thread that a device holds longer is abandoned.
        ending = threading.Thread(target=self._end, name="hybridkv-disk-end", daemon=True)
        try:
            ending.start()
        except (RuntimeError, MemoryError):  # no other thread can start: do as much as possible in this one
            self._end(self._options.close_timeout_s)
            return
        ending.join(self._options.close_timeout_s)

    def _end(self, timeout_s: float | None = None) -> None:
        """Runs in a thread of its own, since each step may wait for a device."""
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                return
        self._syncer.sync()
        self._cache.close()

    def _is_idle(self) -> bool:
        return not (self._loads or self._stores or self._num_running)

    def _start_thread(self) -> bool:
        """False if there is no thread at all: the process can start none, or has no memory for it."""
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
                if operation.is_store and completion.failure is None:
                    self._syncer.written(number_of(operation.address))
            self._cache.close_forgotten()
            with self._condition:
                self._completions += completions
                self._num_running -= len(batch)
                if self._is_idle():
                    self._condition.notify_all()

    def _next_batch(self) -> list[DiskOperation]:
        """The first waiting operation, and the following ones that continue it in the file."""
        has_turn = not self._stores or self._loads_in_a_row < MAX_LOADS_BEFORE_A_STORE
        queue = self._loads if self._loads and has_turn else self._stores
        self._loads_in_a_row = self._loads_in_a_row + 1 if queue is self._loads else 0
        batch: list[DiskOperation] = []
        num_bytes = 0
        while queue and num_bytes < self._options.batch_bytes:
            if batch and not _continues(queue[0], batch[-1]):
                break
            operation = queue.popleft()
            num_bytes += record_bytes(operation.num_bytes)
            batch.append(operation)
        return batch


def _continues(operation: DiskOperation, before: DiskOperation) -> bool:
    """Whether a record begins where the other one ends, in the same segment."""
    follows = operation.address == before.address + record_bytes(before.num_bytes)
    return follows and number_of(operation.address) == number_of(before.address)


class RecordExecutor:
    """Executes a run of adjacent stores or loads in one segment. Shared by all threads of a medium."""

    def __init__(self, io: FileIO, cache: SegmentCache, headers: Headers, options: DiskOptions) -> None:
        self._io = io
        self._cache = cache
        self._headers = headers
        self._batch_bytes = options.batch_bytes
        self._syncs = options.fsync is Fsync.ALWAYS
        self._direct = cache.direct
        self._lock = threading.Lock()
        self._shared_syncs: WeakKeyDictionary[OpenSegment, SharedSync] = WeakKeyDictionary()

    def run(self, batch: list[DiskOperation], scratch: Scratch) -> list[Completion]:
        """One completion for each operation of a run that is all stores or all loads."""
        is_direct = self._direct.is_on
        try:
            if batch[0].is_store:
                return self._store(batch, scratch)
            return self._load(batch, scratch)
        except OSError as error:
            if is_direct and self._direct.falls_back(error):
                return self.run(batch, scratch)
            if len(batch) > 1:  # one bad record must not fail its neighbours
                return [completion for operation in batch for completion in self.run([operation], scratch)]
            if not is_shortage(error):
                self._cache.forget(number_of(batch[0].address))
            return [Completion(batch[0].ticket, failure_of(batch[0], error))]
        except MemoryError as error:
            return [Completion(operation.ticket, failure_of(operation, error)) for operation in batch]
        except Exception as error:  # without this thread the operations would never complete
            logger.exception("a disk operation could not be carried out")
            failure = Failure(FailureReason.IO, f"{type(error).__name__}: {error}")
            return [Completion(operation.ticket, failure) for operation in batch]

    def _store(self, batch: list[DiskOperation], scratch: Scratch) -> list[Completion]:
        first = batch[0]
        completions = []
        with self._cache.opened(number_of(first.address)) as segment:
            with self._lock:
                shared = self._shared_syncs.setdefault(segment, SharedSync())
            num_failed = shared.num_failed
            position = FilePosition(self._io, segment.fd, offset_of(first.address), segment.is_direct)
            writer = RecordWriter(position, scratch, self._batch_bytes)
            for operation in batch:
                payload_checksum = checksum_of(operation.views)
                writer.add(encode_record(self._headers.of(operation, payload_checksum)), operation.views)
                completions.append(Completion(operation.ticket, checksum=payload_checksum))
            writer.flush()
            if self._syncs:
                shared.sync(partial(self._io.fdatasync, segment.fd), num_failed)
        return completions

    def _load(self, batch: list[DiskOperation], scratch: Scratch) -> list[Completion]:
        first = batch[0]
        with self._cache.opened(number_of(first.address)) as segment:
            position = FilePosition(self._io, segment.fd, offset_of(first.address), segment.is_direct)
            reader = RecordReader(position, scratch, self._batch_bytes)
            for operation in batch:
                reader.add(operation.views)
            reader.flush()
        return [self._verified(operation, page) for operation, page in zip(batch, reader.headers, strict=True)]

    def _verified(self, operation: DiskOperation, page: bytes) -> Completion:
        expected = self._headers.of(operation, b"")
        failure, payload_checksum = verify(expected, page, operation.views)
        return Completion(operation.ticket, failure, payload_checksum)


class SharedSync:
    """Syncs of one descriptor, shared by the threads that write to it. Any thread may use it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_running = False
        self._num_begun = 0
        self._num_ended = 0
        self._error_number = 0
        self.num_failed = 0
        """Writers read it before they write."""

    def sync(self, call: Callable[[], None], num_failed: int) -> None:
        """Returns once all that this thread wrote is on the device. Runs `call` if no other thread syncs.

        `OSError` also if a sync has failed since the caller read `num_failed` before its write.
        """
        if self._is_mine():
            self._run(call)
        with self._condition:
            if self.num_failed != num_failed:
                raise OSError(self._error_number, os.strerror(self._error_number))

    def _is_mine(self) -> bool:
        """Waits for the first sync that begins from now on. Returns whether this thread must run it."""
        with self._condition:
            wanted = self._num_begun + 1
            self._condition.wait_for(lambda: self._num_ended >= wanted or not self._is_running)
            if self._num_ended >= wanted:
                return False
            self._is_running = True
            self._num_begun += 1
            return True

    def _run(self, call: Callable[[], None]) -> None:
        error_number = errno.EIO  # also for any other exception
        try:
            call()
            error_number = 0
        except OSError as error:
            error_number = error.errno or error_number
        finally:
            with self._condition:
                self._is_running = False
                self._num_ended += 1
                if error_number:
                    self.num_failed += 1
                    self._error_number = error_number
                self._condition.notify_all()
