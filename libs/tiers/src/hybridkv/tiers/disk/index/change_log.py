"""Changes to the records since the last snapshot: the queue from the index's thread, and the file that they are
appended to.

The queue is bounded: when it overflows it is discarded, and a snapshot replaces it.
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
"""Changes that wait. At a second between two batches as many a second; about 20 MB."""
MAX_USES_IN_A_BATCH = 1 << 14
"""The last ones. What was used before them in the same second keeps the place it had."""


class GivenUpError(Exception):
    """The snapshot is not wanted any more that was planned at a cut."""


class Cut:
    """Where a snapshot was planned: what comes behind it belongs to the file that follows that snapshot."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def require_wanted(self) -> None:
        """Any thread may cancel; whoever writes the snapshot asks this from time to time."""
        if self.is_cancelled:
            raise GivenUpError


class Gap:
    """Something is missing here. What comes behind it may not be appended to what came before."""


_Waiting: TypeAlias = Change | int | Cut | Gap


class ChangeLog:
    """One for an index. Everything but `take` and `skip_to` is called in the index's thread."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        # An address alone was used. Either thread works on one end, and `clear` leaves an empty one behind.
        self._waiting: deque[_Waiting] = deque()
        self._is_closed = False
        self.is_scheduled = False
        """Somebody will take what waits. Whoever takes it says so first."""

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits."""
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
        """In this order. Some may be missing, so they leave half the room to what may not."""
        if len(self._waiting) < self._max_waiting // 2 and not self._is_closed:
            self._waiting.extend(addresses)

    def cut(self) -> Cut:
        """A snapshot that is planned now speaks for everything until here."""
        cut = Cut()
        self._waiting.append(cut)
        return cut

    def give_up(self) -> None:
        """Forget what waits; nothing is written down before the next snapshot."""
        self._waiting.clear()
        self._waiting.append(Gap())

    def close(self) -> None:
        """Take nothing more."""
        self._is_closed = True

    def _add(self, change: Change) -> None:
        if self._is_closed:
            return
        if len(self._waiting) >= self._max_waiting:
            self.give_up()
        self._waiting.append(change)

    # In the janitor's thread.

    def take(self) -> tuple[list[Change], bool]:
        """What waits, up to the next cut, without uses that later ones make void. And whether it follows a gap."""
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
        """Forget what a snapshot speaks for. False when something is missing since."""
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
        except IndexError:  # given up at this moment
            return None


def _last_uses(taken: list[Change | int]) -> list[Change]:
    """Of each address only its last use, and of uses the last ones only."""
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
    """Writes down what a `ChangeLog` holds.

    Args:
        log: where it comes from.
        options: when to sync.
        max_bytes: of the file. When half of it is written a snapshot is wanted, and behind all of it nothing is.
        clock: seconds.
        found: a whole file that an opening found, and that goes on.
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
        self._seal: bytes | None = None if found is None else found.seal
        """Of the last batch, written or not; None: there is no file that may be appended to."""
        self._end_offset = 0 if found is None else found.end_offset
        self._unwritten = b""
        """Batches that the file lacks."""
        self.has_unwritten = False
        """It could not be written to. Trying again may help, also when nothing new happens."""
        self._synced_s = clock()

    @property
    def is_begun(self) -> bool:
        """Whether there is a file that may be appended to."""
        return self._seal is not None

    def append(self, directory: Directory) -> bool:
        """Write down what waits, up to the next cut. Whether a snapshot is wanted. `OSError`: again later."""
        taken, has_gap = self._log.take()
        if has_gap:
            self._give_up()
        if self._seal is None:
            return True
        if taken:
            batch = changes.encode_batch(taken, self._seal)
            self._unwritten += batch
            self._seal = changes.seal_of(batch)
        if self._end_offset + len(self._unwritten) > self._max_bytes:
            self._give_up()
            return True
        if self._unwritten:
            self._write(directory)
        return self._end_offset > self._max_bytes // 2

    def miss(self) -> None:
        """What was to be written now was not."""
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
        """A new file, behind the snapshot with the checksum `base` that was planned at `cut`."""
        self._give_up()
        if not self._log.skip_to(cut):
            return
        taken, has_gap = self._log.take()
        if has_gap:
            return
        data = changes.encode_head(namespace, base)
        if taken:
            data += changes.encode_batch(taken, changes.seal_of(data))
        if len(data) > self._max_bytes:
            return
        directory.write_file(CHANGES_NAME, data, self._fsync is not Fsync.NONE)
        self._end_offset, self._seal = len(data), changes.seal_of(data)

    def _give_up(self) -> None:
        self._seal, self._end_offset, self._unwritten = None, 0, b""
        self.has_unwritten = False
