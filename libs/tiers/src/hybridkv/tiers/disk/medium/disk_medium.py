"""Medium of the disk tier: moves chunks of one rank between memory and segment files. Owns no metadata.

Writes only into segments that the index created, at slots that the index assigned. Creates, moves and deletes no files.
A load succeeds only if key, address, namespace and checksum match the stored record. `store`, `load` and `poll` only
touch queues in memory. The record queue of `hybridkv-native` moves the bytes. One thread opens files, so that a load
from an open file never waits for another file. With `Fsync.INTERVAL`, another thread syncs.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.tiers.buffers import byte_views
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Slot, Ticket
from hybridkv.tiers.disk.format.layout import LARGEST_KEY_BYTES, is_place, number_of, offset_of
from hybridkv.tiers.disk.format.segment import PAYLOAD_CHECKSUM_AT, RecordHeader, encode_record_body, verify
from hybridkv.tiers.disk.medium.segment_cache import OpenSegment, SegmentCache
from hybridkv.tiers.disk.medium.syncer import SyncThread
from hybridkv.tiers.disk.options import DiskOptions, Fsync
from hybridkv.tiers.errors import SHORTAGES, is_shortage
from hybridkv.tiers.files.directory import root_path
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.native import RecordQueue
from hybridkv.tiers.threads import BackgroundThread

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)


CLOSED = Failure(FailureReason.CLOSED, "the medium was closed")
NO_THREAD = Failure(FailureReason.BUSY, "no thread could be started")


class ShortReadError(OSError):
    """The file ends before the end of the record."""


class DiskOperation(NamedTuple):
    """One store or load."""

    ticket: Ticket
    key: Key
    address: int
    num_bytes: int
    views: list[memoryview]
    is_store: bool


class Headers:
    """Builds record headers of one rank."""

    def __init__(self, namespace: bytes, rank: int) -> None:
        self._namespace = namespace
        self._rank = rank

    def of(self, operation: DiskOperation, payload_checksum: bytes) -> RecordHeader:
        return RecordHeader(
            self._rank, operation.address, operation.num_bytes, self._namespace, payload_checksum, operation.key
        )


def failure_of(operation: DiskOperation, error: OSError | MemoryError) -> Failure:
    """Failure for an error of a system call. A shortage of this process or machine is BUSY: the stored bytes may be
    good. A load from a missing or short file is MISSING; any other error is IO."""
    where = f"segment {number_of(operation.address)}"
    if isinstance(error, (FileNotFoundError, ShortReadError)) and not operation.is_store:
        return Failure(FailureReason.MISSING, f"{where}: {error.strerror}")
    number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (errno.ENOMEM, None)
    name = errno.errorcode.get(number or 0, type(error).__name__)
    detail = f"{where}: {name}: {words or error}"
    if not is_shortage(error):
        return Failure(FailureReason.IO, detail)
    _log_shortage(name)
    return Failure(FailureReason.BUSY, detail)


@cache
def _log_shortage(name: str) -> None:
    """Log a shortage, once per process and error."""
    logger.warning(
        "this process is short of a resource (%s): the disk tier does not try some loads and stores, and keeps all "
        "stored chunks; "
        "hint: look at the limits of open files, threads and memory",
        name,
    )


def busy(num_waiting: int) -> Failure:
    return Failure(FailureReason.BUSY, f"{num_waiting} operations wait already")


class DiskMedium:
    """`TierMedium` for the slots of a `DiskIndex` of the same path and namespace, in any process.

    Args:
        path: absolute path of the store.
        namespace: digest of the fingerprint, 32 bytes.
        rank: tensor-parallel rank of the bytes.
        options: the options of the index; only `fsync` and the options below it are used.
        io: system calls that open and close files, and sync files with `Fsync.INTERVAL`. The record queue makes its own
            calls.
        clock: time in seconds, for `Fsync.INTERVAL`.

    Raises:
        TierConfigurationError: the path is not absolute.
    """

    def __init__(
        self,
        path: str,
        namespace: bytes,
        rank: int,
        options: DiskOptions,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        io = io or FileIO()
        self._cache = SegmentCache(io, root_path(path), namespace, rank, options)
        self._runner = self._make_runner(io, Headers(namespace, rank), options, clock)
        self._lock = threading.Lock()
        self._refused: list[Completion] = []

    def _make_runner(self, io: FileIO, headers: Headers, options: DiskOptions, clock: Callable[[], float]) -> Runner:
        return Runner(io, self._cache, headers, options, clock)

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        self._submit(ticket, key, slot, source, is_store=True)

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        self._submit(ticket, key, slot, destination, is_store=False)

    def poll(self) -> list[Completion]:
        with self._lock:
            refused, self._refused = self._refused, []
        return refused + self._runner.take()

    def drain(self, timeout_s: float) -> bool:
        return self._runner.wait_until_idle(timeout_s)

    def close(self) -> None:
        """Wait at most `close_timeout_s` for running operations; abandon operations that take longer."""
        self._runner.close()

    def _submit(self, ticket: Ticket, key: Key, slot: Slot, buffers: Sequence[Buffer], is_store: bool) -> None:
        try:
            views = [view for view in byte_views(buffers) if len(view)]
            failure = _move_failure(key, slot, views, is_store)
        except (TypeError, ValueError, BufferError) as error:
            failure = Failure(FailureReason.IO, f"{'source' if is_store else 'destination'}: {error}")
        if failure is None:
            failure = self._runner.submit(
                DiskOperation(ticket, key, slot.extents[0][0], slot.num_bytes, views, is_store)
            )
        if failure is not None:
            with self._lock:
                self._refused.append(Completion(ticket, failure))


def _move_failure(key: Key, slot: Slot, views: list[memoryview], is_store: bool) -> Failure | None:
    num_bytes = sum(map(len, views))
    if len(slot.extents) != 1 or slot.num_bytes <= 0:
        return Failure(FailureReason.IO, f"expected a slot of one extent with bytes, got {slot.extents}")
    if num_bytes != slot.num_bytes:
        return Failure(FailureReason.IO, f"cannot copy {num_bytes} bytes to or from a slot of {slot.num_bytes} bytes")
    if not is_store and any(view.readonly for view in views):
        return Failure(FailureReason.IO, "the destination is read-only")
    address = slot.extents[0][0]
    if not is_place(address):
        return Failure(FailureReason.IO, f"no record begins at {address}")
    if not 0 < len(key) <= LARGEST_KEY_BYTES:
        return Failure(FailureReason.IO, f"expected a key of 1 to {LARGEST_KEY_BYTES} bytes, got {len(key)}")
    return None


_PASSING = SHORTAGES | {errno.EBUSY, errno.ETIME}
"""Temporary errors of io_uring: a later start of a queue may succeed."""
_NO_CHECKSUM = bytes(16)
_DONE, _FAILED, _OTHER_HEADER, _OTHER_PAYLOAD, _CANCELLED = range(5)
"""Outcomes of an operation, as numbered by the record queue."""


class _MoveInFlight(NamedTuple):
    operation: DiskOperation
    segment: OpenSegment


class Runner:
    """Runs checked operations through the record queue. Only `wait_until_idle` and `close` block."""

    def __init__(
        self,
        io: FileIO,
        segments: SegmentCache,
        headers: Headers,
        options: DiskOptions,
        clock: Callable[[], float],
    ) -> None:
        self._cache = segments
        self._headers = headers
        self._options = options
        self._syncs = options.fsync is Fsync.ALWAYS
        self._direct = segments.direct
        self._sync_thread = SyncThread(io, segments, options, clock)
        self._condition = threading.Condition()
        self._tags = count()
        self._in_flight: dict[int, _MoveInFlight] = {}
        self._to_open: deque[DiskOperation] = deque()
        self._num_open = [0, 0]
        """Numbers of loads and of stores that have not ended."""
        self._completions: list[Completion] = []
        self._opener = BackgroundThread("hybridkv-disk-open", max_queued=0)
        self._is_closed = False
        self._has_logged_shortage = False
        self._queue = self._made_queue()
        """None if the queue got no thread or no memory. The next operation tries again."""

    def submit(self, operation: DiskOperation) -> Failure | None:
        """Start an operation, or queue it until its file is open. A failure if the operation is refused."""
        with self._condition:
            if self._is_closed:
                return CLOSED
            if self._queue is None:
                self._queue = self._made_queue()
            if self._queue is None:
                return NO_THREAD
            num_open = self._num_open[operation.is_store]
            if num_open >= self._options.max_queued + self._options.max_in_flight:
                return busy(num_open)
            segment = self._cache.acquire_open(number_of(operation.address))
            if segment is not None:
                self._start(operation, segment)
            elif not self._open_later(operation):
                return NO_THREAD
            self._num_open[operation.is_store] += 1
        return None

    def take(self) -> list[Completion]:
        """Completions since the last call."""
        with self._condition:
            self._absorb()
            completions, self._completions = self._completions, []
        return completions

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until all operations have ended. False on a timeout."""
        end_s = time.monotonic() + timeout_s
        while True:
            with self._condition:
                self._absorb()
                if not any(self._num_open):
                    return True
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                if not self._in_flight:
                    self._condition.wait(left_s)  # wait for the opener's thread
                    continue
            if self._queue is not None:
                self._queue.wait_until_idle(left_s)

    def close(self) -> None:
        """Fail operations that have not begun, with CLOSED. Wait for the other operations, and sync, at most
        `close_timeout_s`."""
        with self._condition:
            if self._is_closed:
                return
            self._is_closed = True
            for operation in self._to_open:
                self._end(operation, Completion(operation.ticket, CLOSED))
            self._to_open.clear()
            self._condition.notify_all()
        if self._queue is not None:
            self._queue.close(0.0)  # cancels operations that have not begun
        # A system call that takes longer is abandoned.
        ending = BackgroundThread("hybridkv-disk-end")
        try:
            ending.post(self._finish)
        except (RuntimeError, MemoryError):  # no thread: finish in this one
            self._finish_within(self._options.close_timeout_s)
            return
        ending.close()
        ending.wait_until_ended(self._options.close_timeout_s)

    def _finish(self) -> None:
        """Finish, in a separate thread, because each step may wait for a device."""
        while not self._finish_within(3600.0):
            pass

    def _finish_within(self, timeout_s: float) -> bool:
        """Wait for the threads, sync, and close all files. False if a thread has not ended within the timeout."""
        self._opener.close()
        if not self._opener.wait_until_ended(timeout_s):
            return False
        if self._queue is not None and not self._queue.close(timeout_s):
            return False
        with self._condition:
            self._absorb()
        self._sync_thread.close()
        self._cache.close()
        return True

    def _made_queue(self) -> RecordQueue | None:
        options = self._options
        try:
            queue = RecordQueue(options.max_in_flight, options.batch_bytes, PAYLOAD_CHECKSUM_AT)
        except (RuntimeError, MemoryError) as error:
            if not self._has_logged_shortage:
                logger.warning("the disk tier gets no thread (%s): no store and no load until a thread starts", error)
            self._has_logged_shortage = True
            return None
        if queue.uring_error in _PASSING:
            logger.warning(
                "io_uring is not available at the moment (%s): threads make the disk tier's calls until the tier is "
                "opened again; hint: look at the limits of memory, locked memory and open files",
                os.strerror(queue.uring_error),
            )
        elif queue.uring_error:
            _log_refused_uring(queue.uring_error)
        return queue

    # The caller of the following methods holds `_condition`.

    def _start(self, operation: DiskOperation, segment: OpenSegment) -> None:
        tag = next(self._tags)
        self._in_flight[tag] = _MoveInFlight(operation, segment)
        header = encode_record_body(self._headers.of(operation, _NO_CHECKSUM))
        offset = offset_of(operation.address)
        syncs = self._syncs and operation.is_store
        failure = CLOSED
        assert self._queue is not None  # `submit` has checked it
        try:
            taken = self._queue.submit(
                tag, operation.is_store, segment.fd, offset, segment.is_direct, syncs, header, operation.views
            )
        except MemoryError as error:
            taken, failure = False, failure_of(operation, error)
        except Exception as error:  # every operation must end
            logger.exception("a disk operation could not be begun")
            taken, failure = False, Failure(FailureReason.IO, f"{type(error).__name__}: {error}")
        if not taken:
            self._move_ended(tag, Completion(operation.ticket, failure))

    def _absorb(self) -> None:
        if self._queue is None:
            return
        for tag, outcome, number, checksum, page in self._queue.take():
            operation, segment = self._in_flight[tag]
            if outcome == _DONE:
                self._move_ended(tag, Completion(operation.ticket, checksum=checksum))
            elif outcome == _FAILED:
                self._failed(tag, _error(number), segment)
            else:
                self._move_ended(tag, Completion(operation.ticket, self._outcome_failure(outcome, operation, page)))

    def _failed(self, tag: int, error: OSError, segment: OpenSegment) -> None:
        operation = self._in_flight[tag].operation
        if segment.is_direct and self._direct.falls_back(error):
            if self._open_later(operation):
                del self._in_flight[tag]
                self._cache.release(segment)
            else:
                self._move_ended(tag, Completion(operation.ticket, NO_THREAD))
            return
        if not is_shortage(error):
            self._cache.forget(number_of(operation.address))
        self._move_ended(tag, Completion(operation.ticket, failure_of(operation, error)))

    def _outcome_failure(self, outcome: int, operation: DiskOperation, page: bytes) -> Failure:
        if outcome == _CANCELLED:
            return CLOSED
        if outcome == _OTHER_HEADER:
            failure, _ = verify(self._headers.of(operation, b""), page, operation.views)
            if failure is not None:
                return failure
        return Failure(FailureReason.CHECKSUM, f"the bytes of {operation.key.hex()} are not those that were stored")

    def _move_ended(self, tag: int, completion: Completion) -> None:
        operation, segment = self._in_flight.pop(tag)
        self._cache.release(segment)
        if operation.is_store and completion.failure is None:
            self._sync_thread.written(number_of(operation.address))
        self._end(operation, completion)

    def _end(self, operation: DiskOperation, completion: Completion) -> None:
        self._num_open[operation.is_store] -= 1
        self._completions.append(completion)

    def _open_later(self, operation: DiskOperation) -> bool:
        """Queue an operation until its file is open. False if the opener's thread cannot be started or was closed."""
        try:
            is_queued = self._opener.post(self._open_next)
        except (RuntimeError, MemoryError):
            return False
        if is_queued:
            self._to_open.append(operation)
        return is_queued

    # The opener's thread.

    def _open_next(self) -> None:
        with self._condition:
            if not self._to_open:  # `close` has ended these operations
                return
            operation = self._to_open.popleft()
        segment, failure = self._opened(operation)
        with self._condition:
            if segment is not None:
                self._start(operation, segment)
            else:
                self._end(operation, Completion(operation.ticket, failure))
            self._condition.notify_all()
        self._cache.close_forgotten()

    def _opened(self, operation: DiskOperation) -> tuple[OpenSegment | None, Failure | None]:
        is_direct = self._direct.is_on
        try:
            return self._cache.acquire(number_of(operation.address)), None
        except OSError as error:
            if is_direct and self._direct.falls_back(error):
                return self._opened(operation)
            return None, failure_of(operation, error)
        except MemoryError as error:
            return None, failure_of(operation, error)
        except Exception as error:  # this thread must not end
            logger.exception("a segment could not be opened")
            return None, Failure(FailureReason.IO, f"{type(error).__name__}: {error}")


@cache
def _log_refused_uring(number: int) -> None:
    """Log that the kernel refuses io_uring, once per process and error."""
    logger.info("the kernel refuses io_uring (%s): the disk tier's calls are made by threads", os.strerror(number))


def _error(number: int) -> OSError:
    if number == errno.ENODATA:
        return ShortReadError(number, "the file ends before the record does")
    return OSError(number, os.strerror(number))
