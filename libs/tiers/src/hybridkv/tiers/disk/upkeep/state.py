"""What an index knows of its store beside the tables: the epoch, what is owed, lost or taken, and what failed lately.

All kinds of file work share it. Used in the index's thread only.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, NamedTuple

from hybridkv.tiers.disk.counts import DiskTally
from hybridkv.tiers.disk.files.locks import TakenError
from hybridkv.tiers.disk.options import DiskOptions, DiskSizes
from hybridkv.tiers.disk.tables.records import RecordTable
from hybridkv.tiers.disk.tables.segments import SegmentTable
from hybridkv.tiers.disk.upkeep.chore import Chore, Files
from hybridkv.tiers.disk.upkeep.retries import Retries

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class Tables(NamedTuple):
    """What an index knows of what it stores."""

    segments: SegmentTable
    records: RecordTable


class Epoch(NamedTuple):
    """Segments of another one hold nothing."""

    number: int
    is_written: bool
    """It is on disk. Before, nothing that names it may be."""


class StoreState:
    """Of one index."""

    def __init__(
        self,
        options: DiskOptions,
        sizes: DiskSizes,
        tables: Tables,
        files: Files,
        epoch: Epoch,
        clock: Callable[[], float],
    ) -> None:
        self.options = options
        self.sizes = sizes
        self.segments, self.records = tables
        self.files = files
        self.clock = clock
        self.tally = DiskTally()
        self.retries = Retries(files.namespace.root.path, options.retry_interval_s, clock, self.tally)
        self.epoch, self.is_epoch_written = epoch
        self.is_snapshot_owed = not files.changes.is_begun
        """What is on disk does not say all: the last one could not be written, or nothing may follow it any more."""
        self.is_lost = False
        """Something that should be on disk is not: perhaps the directory was removed."""
        self.is_taken = False
        """Another engine has the namespace or had it: no file work is done any more, and nothing is stored."""

    def note(
        self, kind: type[Chore[Any]], error: Exception | None, stuck: tuple[int, ...] = (), is_all_well: bool = True
    ) -> None:
        """A chore ended. `stuck`: what failed is these segments alone, and others may be tried; `is_all_well`: none is
        stuck."""
        if error is None:
            self.retries.succeeded(kind, is_all_well)
            return
        self.retries.failed(kind, error, stuck)
        self.is_lost = self.is_lost or getattr(error, "errno", None) in _GONE
        if isinstance(error, TakenError):
            self._end_storing()

    def _end_storing(self) -> None:
        self.is_taken = True
        self.records.log.close()
        self.segments.close_open()
        self.segments.ready.clear()
        self.segments.limit_bytes = 0
