"""Syncs segments of a medium at intervals. docs/guides/disk.md lists the possible losses of each policy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hybridkv.tiers.disk.medium.segment_cache import SegmentCache
from hybridkv.tiers.disk.options import DiskOptions, Fsync
from hybridkv.tiers.errors import is_shortage
from hybridkv.tiers.files.file_io import FileIO
from hybridkv.tiers.threads import BackgroundThread

logger = logging.getLogger(__name__)


class Syncer:
    """Syncs the segments written since the last sync. Does nothing without `Fsync.INTERVAL`."""

    def __init__(self, io: FileIO, cache: SegmentCache, options: DiskOptions, clock: Callable[[], float]) -> None:
        self._io = io
        self._cache = cache
        self._clock = clock
        self._is_on = options.fsync is Fsync.INTERVAL
        self._interval_s = options.fsync_interval_s
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._due_s = 0.0
        self._has_failed = False

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next sync is due; None if nothing was written."""
        return max(self._due_s - self._clock(), 0.0) if self._dirty else None

    @property
    def is_due(self) -> bool:
        return bool(self._dirty) and self._clock() >= self._due_s

    def written(self, number: int) -> bool:
        """Mark a segment as written. True if it is the first written segment since the last sync."""
        if not self._is_on:
            return False
        with self._lock:
            is_first = not self._dirty
            if is_first:
                self._due_s = self._clock() + self._interval_s
            self._dirty.add(number)
        return is_first

    def sync(self) -> None:
        """Sync the written segments, in the calling thread."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for number in sorted(dirty):
            try:
                with self._cache.opened(number) as segment:
                    self._io.fdatasync(segment.fd)
                self._has_failed = False
            except FileNotFoundError:
                pass  # the index has deleted the segment
            except (OSError, MemoryError) as error:
                if is_shortage(error):
                    self._again(number)
                if not self._has_failed:
                    logger.warning("segment %d could not be synced: %s; a loss of power may lose it", number, error)
                self._has_failed = True
            except Exception:  # the thread must not end
                logger.exception("bug while syncing segment %d", number)

    def _again(self, number: int) -> None:
        """Sync the segment after another interval: the process was short of a resource."""
        with self._lock:
            self._dirty.add(number)
            self._due_s = self._clock() + self._interval_s


class SyncThread:
    """`Syncer` with its own thread. The first written record starts the thread."""

    def __init__(self, io: FileIO, cache: SegmentCache, options: DiskOptions, clock: Callable[[], float]) -> None:
        self._syncer = Syncer(io, cache, options, clock)
        self._condition = threading.Condition()
        self._thread = BackgroundThread("hybridkv-disk-sync")
        self._is_short = False
        self._is_closed = False

    def written(self, number: int) -> None:
        """Mark a segment as written, and start the thread if needed."""
        is_first = self._syncer.written(number)
        if not is_first and (self._thread.is_started or self._syncer.wait_s is None):
            return
        with self._condition:
            if not self._thread.is_started and not self._is_closed:
                try:
                    self._thread.post(self._work)
                except (RuntimeError, MemoryError) as error:
                    if not self._is_short:
                        logger.warning(
                            "the sync thread did not start: %s; segments are synced after a later store, or at close",
                            error,
                        )
                    self._is_short = True
                    return
                self._is_short = False
            self._condition.notify()

    def close(self) -> None:
        """End the thread, and sync the remaining segments. Waits without a time limit."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.close()
        self._thread.wait_until_ended(None)
        self._syncer.sync()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not (self._is_closed or self._syncer.is_due):
                    self._condition.wait(self._syncer.wait_s)
                if self._is_closed:
                    return
            self._syncer.sync()
