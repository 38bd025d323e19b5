"""The file of changes behind the present snapshot. Used by chores only, so in the janitor's thread.

Append only, and only what follows without a gap. Whatever goes wrong, what stands in the file is a beginning of what
happened, and the next snapshot begins a new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hybridkv.tiers.disk.files.names import CHANGES_NAME
from hybridkv.tiers.disk.format import changes
from hybridkv.tiers.disk.options import DiskOptions, Fsync
from hybridkv.tiers.disk.tables.change_log import ChangeLog, Cut
from hybridkv.tiers.files.directory import Directory, write_all


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
