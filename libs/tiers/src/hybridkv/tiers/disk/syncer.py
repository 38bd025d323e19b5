"""Forces what a medium wrote to the device, every so often. docs/guides/disk.md says what each policy loses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from hybridkv.tiers.contract import Completion
from hybridkv.tiers.disk.file_io import FileIO
from hybridkv.tiers.disk.layout import number_of
from hybridkv.tiers.disk.operations import Operation, RecordMover
from hybridkv.tiers.disk.options import DiskOptions, Fsync
from hybridkv.tiers.disk.segment_cache import SegmentCache

logger = logging.getLogger(__name__)


class Syncer:
    """Knows which segments were written to since they were last synced. Does nothing but for `Fsync.INTERVAL`."""

    def __init__(
        self, io: FileIO, cache: SegmentCache, options: DiskOptions, clock: Callable[[], float], mover: RecordMover
    ) -> None:
        self._io = io
        self._cache = cache
        self._mover = mover
        self._clock = clock
        self._is_on = options.fsync is Fsync.INTERVAL
        self._interval_s = options.fsync_interval_s
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._due_s = 0.0
        self._has_failed = False

    @property
    def wait_s(self) -> float | None:
        """How long a thread may sleep before it has to look again; None: until it is woken."""
        return max(self._due_s - self._clock(), 0.0) if self._dirty else None

    @property
    def is_due(self) -> bool:
        return bool(self._dirty) and self._clock() >= self._due_s

    def wrote(self, batch: Sequence[Operation], completions: Sequence[Completion]) -> None:
        """These operations ended."""
        if not self._is_on or not batch[0].is_store or all(completion.failure for completion in completions):
            return
        with self._lock:
            if not self._dirty:
                self._due_s = self._clock() + self._interval_s
            self._dirty.add(number_of(batch[0].address))

    def sync(self) -> None:
        """Sync every segment that was written to, in the calling thread."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for number in sorted(dirty):
            try:
                with self._cache.opened(number, self._mover.is_direct) as fd:
                    self._io.fdatasync(fd)
                self._has_failed = False
            except FileNotFoundError:
                pass  # dropped meanwhile: nobody needs it any more
            except OSError as error:
                if not self._has_failed:
                    logger.warning("segment %d could not be synced: %s; a loss of power may lose it", number, error)
                self._has_failed = True
