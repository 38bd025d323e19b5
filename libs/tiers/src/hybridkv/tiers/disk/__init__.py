"""The disk tier: an index that owns a directory of append-only segment files, and a medium for each rank's bytes.

Its folders, of which none imports one that stands above it: `opening` (what a start finds), `upkeep` (the index's file
work) beside `medium` (a rank's bytes), `tables` (what the index knows), `files` (what lies in a store), `format`.
"""

from hybridkv.tiers.disk.counts import DiskCounts
from hybridkv.tiers.disk.index import DiskIndex
from hybridkv.tiers.disk.medium.disk_medium import DiskMedium
from hybridkv.tiers.disk.options import DiskOptions, DiskSizes, Fsync, plan_sizes
from hybridkv.tiers.disk.tier import open_disk_tier
from hybridkv.tiers.disk.upkeep.janitor import InlineJanitor, Janitor, ThreadJanitor
from hybridkv.tiers.files.file_io import FileIO

__all__ = [
    "DiskCounts",
    "DiskIndex",
    "DiskMedium",
    "DiskOptions",
    "DiskSizes",
    "FileIO",
    "Fsync",
    "InlineJanitor",
    "Janitor",
    "ThreadJanitor",
    "open_disk_tier",
    "plan_sizes",
]
