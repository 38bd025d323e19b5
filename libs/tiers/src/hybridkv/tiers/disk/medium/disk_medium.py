"""Moves chunks of one rank between memory and its segment files. Owns no metadata.

It writes only into segments that the index made and slots that the index gave out, and creates, moves and deletes
nothing. Every byte that it reads is checked against the key, the place, the namespace and the checksum it was stored
with before a load succeeds. `store`, `load` and `poll` only touch queues in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybridkv.tiers.buffers import byte_views
from hybridkv.tiers.contract import Completion, Failure, FailureReason, Key, Slot, Ticket
from hybridkv.tiers.disk.format.layout import LARGEST_KEY_BYTES, is_place
from hybridkv.tiers.disk.medium.operations import Headers, Operation
from hybridkv.tiers.disk.medium.runner import Runner
from hybridkv.tiers.disk.medium.segment_cache import SegmentCache
from hybridkv.tiers.disk.options import DiskOptions
from hybridkv.tiers.files.directory import root_path
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.native import RecordQueue

if TYPE_CHECKING:
    from typing_extensions import Buffer


class DiskMedium:
    """A `TierMedium` for the slots of a `DiskIndex` of the same path, namespace and options, in any process.

    Args:
        path: of the store.
        namespace: the fingerprint's digest, 32 bytes.
        rank: whose bytes these are.
        options: the index's.
        io: calls that open, close and sync files; reads and writes are the record queue's own.
        clock: seconds, for the interval of `Fsync.INTERVAL`.

    Raises:
        TierConfigurationError: the path is no absolute one.
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
        self._cache = SegmentCache(io, root_path(path), namespace, rank, options.max_open_files)
        self._runner = self._make_runner(io, Headers(namespace, rank), options, clock)
        self._lock = threading.Lock()
        self._refused: list[Completion] = []

    def _make_runner(self, io: FileIO, headers: Headers, options: DiskOptions, clock: Callable[[], float]) -> Runner:
        return Runner(RecordQueue, io, self._cache, headers, options, clock)

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
        """Waits for what is being moved at most `close_timeout_s`; what a device holds longer is left."""
        self._runner.close()

    def _submit(self, ticket: Ticket, key: Key, slot: Slot, buffers: Sequence[Buffer], is_store: bool) -> None:
        try:
            views = [view for view in byte_views(buffers) if len(view)]
            failure = _why_not_move(key, slot, views, is_store)
        except (TypeError, ValueError, BufferError) as error:
            failure = Failure(FailureReason.IO, f"{'source' if is_store else 'destination'}: {error}")
        if failure is None:
            failure = self._runner.submit(Operation(ticket, key, slot.extents[0][0], slot.num_bytes, views, is_store))
        if failure is not None:
            with self._lock:
                self._refused.append(Completion(ticket, failure))


def _why_not_move(key: Key, slot: Slot, views: list[memoryview], is_store: bool) -> Failure | None:
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
