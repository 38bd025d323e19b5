"""Carries out a medium's operations by the record queue of `hybridkv-native`.

Python has only to say what is wanted and to take what has come. It opens files on a thread of its own, so that nobody
who wants a file that is open waits for one that is not; another one syncs, where the options ask for it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import NamedTuple

from hybridkv.tiers.contract import Completion, Failure, FailureReason
from hybridkv.tiers.disk.files.record_io import ShortReadError
from hybridkv.tiers.disk.format.layout import number_of, offset_of
from hybridkv.tiers.disk.format.record import PAYLOAD_CHECKSUM_AT, encode_record_body, verify
from hybridkv.tiers.disk.medium.operations import CLOSED, NO_THREAD, DirectMode, Headers, Operation, busy, failure_of
from hybridkv.tiers.disk.medium.segment_cache import OpenSegment, SegmentCache
from hybridkv.tiers.disk.medium.syncer import SyncThread
from hybridkv.tiers.disk.options import DiskOptions, Fsync
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.native import RecordQueue
from hybridkv.tiers.shortage import SHORTAGES, is_shortage

logger = logging.getLogger(__name__)

_PASSING = SHORTAGES | {errno.EBUSY, errno.ETIME}
"""What the kernel says to who asks for io_uring at a bad time, and may not say at the next opening."""
_NO_CHECKSUM = bytes(16)
_DONE, _FAILED, _OTHER_HEADER, _OTHER_PAYLOAD, _CANCELLED = range(5)
"""Outcomes of a record, as the queue numbers them."""


class _InFlight(NamedTuple):
    operation: Operation
    segment: OpenSegment


class Runner:
    """Carries out operations that were looked over. Only `wait_until_idle` and `close` take time.

    Args:
        make_queue: of calls in flight, bytes of a batch, and the place of a payload's checksum in a header.
    """

    def __init__(
        self,
        make_queue: Callable[[int, int, int], RecordQueue],
        io: FileIO,
        segments: SegmentCache,
        headers: Headers,
        options: DiskOptions,
        clock: Callable[[], float],
    ) -> None:
        self._make_queue = make_queue
        self._cache = segments
        self._headers = headers
        self._options = options
        self._syncs = options.fsync is Fsync.ALWAYS
        self._direct = DirectMode(options.direct)
        self._syncing = SyncThread(io, segments, options, clock, self._direct)
        self._condition = threading.Condition()
        self._tags = count()
        self._in_flight: dict[int, _InFlight] = {}
        self._to_open: deque[Operation] = deque()
        self._num_opening = 0
        self._num_open = [0, 0]
        """Loads and stores that have not ended."""
        self._completions: list[Completion] = []
        self._opener: threading.Thread | None = None
        self._is_closed = False
        self._is_short = False
        self._queue = self._made_queue()
        """None: the system had no thread for it, and is asked again when there is something to do."""

    def submit(self, operation: Operation) -> Failure | None:
        """Why it was not taken, None if it was."""
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
            segment = self._cache.acquire_open(number_of(operation.address), self._direct.is_on)
            if segment is not None:
                self._start(operation, segment)
            elif not self._open_later(operation):
                return NO_THREAD
            self._num_open[operation.is_store] += 1
        return None

    def take(self) -> list[Completion]:
        """How operations ended, each once."""
        with self._condition:
            self._absorb()
            completions, self._completions = self._completions, []
        return completions

    def wait_until_idle(self, timeout_s: float) -> bool:
        """False when one of them has not ended by then."""
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
                    self._condition.wait(left_s)  # for the opener
                    continue
            if self._queue is not None:
                self._queue.wait_until_idle(left_s)

    def close(self) -> None:
        """Fail what was not begun with CLOSED; wait for the rest, and sync, for no longer than the options say."""
        with self._condition:
            if self._is_closed:
                return
            self._is_closed = True
            for operation in self._to_open:
                self._end(operation, Completion(operation.ticket, CLOSED))
            self._to_open.clear()
            self._condition.notify_all()
        if self._queue is not None:
            self._queue.close(0.0)  # whatever was not begun is cancelled now
        # A call that a device holds longer is left.
        ending = threading.Thread(target=self._finish, name="hybridkv-disk-end", daemon=True)
        try:
            ending.start()
        except (RuntimeError, MemoryError):  # there is no other thread: as far as it goes in this one
            self._finish_within(self._options.close_timeout_s)
            return
        ending.join(self._options.close_timeout_s)

    def _finish(self) -> None:
        """In a thread of its own: any of it may wait for a device."""
        while not self._finish_within(3600.0):
            pass

    def _finish_within(self, timeout_s: float) -> bool:
        """False when a thread has not ended by then."""
        if self._opener is not None:
            self._opener.join(timeout_s)
            if self._opener.is_alive():
                return False
        if self._queue is not None and not self._queue.close(timeout_s):
            return False
        with self._condition:
            self._absorb()
        self._syncing.close()
        self._cache.close()
        return True

    def _made_queue(self) -> RecordQueue | None:
        options = self._options
        try:
            queue = self._make_queue(options.max_in_flight, options.batch_bytes, PAYLOAD_CHECKSUM_AT)
        except (RuntimeError, MemoryError) as error:
            if not self._is_short:
                logger.warning("the disk tier gets no thread (%s): it stores and loads nothing until it does", error)
            self._is_short = True
            return None
        if queue.uring_error in _PASSING:
            logger.warning(
                "io_uring is not to be had at the moment (%s): the disk tier's calls are made by threads until it is "
                "opened again; hint: look at the limits of memory, locked memory and open files",
                os.strerror(queue.uring_error),
            )
        elif queue.uring_error:
            _say_why_threads(queue.uring_error)
        return queue

    # What follows is called with the condition held.

    def _start(self, operation: Operation, segment: OpenSegment) -> None:
        tag = next(self._tags)
        self._in_flight[tag] = _InFlight(operation, segment)
        header = encode_record_body(self._headers.of(operation, _NO_CHECKSUM))
        offset = offset_of(operation.address)
        syncs = self._syncs and operation.is_store
        failure = CLOSED
        assert self._queue is not None  # `submit` looked
        try:
            taken = self._queue.submit(
                tag, operation.is_store, segment.fd, offset, segment.is_direct, syncs, header, operation.views
            )
        except MemoryError as error:
            taken, failure = False, failure_of(operation, error)
        except Exception as error:  # an operation without an end would leave everybody waiting
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
                self._move_ended(tag, Completion(operation.ticket, self._why_not(outcome, operation, page)))

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

    def _why_not(self, outcome: int, operation: Operation, page: bytes) -> Failure:
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
        self._syncing.ended(operation, completion)
        self._end(operation, completion)

    def _end(self, operation: Operation, completion: Completion) -> None:
        self._num_open[operation.is_store] -= 1
        self._completions.append(completion)

    def _open_later(self, operation: Operation) -> bool:
        """False when there is no thread that could open its file."""
        if self._opener is None:
            opener = threading.Thread(target=self._open_files, name="hybridkv-disk-open", daemon=True)
            try:
                opener.start()
            except (RuntimeError, MemoryError):
                return False
            self._opener = opener
        self._to_open.append(operation)
        self._condition.notify_all()
        return True

    # The opener.

    def _open_files(self) -> None:
        while True:
            with self._condition:
                while not self._to_open:
                    if self._is_closed:
                        return
                    self._condition.wait()
                operation = self._to_open.popleft()
            segment, failure = self._opened(operation)
            with self._condition:
                if segment is not None:
                    self._start(operation, segment)
                else:
                    self._end(operation, Completion(operation.ticket, failure))
                self._condition.notify_all()
            self._cache.close_unused()

    def _opened(self, operation: Operation) -> tuple[OpenSegment | None, Failure | None]:
        is_direct = self._direct.is_on
        try:
            return self._cache.acquire(number_of(operation.address), is_direct), None
        except OSError as error:
            if is_direct and self._direct.falls_back(error):
                return self._opened(operation)
            return None, failure_of(operation, error)
        except MemoryError as error:
            return None, failure_of(operation, error)
        except Exception as error:  # a thread that ends would leave everybody waiting
            logger.exception("a segment could not be opened")
            return None, Failure(FailureReason.IO, f"{type(error).__name__}: {error}")


@cache
def _say_why_threads(number: int) -> None:
    """Once in a process."""
    logger.info("the kernel refuses io_uring (%s): the disk tier's calls are made by threads", os.strerror(number))


def _error(number: int) -> OSError:
    if number == errno.ENODATA:
        return ShortReadError(number, "the file ends before the record does")
    return OSError(number, os.strerror(number))
