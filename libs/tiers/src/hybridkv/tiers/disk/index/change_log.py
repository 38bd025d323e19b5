"""Changes to the records since the last snapshot: a queue from the index's thread, and the file of changes.

The queue is bounded. On overflow all queued changes are discarded, and a new snapshot replaces them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format import changes
from hybridkv.tiers.disk.format.changes import Change, Committed, Gone, Relocated, Reserved, Used
from hybridkv.tiers.disk.format.layout import CHANGES_NAME
from hybridkv.tiers.disk.options import DiskOptions, Fsync
from hybridkv.tiers.files.directory import Directory, write_all

MAX_WAITING = 1 << 17
"""Largest number of queued changes, about 20 MB. With one batch a second, this limits the changes per second."""
MAX_USES_IN_A_BATCH = 1 << 14
"""Largest number of uses in a batch; earlier uses are dropped. A dropped use does not change the LRU order on disk."""


class SnapshotCancelledError(Exception):
    """The snapshot of a cut was cancelled."""


class Cut:
    """Position of a planned snapshot in the queue. Later changes go to the file of changes of that snapshot."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def require_wanted(self) -> None:
        """`SnapshotCancelledError` if a thread has set `is_cancelled`. The writer of the snapshot calls this often."""
        if self.is_cancelled:
            raise SnapshotCancelledError


class Gap:
    """Mark for missing changes. Later changes may not be appended to earlier changes."""


_Waiting: TypeAlias = Change | int | Cut | Gap


class ChangeLog:
    """Queue of changes of one index. Only `take` and `skip_to` run in the janitor's thread."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        # An int is the address of a used record. Each thread works on one end of the deque.
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self.is_scheduled = False
        """True if a task is queued that calls `take`. `take` resets it first."""

    @property
    def has_changes(self) -> bool:
        return bool(self._waiting)

    def reserved(self, address: int, payload_bytes: int) -> None:
        self._add(Reserved(address, payload_bytes))

    def committed(self, address: int, payload_bytes: int, key: Key) -> None:
        self._add(Committed(address, payload_bytes, key))

    def relocated(self, address: int, new_address: int) -> None:
        self._add(Relocated(address, new_address))

    def gone(self, address: int) -> None:
        self._add(Gone(address))

    def used(self, addresses: Iterable[int]) -> None:
        """Queue uses, in order. Drops the uses if the queue is half full: lost uses need no new snapshot."""
        if len(self._waiting) < self._max_waiting // 2 and not self._is_closed:
            self._waiting.extend(addresses)

    def cut(self) -> Cut:
        """Mark the position of a snapshot that is planned now."""
        cut = Cut()
        self._waiting.append(cut)
        return cut

    def drop_until_snapshot(self) -> None:
        """Drop the queue. No changes are written before the next snapshot."""
        self._waiting.clear()
        self._waiting.append(Gap())

    def close(self) -> None:
        """Accept no more changes."""
        self._is_closed = True

    def _add(self, change: Change) -> None:
        if self._is_closed:
            return
        if len(self._waiting) >= self._max_waiting:
            self.drop_until_snapshot()
        self._waiting.append(change)

    # In the janitor's thread.

    def take(self) -> tuple[list[Change], bool]:
        """Take the changes up to the next cut, without superseded uses. The bool is True if they follow a gap."""
        self.is_scheduled = False
        taken: list[Change | int] = []
        has_gap = False
        while self._waiting:
            first = self._pop()
            if isinstance(first, Cut) and not first.is_cancelled:
                self._waiting.appendleft(first)
                break
            if isinstance(first, Gap):
                taken.clear()
                has_gap = True
            elif not (first is None or isinstance(first, Cut)):
                taken.append(first)
        return _last_uses(taken), has_gap

    def skip_to(self, cut: Cut) -> bool:
        """Drop the changes before the cut: the snapshot covers them. False if the cut is gone, or a gap comes first."""
        while self._waiting:
            first = self._pop()
            if first is cut:
                return True
            if isinstance(first, Gap):
                self._waiting.appendleft(first)
                break
        return False

    def _pop(self) -> _Waiting | None:
        try:
            return self._waiting.popleft()
        except IndexError:  # the other thread has just cleared the queue
            return None


def _last_uses(taken: list[Change | int]) -> list[Change]:
    """Keep only the last use of each address, and at most `MAX_USES_IN_A_BATCH` uses."""
    seen: set[int] = set()
    kept: list[Change] = []
    for change in reversed(taken):
        if not isinstance(change, int):
            kept.append(change)
        elif change not in seen and len(seen) < MAX_USES_IN_A_BATCH:
            seen.add(change)
            kept.append(Used(change))
    kept.reverse()
    return kept


class ChangesFile:
    """File of changes since the current snapshot. Used in the janitor's thread.

    Append only. After a failure the file still holds the first changes since the snapshot, without gaps. Each snapshot
    begins a new file.

    Args:
        log: source of the changes.
        options: policy for syncs.
        max_bytes: size limit of the file. Above half of it, `append` requests a snapshot; beyond it, nothing is
            appended.
        clock: time in seconds.
        found: whole file found at the start; new changes are appended to this file. None: no file.
    """

    def __init__(
        self,
        log: ChangeLog,
        options: DiskOptions,
        max_bytes: int,
        clock: Callable[[], float],
        found: changes.Decoded | None = None,
    ) -> None:
        self._log = log
        self._fsync = options.fsync
        self._fsync_interval_s = options.fsync_interval_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._last_checksum: bytes | None = None if found is None else found.last_checksum
        """Checksum of the last batch, written or not; None if there is no file to append to."""
        self._end_offset = 0 if found is None else found.end_offset
        self._unwritten = b""
        """Encoded batches that are not in the file yet."""
        self.has_unwritten = False
        """True if a write failed. A retry may succeed, even without new changes."""
        self._synced_s = clock()

    @property
    def is_begun(self) -> bool:
        """True if there is a file to append to."""
        return self._last_checksum is not None

    def append(self, directory: Directory) -> bool:
        """Write queued changes up to the next cut. True if a snapshot should be written. After an `OSError`, call
        `append` again later."""
        taken, has_gap = self._log.take()
        if has_gap:
            self._give_up()
        if self._last_checksum is None:
            return True
        if taken:
            batch = changes.encode_batch(taken, self._last_checksum)
            self._unwritten += batch
            self._last_checksum = changes.checksum_of(batch)
        if self._end_offset + len(self._unwritten) > self._max_bytes:
            self._give_up()
            return True
        if self._unwritten:
            self._write(directory)
        return self._end_offset > self._max_bytes // 2

    def batch_failed(self) -> None:
        """Allow the next batch: a scheduled batch was not written."""
        self._log.is_scheduled = False

    def _write(self, directory: Directory) -> None:
        try:
            self._write_at_end(directory)
        except OSError:
            self.has_unwritten = True
            raise
        self._end_offset += len(self._unwritten)
        self._unwritten, self.has_unwritten = b"", False

    def _write_at_end(self, directory: Directory) -> None:
        fd = directory.open_file(CHANGES_NAME, os.O_RDWR)
        try:
            write_all(directory.io, fd, self._unwritten, self._end_offset)
            if self._is_sync_due():
                directory.io.fdatasync(fd)
                self._synced_s = self._clock()
        finally:
            directory.io.close(fd)

    def _is_sync_due(self) -> bool:
        if self._fsync is Fsync.INTERVAL:
            return self._clock() >= self._synced_s + self._fsync_interval_s
        return self._fsync is Fsync.ALWAYS

    def begin(self, directory: Directory, namespace: bytes, base: bytes, cut: Cut) -> None:
        """Begin a new file for the snapshot with checksum `base`, planned at `cut`. Begins no file if changes after the
        cut are missing or too many."""
        self._give_up()
        if not self._log.skip_to(cut):
            return
        taken, has_gap = self._log.take()
        if has_gap:
            return
        data = changes.encode_head(namespace, base)
        if taken:
            data += changes.encode_batch(taken, changes.checksum_of(data))
        if len(data) > self._max_bytes:
            return
        directory.write_file(CHANGES_NAME, data, self._fsync is not Fsync.NONE)
        self._end_offset, self._last_checksum = len(data), changes.checksum_of(data)

    def _give_up(self) -> None:
        self._last_checksum, self._end_offset, self._unwritten = None, 0, b""
        self.has_unwritten = False
