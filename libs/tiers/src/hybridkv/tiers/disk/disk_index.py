"""Index of the disk tier: decides which chunks stay on disk, and where. Only the index creates files and owns metadata.

Evicts the least recently used record first, but not before the records that extend it. Exception: to free a segment,
compaction may evict records of this segment in any order. A restart keeps the LRU order, but not the links between
records: `touch` sets the links of a request's records again. Evictions take effect in memory at once; the janitor
changes files later. With a `ThreadJanitor`, only the constructor, `clear`, `drain` and `close` wait for a device, the
last three for a bounded time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hybridkv.hashing import Fingerprint
from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import Changes
from hybridkv.tiers.contract import (
    UNSPECIFIED,
    Extends,
    FailureReason,
    Key,
    NewChunk,
    Refusal,
    Slot,
    SyncLookups,
    TierCounts,
)
from hybridkv.tiers.disk.counts import DiskCounts
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.format.layout import LARGEST_KEY_BYTES
from hybridkv.tiers.disk.index.records import cost_of
from hybridkv.tiers.disk.maintenance.janitor import ThreadJanitor
from hybridkv.tiers.disk.maintenance.maintenance import Maintenance
from hybridkv.tiers.disk.options import DiskOptions, Fsync, plan_sizes
from hybridkv.tiers.disk.recovery.builder import build_store
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.ledger import KeyState

logger = logging.getLogger(__name__)


_SNAPSHOT_SHARE = 0.8
"""Share of `close_timeout_s` for the last snapshot and all earlier file work."""


class DiskIndex(SyncLookups):
    """`TierIndex` over segment files of all ranks of one engine.

    Args:
        path: absolute path of the store. The index creates the directory; its parent must exist.
        fingerprint: fingerprint of the cache. Bytes stored under another fingerprint are never read.
        options: see `DiskOptions`.
        janitor: runs file work; None: a `ThreadJanitor`. `close` closes the janitor.
        io: system calls.
        clock: time in seconds, for intervals.

    Raises:
        TierConfigurationError: the options do not fit together; or there is no memory for `max_records`; or the path
            cannot be used or is not this user's own; or an engine has this cache open already.
        RuntimeError, MemoryError: no thread for the `ThreadJanitor`.
    """

    def __init__(
        self,
        path: str,
        fingerprint: Fingerprint,
        options: DiskOptions,
        janitor: ThreadJanitor | None = None,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._sizes = plan_sizes(options, fingerprint.tensor_parallel_size)
        self._namespace = Namespace(io or FileIO(), path, fingerprint, options.fsync is not Fsync.NONE)
        state, chores = build_store(self._namespace, fingerprint, options, self._sizes, clock)
        self._segments, self._records = state.segments, state.records
        self._journal = chores.journal
        try:
            self._janitor = janitor or ThreadJanitor()
        except BaseException:
            self._namespace.close()
            raise
        self._maintenance = Maintenance(state, chores, self._janitor)
        self._maintenance.run()

    @property
    def namespace(self) -> bytes:
        """Digest of the fingerprint; an argument of each `DiskMedium`."""
        return self._namespace.digest

    @property
    def capacity_bytes(self) -> int:
        """Bytes for records of one rank, with headers. Less than the rank's share of `DiskOptions.capacity_bytes`."""
        return self._sizes.usable_bytes

    @property
    def used_bytes(self) -> int:
        return self._records.used_bytes

    def cost(self, num_bytes: int) -> int:
        """Size of the record: header and payload, in whole pages."""
        return cost_of(num_bytes)

    @property
    def num_keys(self) -> int:
        return self._records.num_keys

    @property
    def generation(self) -> int:
        return self._records.generation

    def lacks(self, key: Key) -> bool:
        return self._records.lacks(key)

    def lookup(self, key: Key) -> LookupResult:
        return self._records.lookup(key)

    def leading(self, keys: Iterable[Key]) -> int:
        return self._records.leading(keys)

    def last_held(self, keys: Sequence[Key]) -> int | None:
        return self._records.last_held(keys)

    def any_pending(self, keys: Iterable[Key]) -> bool:
        return self._records.any_pending(keys)

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        self._records.touch(keys, extends)
        self._maintenance.schedule_changes()

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        """See the contract. If no segment has room: BUSY if running or due file work may make room (creates, deletes or
        empties a segment); else NO_ROOM, for example if the file system is full or every segment has a reader. Even if
        the reservation is refused, compaction may evict records now.
        """
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        if not 0 < len(key) <= LARGEST_KEY_BYTES:
            raise TierProtocolError(f"reserve: expected a key of 1 to {LARGEST_KEY_BYTES} bytes, got {len(key)}")
        self._maintenance.collect()
        cost, records = cost_of(num_bytes), self._records
        refusal = records.reserve_refusal(key, cost, extends)
        if refusal is None and not self._segments.has_room(cost, may_take_last=False):
            self._maintenance.run()
            if not self._segments.has_room(cost, may_take_last=False):
                refusal = Refusal.BUSY if self._maintenance.makes_room else Refusal.NO_ROOM
        if refusal is not None:
            return records.count_refusal(refusal)
        records.make_room(cost, extends=extends)
        slot = records.reserve(key, num_bytes, cost, extends)
        self._maintenance.run_if_needed()
        return slot

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        return [self.reserve(*chunk) for chunk in chunks]

    def commit(self, key: Key) -> bool:
        is_committed = self._records.commit(key)
        self._maintenance.run_if_needed()
        return is_committed

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        record = self._records.find(key)
        self._records.abort(key)
        if record is not None:
            self._journal.withdraw(record)
            self._maintenance.schedule_missing_file_check()
        self._maintenance.run()

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        """Quarantine the present record of this key: not offered any more, and not after a restart if the journal is on
        disk (see `drain`) and holds the record (see `max_quarantined`).

        `reason` is a text for the counts, for example a `FailureReason`.
        """
        self._maintenance.collect()
        is_withdrawn = self._journal.quarantine(key, str(reason))
        if reason == FailureReason.MISSING:
            self._maintenance.schedule_missing_file_check()
        self._maintenance.run()
        return is_withdrawn

    def pin(self, key: Key) -> Slot | None:
        self._maintenance.collect()
        return self._records.pin(key)

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self._maintenance.collect()
        return self._records.pin_all(keys)

    def unpin(self, key: Key) -> None:
        self._records.unpin(key)
        self._maintenance.run_if_needed()

    def unpin_all(self, keys: Iterable[Key]) -> None:
        self._records.unpin_all(keys)
        self._maintenance.run_if_needed()

    def clear(self) -> int:
        """Delete every key, also for restarts: begins a new epoch. Waits at most `close_timeout_s` until the epoch is
        on disk, and logs a warning if that takes longer."""
        self._maintenance.collect()
        num_withdrawn = self._records.forget_all()
        if not self._records.is_closed:
            written = threading.Event()
            if self._maintenance.start_epoch(written.set):
                written.wait(self._options.close_timeout_s)
            self._maintenance.collect()
            if self._maintenance.has_unwritten_epoch:
                logger.warning(
                    "clear is not on disk yet in %s; until it is, nothing is stored, and a crash would undo it",
                    self._namespace.root.path,
                )
        self._maintenance.run()
        return num_withdrawn

    def take_counts(self) -> TierCounts:
        self._maintenance.run()
        return self._records.take_counts()

    def watch(self) -> None:
        self._records.watch()

    def take_changes(self) -> Changes:
        self._maintenance.collect()
        return self._records.take_changes()

    def take_disk_counts(self) -> DiskCounts:
        """Counts that only a disk tier has, since the last call."""
        self._maintenance.run()
        return self._maintenance.state.tally.take()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all due file work has ended. False on a timeout. Failed work is due again later.

        If all work succeeded, a restart does not offer invalidated or aborted records, even after a crash of the
        process. Exceptions are records that the journal has dropped (see `max_quarantined`).
        """
        return self._maintenance.drain(timeout_s)

    def close(self) -> None:
        """Stop: offer no chunk and refuse reservations. Committed records remain for the next start.

        Waits for file work at most `close_timeout_s`. `unpin`, `commit` and `abort` still work.
        """
        if self._records.is_closed:
            return
        self._records.close()
        self._maintenance.collect()
        for record in self._records.reserved():
            # A medium may have written the record without a polled completion. The next start reads and checks such
            # records, and would offer a deleted one.
            if record.state is KeyState.DELETED_WHILE_WRITTEN:
                self._journal.withdraw(record)
        self._maintenance.finish()
        is_written = threading.Event()
        self._janitor.submit(is_written.set)
        self._records.forget_all()
        is_done = self._end_work() or is_written.is_set()
        self._maintenance.stop()
        self._maintenance.collect()
        if self._maintenance.has_unwritten_epoch:
            logger.warning(
                "the last clear of %s could not be written; the next start may offer chunks from before the clear",
                self._namespace.root.path,
            )
        if is_done or not self._janitor.run_at_end(self._namespace.close):
            self._namespace.close()
        else:
            logger.warning("file work did not end in time: %s stays locked until it ends", self._namespace.path)

    def _end_work(self) -> bool:
        """Close the janitor. True if its tasks ended in time. Cancels a snapshot that takes too long: the previous
        snapshot and its file of changes together have the same content."""
        timeout_s = self._options.close_timeout_s
        if self._janitor.close(_SNAPSHOT_SHARE * timeout_s):
            return True
        logger.info("%s: no time for a snapshot; the next start reads the file of changes", self._namespace.path)
        self._maintenance.cancel_snapshot()
        return self._janitor.close((1 - _SNAPSHOT_SHARE) * timeout_s)
