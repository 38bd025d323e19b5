"""Moves chunks of one rank between memory and its segment files, on a few threads. Owns no metadata.

It writes only into segments that the index made and slots that the index gave out, and creates, moves and deletes
nothing. Every byte that it reads is checked against the key, the place, the namespace and the checksum it was stored
with before a load succeeds. `store`, `load` and `poll` only touch queues in memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybridkv.tiers.buffers import byte_views
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Slot, Ticket
from hybridkv.tiers.disk.file_io import FileIO
from hybridkv.tiers.disk.layout import LARGEST_KEY_BYTES, PAGE_BYTES, number_of, offset_of, record_bytes
from hybridkv.tiers.disk.operations import Operation, RecordMover
from hybridkv.tiers.disk.options import DiskOptions
from hybridkv.tiers.disk.record_io import Scratch
from hybridkv.tiers.disk.segment_cache import SegmentCache
from hybridkv.tiers.disk.syncer import Syncer

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_LOADS_BEFORE_A_STORE = 8
"""Somebody waits for a load and nobody for a store, but a store does not wait for ever."""


class DiskMedium:
    """A `TierMedium` for the slots of a `DiskIndex` of the same path, namespace and options, in any process.

    Args:
        path: of the store.
        namespace: the fingerprint's digest, 32 bytes.
        rank: whose bytes these are.
        options: the index's.
        io: calls of the operating system.
        clock: seconds, for the interval of `Fsync.INTERVAL`.
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
        self._options = options
        self._cache = SegmentCache(io, path, namespace, rank, options.max_open_files)
        self._mover = RecordMover(io, self._cache, namespace, rank, options)
        self._syncer = Syncer(io, self._cache, options, clock, self._mover)
        self._condition = threading.Condition()
        self._loads: deque[Operation] = deque()
        self._stores: deque[Operation] = deque()
        self._loads_in_a_row = 0
        self._num_running = 0
        self._completions: list[Completion] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        self._submit(ticket, key, slot, source, is_store=True)

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        self._submit(ticket, key, slot, destination, is_store=False)

    def poll(self) -> list[Completion]:
        with self._condition:
            completions, self._completions = self._completions, []
        return completions

    def drain(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(self._is_idle, timeout_s)

    def close(self) -> None:
        """Waits for what is being moved at most `close_timeout_s`; a thread that a device holds longer is left."""
        with self._condition:
            if self._is_closed:
                return
            self._is_closed = True
            for operation in (*self._loads, *self._stores):
                self._completions.append(Completion(operation.ticket, _CLOSED))
            self._loads.clear()
            self._stores.clear()
            self._condition.notify_all()
        ending = threading.Thread(target=self._end, name="hybridkv-disk-end", daemon=True)
        ending.start()
        ending.join(self._options.close_timeout_s)

    def _end(self) -> None:
        """In a thread of its own: any of it may wait for a device."""
        for thread in self._threads:
            thread.join()
        self._syncer.sync()
        self._cache.close()

    def _is_idle(self) -> bool:
        return not (self._loads or self._stores or self._num_running)

    def _submit(self, ticket: Ticket, key: Key, slot: Slot, buffers: Sequence[Buffer], is_store: bool) -> None:
        failure: Failure | None = None
        views: list[memoryview] = []
        try:
            views = [view for view in byte_views(buffers) if len(view)]
            failure = _why_not_move(key, slot, views, is_store)
        except (TypeError, ValueError, BufferError) as error:
            failure = Failure(FailureReason.IO, f"{'source' if is_store else 'destination'}: {error}")
        with self._condition:
            if self._is_closed:
                failure = _CLOSED
            queue = self._stores if is_store else self._loads
            if failure is None and len(queue) >= self._options.max_queued:
                failure = Failure(FailureReason.BUSY, f"{len(queue)} operations wait already")
            if failure is not None:
                self._completions.append(Completion(ticket, failure))
                return
            if len(self._threads) < self._options.threads and not self._start_thread():
                self._completions.append(Completion(ticket, _NO_THREAD))
                return
            queue.append(Operation(ticket, key, slot.extents[0][0], slot.num_bytes, views, is_store))
            self._condition.notify()

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
            completions = self._mover.move(batch, scratch)
            self._syncer.wrote(batch, completions)
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


_NO_THREAD = Failure(FailureReason.IO, "no thread could be started")
_CLOSED = Failure(FailureReason.CLOSED, "the medium was closed")


def _why_not_move(key: Key, slot: Slot, views: list[memoryview], is_store: bool) -> Failure | None:
    num_bytes = sum(map(len, views))
    if len(slot.extents) != 1 or slot.num_bytes <= 0:
        return Failure(FailureReason.IO, f"expected a slot of one extent with bytes, got {slot.extents}")
    if num_bytes != slot.num_bytes:
        return Failure(FailureReason.IO, f"cannot copy {num_bytes} bytes to or from a slot of {slot.num_bytes} bytes")
    if not is_store and any(view.readonly for view in views):
        return Failure(FailureReason.IO, "the destination is read-only")
    address = slot.extents[0][0]
    if address < 0 or number_of(address) > 1 << 31 or offset_of(address) % PAGE_BYTES:
        return Failure(FailureReason.IO, f"no record begins at {address}")
    if not 0 < len(key) <= LARGEST_KEY_BYTES:
        return Failure(FailureReason.IO, f"expected a key of 1 to {LARGEST_KEY_BYTES} bytes, got {len(key)}")
    return None
