"""The disk tier: an index that owns a directory of append-only segment files, and a medium for each rank's bytes."""

from hybridkv.tiers.disk.counts import DiskCounts
from hybridkv.tiers.disk.files.file_io import FileIO
from hybridkv.tiers.disk.index import DiskIndex
from hybridkv.tiers.disk.medium.disk_medium import DiskMedium
from hybridkv.tiers.disk.options import DiskOptions, DiskSizes, Fsync, plan_sizes
from hybridkv.tiers.disk.tier import open_disk_tier
from hybridkv.tiers.disk.upkeep.janitor import InlineJanitor, Janitor, ThreadJanitor

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
