"""Which descriptors a read needs: prepared ones where its ranges lie on units, new ones elsewhere. Only sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridkv.peers.ranges import Int64Array, Ranges
from hybridkv.peers.transport.memory import RegisteredMemory

HOST_DEVICE = 0
"""As NIXL counts them."""


@dataclass(frozen=True, slots=True, eq=False)
class UnitTable:
    """The prepared list of one side: every region with a unit, one behind the other, a descriptor for each unit."""

    rows: npt.NDArray[np.uint64]
    """(address, unit, device, stride, count) of each such region."""
    first: Int64Array
    """By region: the number of its first descriptor."""
    units: Int64Array
    """By region: 0 where it has none."""

    @classmethod
    def of(cls, memory: RegisteredMemory) -> UnitTable:
        rows, first, units, total = [], [], [], 0
        for region in memory.regions:
            first.append(total)
            if region is None or not region.unit_bytes:
                units.append(0)
                continue
            units.append(region.unit_bytes)
            count = region.num_bytes // region.unit_bytes
            rows.append((region.address, region.unit_bytes, HOST_DEVICE, region.unit_bytes, count))
            total += count
        table = np.array(rows, dtype=np.uint64).reshape(-1, 5)
        return cls(table, np.array(first, dtype=np.int64), np.array(units, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self, regions: Int64Array, offsets: Int64Array, num_bytes: Int64Array) -> Int64Array:
        """The descriptors of ranges that lie on units, in order."""
        units = self.units[regions]
        counts = num_bytes // units
        begins = self.first[regions] + offsets // units
        within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers: Int64Array = np.repeat(begins, counts) + within
        return numbers


def is_on_units(local: UnitTable, remote: UnitTable, ranges: Ranges) -> bool:
    """Whether prepared descriptors do, which are of one size on both sides."""
    ours, theirs = local.units[ranges.local_regions], remote.units[ranges.remote_regions]
    if not bool(((ours == theirs) & (ours > 0)).all()):
        return False
    return not bool((ranges.local_offsets % ours).any()) and not bool(
        (ranges.remote_offsets % ours).any() or (ranges.num_bytes % ours).any()
    )


def posts_of(ranges: Ranges, post_bytes: int) -> Iterator[Ranges]:
    """The read in pieces of about so many bytes, in order. One range is cut where it is longer."""
    ranges = ranges.cut(post_bytes)
    begins = np.cumsum(ranges.num_bytes) - ranges.num_bytes
    share = begins // post_bytes
    bounds = [0, *(np.flatnonzero(share[1:] != share[:-1]) + 1).tolist(), len(ranges)]
    for first, last in itertools.pairwise(bounds):
        yield ranges.rows(first, last)
