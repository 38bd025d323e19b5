"""Options of a disk tier, and the sizes derived from them."""

from __future__ import annotations

import enum
import math
from typing import Literal

import msgspec

from hybridkv.tiers.disk.format.layout import (
    LARGEST_SEGMENT_BYTES,
    PAGE_BYTES,
    SEGMENT_HEAD_BYTES,
    record_bytes,
    round_up,
)
from hybridkv.tiers.disk.format.withdrawals import JOURNAL_ENTRY_BYTES
from hybridkv.tiers.errors import TierConfigurationError

MIB = 1 << 20
DEFAULT_MAX_RECORDS = 4_000_000
"""Default of `max_records`."""
SMALLEST_SEGMENT_BYTES = MIB
LARGEST_DEFAULT_SEGMENT_BYTES = 256 * MIB
SEGMENTS_IN_CAPACITY = 64
FEWEST_SEGMENTS = 4
FEWEST_READY_SEGMENTS = 2
SEGMENTS_PER_READY_SEGMENT = 8
"""If the option `ready_segments` is None, at most one in this many segments (but at least `FEWEST_READY_SEGMENTS`) is
created ahead of a burst. So `df` does not show all space as used from the start."""
FEWEST_SPARE_SEGMENTS = 3
"""The open segment, an empty segment, and a segment for the copies of compaction."""

SNAPSHOT_ENTRY_BYTES = 2 + 8 + 8 + 64
"""Allowance for one record in a snapshot. With longer keys the snapshot keeps fewer records."""
CHANGES_SIZE_DIVISOR = 4
"""The file of changes may have the snapshot's size divided by this."""
LARGEST_CHANGES_BYTES = 16 * MIB
"""Limit of the file of changes, because a start reads it. To read a full file (1.9 million changes), a start needs
about 4 s and 400 MB of memory."""

LARGEST_JOURNAL_BYTES = 64 * MIB
"""Limit of the quarantine journal, because a start reads it."""
MOST_QUARANTINED = 1 << 19
"""Limit of `max_quarantined`. The journal has room for twice as many entries."""


class Fsync(enum.StrEnum):
    """Policy for syncs of stored bytes to the device. A crash of the process loses no bytes with any policy."""

    NONE = "none"
    """Never. A power loss may lose the records of about the last 30 s (the kernel decides)."""
    INTERVAL = "interval"
    """Every `fsync_interval_s`. A power loss may lose records stored since the last sync."""
    ALWAYS = "always"
    """Before a store completes. A power loss loses no committed record."""


class DiskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a disk tier. The media use only `fsync` and the options below it.

    Args:
        capacity_bytes: limit of the tier's files below the path: all ranks, all namespaces, metadata included. To stay
            below it, the index deletes other namespaces that no engine has open, the least recently opened first.
        segment_bytes: size of one segment file of one rank, a multiple of 4096. None: `capacity_bytes` / 64, divided by
            the number of ranks, within [1 MiB, 256 MiB]; or room for four of the largest chunks, if that is more.
        largest_chunk_bytes: size of the largest chunk on one rank; 0: unknown.
        spare_share: share of the segments that records never fill, in addition to three segments. A larger share: fewer
            bytes moved by compaction; a smaller share: more records kept. Within [0, 0.9].
        max_records: most keys in the index. Each takes about 120 bytes of memory, about 150 more while a snapshot is
            written, and 82 on disk.
        max_quarantined: most withdrawn records remembered across restarts, at most 524288.
        burst_bytes: bytes in flight into the tier at one time, over all ranks.
        ready_segments: empty segments that are created ahead, and kept free by compaction. None: one more than
            `burst_bytes` fills, at least 2 and at most an eighth of all segments; compaction keeps 2 free. Compaction
            always keeps at least 2.
        snapshot_interval_s: time between two snapshots of an index with changes. A snapshot is written sooner if the
            file of changes is incomplete or half full.
        changes_interval_s: time between two batches of changes since the last snapshot.
        retry_interval_s: backoff of failed file work.
        fsync: see `Fsync`.
        fsync_interval_s: time between two syncs with `Fsync.INTERVAL`.
        direct: bypass the page cache. "auto": if the file system supports it.
        max_in_flight: concurrent reads and writes, 1 to 64. Without io_uring, the number of I/O threads.
        max_queued: waiting operations of a medium, for loads and stores each; further operations complete with BUSY.
        batch_bytes: adjacent records of this size in total, plus at most one record, are read or written by one call.
        max_open_files: most segment files that a medium keeps open.
        close_timeout_s: longest wait for file work in `clear`, and in `close` of index and medium.
    """

    capacity_bytes: int
    segment_bytes: int | None = None
    largest_chunk_bytes: int = 0
    spare_share: float = 0.1
    max_records: int = DEFAULT_MAX_RECORDS
    max_quarantined: int = 1024
    burst_bytes: int = 0
    ready_segments: int | None = None
    snapshot_interval_s: float = 120.0
    changes_interval_s: float = 1.0
    retry_interval_s: float = 5.0
    fsync: Fsync = Fsync.INTERVAL
    fsync_interval_s: float = 5.0
    direct: bool | Literal["auto"] = "auto"
    max_in_flight: int = 8
    max_queued: int = 4096
    batch_bytes: int = 4 * MIB
    max_open_files: int = 256
    close_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("capacity_bytes", "max_records", "max_quarantined", "max_queued"):
            _require(name, getattr(self, name) > 0, "a number > 0", getattr(self, name))
        intervals = ("snapshot_interval_s", "changes_interval_s", "retry_interval_s", "fsync_interval_s")
        for name in (*intervals, "close_timeout_s"):
            _require(name, 0 <= getattr(self, name) < float("inf"), "seconds >= 0", getattr(self, name))
        most = f"{MOST_QUARANTINED} or fewer"
        _require("max_quarantined", self.max_quarantined <= MOST_QUARANTINED, most, self.max_quarantined)
        is_number = self.ready_segments is None or self.ready_segments > 0
        _require("ready_segments", is_number, "a number > 0, or None", self.ready_segments)
        _require("burst_bytes", self.burst_bytes >= 0, "a number >= 0", self.burst_bytes)
        _require("largest_chunk_bytes", self.largest_chunk_bytes >= 0, "a number >= 0", self.largest_chunk_bytes)
        _require("spare_share", 0 <= self.spare_share <= 0.9, "a share within [0, 0.9]", self.spare_share)
        _require("max_in_flight", 1 <= self.max_in_flight <= 64, "1 to 64", self.max_in_flight)
        _require(
            "max_open_files", self.max_open_files >= self.max_in_flight, "max_in_flight or more", self.max_open_files
        )
        _require("fsync", self.fsync in list(Fsync), '"none", "interval" or "always"', self.fsync)
        _require("direct", self.direct in (True, False, "auto"), 'true, false or "auto"', self.direct)
        whole_pages = self.batch_bytes >= 4 * PAGE_BYTES and self.batch_bytes % PAGE_BYTES == 0
        _require("batch_bytes", whole_pages, "a multiple of 4096, 16384 or more", self.batch_bytes)


class DiskSizes(msgspec.Struct, frozen=True):
    """Sizes derived from the options for one namespace."""

    num_ranks: int
    segment_bytes: int
    """Size of one segment file of one rank."""
    data_bytes: int
    """Limit of the segments of all ranks."""
    metadata_bytes: int
    """Space reserved for all other files of the namespace."""
    usable_bytes: int
    """Limit of the records of one rank, headers included: the capacity of the index."""
    max_records: int
    ready_segments: int
    """Empty segments to create ahead while capacity is left."""
    kept_free_segments: int
    """Empty segments that compaction keeps free."""

    @property
    def segment_room_bytes(self) -> int:
        """Space for records in one segment."""
        return self.segment_bytes - SEGMENT_HEAD_BYTES

    @property
    def changes_bytes(self) -> int:
        """Size limit of the file of changes."""
        return changes_bytes(self.max_records)


def changes_bytes(max_records: int) -> int:
    """Size limit of the file of changes after a snapshot of `max_records` records."""
    share = round_up(SNAPSHOT_ENTRY_BYTES * max_records // CHANGES_SIZE_DIVISOR)
    return min(2 * PAGE_BYTES + share, LARGEST_CHANGES_BYTES)


def plan_sizes(options: DiskOptions, num_ranks: int) -> DiskSizes:
    """Sizes for `num_ranks` ranks. `TierConfigurationError` if the capacity is too small, or `segment_bytes` is
    invalid."""
    segment_bytes = options.segment_bytes or _default_segment_bytes(options, num_ranks)
    smallest = SEGMENT_HEAD_BYTES + record_bytes(max(options.largest_chunk_bytes, 1))
    if segment_bytes % PAGE_BYTES or not smallest <= segment_bytes <= LARGEST_SEGMENT_BYTES:
        expected = f"a multiple of {PAGE_BYTES} within [{smallest}, {LARGEST_SEGMENT_BYTES}]"
        raise TierConfigurationError("segment_bytes", expected, segment_bytes)
    max_records = min(options.max_records, options.capacity_bytes // num_ranks // record_bytes(1))
    metadata_bytes = _metadata_bytes(options, num_ranks, max_records)
    data_bytes = options.capacity_bytes - metadata_bytes
    count = data_bytes // (num_ranks * segment_bytes)
    if count < FEWEST_SEGMENTS:
        fewest = metadata_bytes + FEWEST_SEGMENTS * num_ranks * segment_bytes
        raise TierConfigurationError(
            "capacity_bytes",
            f"at least {fewest} bytes: {FEWEST_SEGMENTS} segments of {segment_bytes} bytes on each of {num_ranks} "
            f"ranks, and metadata",
            options.capacity_bytes,
            hint="give the tier more room, or smaller segments",
        )
    num_spare = min(FEWEST_SPARE_SEGMENTS + math.ceil(options.spare_share * count - 1e-9), count - 1)
    usable_bytes = (count - num_spare) * (segment_bytes - SEGMENT_HEAD_BYTES)
    # Compaction uses one empty segment. With only one, no store could succeed after all segments are in use.
    kept = max(options.ready_segments or 0, FEWEST_READY_SEGMENTS)
    ready = options.ready_segments or _ready_segments(options.burst_bytes // (num_ranks * segment_bytes), count)
    bounds = (usable_bytes, max(max_records, 1))
    return DiskSizes(num_ranks, segment_bytes, data_bytes, metadata_bytes, *bounds, ready, kept)


def _ready_segments(num_filled: int, count: int) -> int:
    """Number of segments for a burst: one more than its bytes fill, because a burst begins within one segment and ends
    within another."""
    return max(min(num_filled + 1, count // SEGMENTS_PER_READY_SEGMENT), FEWEST_READY_SEGMENTS)


def _default_segment_bytes(options: DiskOptions, num_ranks: int) -> int:
    share = options.capacity_bytes // (SEGMENTS_IN_CAPACITY * num_ranks) // PAGE_BYTES * PAGE_BYTES
    chosen = min(max(share, SMALLEST_SEGMENT_BYTES), LARGEST_DEFAULT_SEGMENT_BYTES)
    return max(chosen, SEGMENT_HEAD_BYTES + 4 * record_bytes(max(options.largest_chunk_bytes, 1)))


def _metadata_bytes(options: DiskOptions, num_ranks: int, max_records: int) -> int:
    """Size of all files except segments.

    Two snapshots and two files of changes, because a new file replaces an old file; a journal with up to twice
    `max_quarantined` entries, and its replacement; pages for the small files; directories.
    """
    snapshots = 2 * (PAGE_BYTES + round_up(SNAPSHOT_ENTRY_BYTES * max_records))
    changes = 2 * changes_bytes(max_records)
    journals = 3 * (PAGE_BYTES + round_up(JOURNAL_ENTRY_BYTES * options.max_quarantined))
    files = 12 * PAGE_BYTES
    directories = (2 + num_ranks) * 4 * PAGE_BYTES
    return snapshots + changes + journals + files + directories


def _require(name: str, holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise TierConfigurationError(name, expected, got)
