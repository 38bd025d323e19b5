"""Decides which chunks stay on disk, and where. The only owner of metadata, and the only one that makes files.

Records are kept by least recent use, each by itself: of the groups of a prefix the ones that were used stay. What is
evicted is decided here and now, in memory; files follow on the janitor. Nothing waits for a device, but for the
constructor, `clear` and `close`, and those with a bound (the constructor's is the device's own).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hybridkv.hashing import Fingerprint
from hybridkv.planner import LookupResult
from hybridkv.tiers.at_once import AnswersAtOnce
from hybridkv.tiers.changes import Changes
from hybridkv.tiers.contract import UNSPECIFIED, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.disk.counts import DiskCounts
from hybridkv.tiers.disk.files.namespace import Namespace
from hybridkv.tiers.disk.format.layout import LARGEST_KEY_BYTES
from hybridkv.tiers.disk.index.records import cost_of
from hybridkv.tiers.disk.maintenance.janitor import Janitor, ThreadJanitor
from hybridkv.tiers.disk.maintenance.maintenance import Upkeep
from hybridkv.tiers.disk.options import DiskOptions, Fsync, plan_sizes
from hybridkv.tiers.disk.recovery.builder import open_store
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.ledger import KeyState

logger = logging.getLogger(__name__)


_SNAPSHOT_SHARE = 0.8
"""Of `close_timeout_s`, which the last snapshot may take with all that comes before it."""


class DiskIndex(AnswersAtOnce):
    """A `TierIndex` over segment files of all ranks of one engine.

    Args:
        path: of the store, absolute. Made if it is not there; its parent must be.
        fingerprint: of the cache; what was stored under another one is never read.
        options: see `DiskOptions`.
        janitor: where file work runs; None: on a thread of its own. Closed by `close`.
        io: calls of the operating system.
        clock: seconds, for intervals.

    Raises:
        TierConfigurationError: the options do not fit together, the path cannot be used or is not this user's own, or
            another process has this cache open.
    """

    def __init__(
        self,
        path: str,
        fingerprint: Fingerprint,
        options: DiskOptions,
        janitor: Janitor | None = None,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._sizes = plan_sizes(options, fingerprint.tensor_parallel_size)
        self._namespace = Namespace(io or FileIO(), path, fingerprint, options.fsync is not Fsync.NONE)
        state, agenda = open_store(self._namespace, fingerprint, options, self._sizes, clock)
        self._segments, self._records = state.segments, state.records
        self._journal = agenda.journal
        self._janitor = janitor or ThreadJanitor()
        self._upkeep = Upkeep(state, agenda, self._janitor)
        self._upkeep.run()

    @property
    def namespace(self) -> bytes:
        """The fingerprint's digest: what the media are built with."""
        return self._namespace.digest

    @property
    def capacity_bytes(self) -> int:
        """For records of one rank, headers included; less than the share of `DiskOptions.capacity_bytes`."""
        return self._sizes.usable_bytes

    @property
    def used_bytes(self) -> int:
        return self._records.used_bytes

    def cost(self, num_bytes: int) -> int:
        """With the record's header, in whole pages."""
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

    def touch(self, keys: Iterable[Key]) -> None:
        self._records.touch(keys)
        self._upkeep.write_changes()

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """As the contract says. BUSY while file work is on its way, or due behind other work, that may make room: the
        next segment is made, one is deleted or emptied. NO_ROOM also where none is: the file system is full, say, or
        somebody reads from every segment."""
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        if not 0 < len(key) <= LARGEST_KEY_BYTES:
            raise TierProtocolError(f"reserve: expected a key of 1 to {LARGEST_KEY_BYTES} bytes, got {len(key)}")
        self._upkeep.collect()
        cost, records = cost_of(num_bytes), self._records
        refusal = records.why_not(key, cost)
        if refusal is None and not self._segments.has_room(cost, may_take_last=False):
            self._upkeep.run()
            if not self._segments.has_room(cost, may_take_last=False):
                refusal = Refusal.BUSY if self._upkeep.makes_room else Refusal.NO_ROOM
        if refusal is not None:
            return records.count_refusal(refusal)
        records.make_room(cost)
        slot = records.reserve(key, num_bytes, cost)
        self._upkeep.run_if_needed()
        return slot

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        return [self.reserve(key, num_bytes) for key, num_bytes in chunks]

    def commit(self, key: Key) -> bool:
        is_committed = self._records.commit(key)
        self._upkeep.run_if_needed()
        return is_committed

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        record = self._records.find(key)
        self._records.abort(key)
        if record is not None:
            self._journal.withdraw(record)
        self._upkeep.run()

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        """Never offer what is stored under this key again, also after a restart: it is quarantined.

        `reason` is counted; a `FailureReason` is one.
        """
        self._upkeep.collect()
        is_withdrawn = self._journal.quarantine(key, str(reason))
        self._upkeep.run()
        return is_withdrawn

    def pin(self, key: Key) -> Slot | None:
        self._upkeep.collect()
        return self._records.pin(key)

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self._upkeep.collect()
        return self._records.pin_all(keys)

    def unpin(self, key: Key) -> None:
        self._records.unpin(key)
        self._upkeep.run_if_needed()

    def unpin_all(self, keys: Iterable[Key]) -> None:
        self._records.unpin_all(keys)
        self._upkeep.run_if_needed()

    def clear(self) -> int:
        """`invalidate` every key, durably: waits until that is written down, at most `close_timeout_s`."""
        self._upkeep.collect()
        num_withdrawn = self._records.forget_all()
        if not self._records.is_closed:
            written = threading.Event()
            if self._upkeep.start_epoch(written.set):
                written.wait(self._options.close_timeout_s)
            self._upkeep.collect()
            if self._upkeep.owes_epoch:
                logger.warning(
                    "clear is not on disk yet in %s; a crash now would undo it, and nothing is stored before it is",
                    self._namespace.root.path,
                )
        self._upkeep.run()
        return num_withdrawn

    def take_counts(self) -> TierCounts:
        self._upkeep.run()
        return self._records.take_counts()

    def watch(self) -> None:
        self._records.watch()

    def take_changes(self) -> Changes:
        self._upkeep.collect()
        return self._records.take_changes()

    def take_disk_counts(self) -> DiskCounts:
        """What happened beside, since the last call."""
        self._upkeep.run()
        return self._upkeep.state.tally.take()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all file work that is due is done, or failed and rests. False when `timeout_s` passed first.

        From then on a crash of the process, too, leaves what was invalidated or aborted withdrawn.
        """
        return self._upkeep.drain(timeout_s)

    def close(self) -> None:
        """Offer nothing more, refuse every later reservation, and leave what is committed to the next opening.

        Waits for file work at most `close_timeout_s`. Open pins and reservations may still be given back.
        """
        if self._records.is_closed:
            return
        self._records.close()
        self._upkeep.collect()
        for record in self._records.reserved():
            # What a medium has written and nobody has heard of yet is found by the next opening, which verifies it.
            if record.state is KeyState.DOOMED_WRITE:
                self._journal.withdraw(record)
        self._upkeep.finish()
        is_written = threading.Event()
        self._janitor.submit(is_written.set)
        self._records.forget_all()
        is_done = self._end_work() or is_written.is_set()
        self._upkeep.stop()
        self._upkeep.collect()
        if self._upkeep.owes_epoch:
            logger.warning(
                "the last clear of %s could not be written; the next start may offer what was stored before it",
                self._namespace.root.path,
            )
        if is_done or not self._janitor.leave(self._namespace.close):
            self._namespace.close()
        else:
            logger.warning("%s is still locked until file work ends, which it did not in time", self._namespace.path)

    def _end_work(self) -> bool:
        """Whether the janitor ended in time. A snapshot that takes most of it is given up: the changes say the same."""
        timeout_s = self._options.close_timeout_s
        if self._janitor.close(_SNAPSHOT_SHARE * timeout_s):
            return True
        logger.info("%s: no time for a snapshot; the next start reads the changes", self._namespace.path)
        self._upkeep.give_up_snapshot()
        return self._janitor.close((1 - _SNAPSHOT_SHARE) * timeout_s)
