"""Disk tier: an index that owns a directory of append-only segment files, and a medium for each rank's bytes.

Parts, from top to bottom; imports run downward only: `disk_index` and `inspection`; `recovery` (reads the store at a
start); `maintenance` (file work of the index) beside `medium` (bytes of a rank); `index` (tables in memory); `files`
(directories, locks, segment files); `format` (bytes of each file).
"""

from hybridkv.tiers.disk.counts import DiskCounts
from hybridkv.tiers.disk.disk_index import DiskIndex
from hybridkv.tiers.disk.maintenance.janitor import ThreadJanitor
from hybridkv.tiers.disk.medium.disk_medium import DiskMedium
from hybridkv.tiers.disk.options import DEFAULT_MAX_RECORDS, DiskOptions, DiskSizes, Fsync, plan_sizes
from hybridkv.tiers.files.file_io import FileIO

__all__ = [
    "DEFAULT_MAX_RECORDS",
    "DiskCounts",
    "DiskIndex",
    "DiskMedium",
    "DiskOptions",
    "DiskSizes",
    "FileIO",
    "Fsync",
    "ThreadJanitor",
    "plan_sizes",
]
