"""Both halves of a disk tier at once, for a program of one process."""

from __future__ import annotations

from hybridkv.hashing import Fingerprint
from hybridkv.tiers.disk.index import DiskIndex
from hybridkv.tiers.disk.medium.disk_medium import DiskMedium
from hybridkv.tiers.disk.options import DiskOptions


def open_disk_tier(path: str, fingerprint: Fingerprint, options: DiskOptions) -> tuple[DiskIndex, DiskMedium]:
    """Index and medium of rank 0. Same errors as `DiskIndex`. Close the medium first, then the index."""
    index = DiskIndex(path, fingerprint, options)
    return index, DiskMedium(path, index.namespace, 0, options)
