"""This rank's memory as its peers and its own reads see it: the KV cache, the table of leases, and room to read leases.

A number of a region is its place in `regions`; the table is the last but one, and so a peer knows where it is.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridkv.connectors.vllm.nixl.describing import Region

SCRATCH_SLOTS = 256
"""Leases that may be read at the same time."""

Columns = Sequence[npt.NDArray[np.int64]]


class RankMemory:
    """What of this process peers may read, and what is read into.

    Args:
        kv: the engine's allocations.
        max_leases: entries of the table.
    """

    def __init__(self, kv: Sequence[Region], max_leases: int) -> None:
        self._table = np.zeros((max_leases, 2), dtype="<u8")
        self._scratch = np.zeros((SCRATCH_SLOTS, 2), dtype="<u8")
        own = [Region(array.ctypes.data, array.nbytes) for array in (self._table, self._scratch)]
        self.regions = (*kv, *own)
        self.scratch_region = len(self.regions) - 1
        self._free = list(range(SCRATCH_SLOTS))
        self._views: dict[int, memoryview] = {}
        self._lock = threading.Lock()

    @staticmethod
    def table_region(num_regions: int) -> int:
        """Which of a peer's regions is its table."""
        return num_regions - 2

    def write_slot(self, slot: int, nonce: int) -> None:
        """Puts a lease's nonce into the table, or `NO_NONCE`."""
        self._table[slot] = (nonce, 0)

    # Reading others' tables.

    def take_scratch(self) -> int | None:
        """Room for one lease; None where as many as there is room for are being read."""
        if not self._free:
            return None
        place = self._free.pop()
        self._scratch[place] = (0, 0)
        return place

    def give_scratch(self, place: int) -> None:
        """The room is free again."""
        self._free.append(place)

    def shows(self, place: int, nonce: int) -> bool:
        """Whether what was read there is this lease."""
        found, rest = (int(word) for word in self._scratch[place])
        return found == nonce and rest == 0

    # Digests.

    def digests(self, regions: Columns, ends: npt.NDArray[np.int64]) -> bytes:
        """Digest i is of the ranges from `ends[i - 1]` to `ends[i]`. Any thread may ask.

        Args:
            regions: columns of region, offset and size. They may be a stranger's.

        Raises:
            ValueError: a range does not lie in the KV cache.
        """
        numbers, offsets, sizes = regions
        sizes_of = np.array([region.num_bytes for region in self.regions[:-2]], dtype=np.int64)
        known = (numbers >= 0) & (numbers < len(sizes_of)) & (offsets >= 0) & (sizes > 0)
        if not known.all() or bool((sizes > sizes_of[numbers] - offsets).any()):
            raise ValueError("a range outside of the KV cache")
        views = [
            self._view(number)[offset : offset + size]
            for number, offset, size in zip(numbers.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
        ]
        found, first = [], 0
        for end in ends.tolist():
            found.append(_digest(views[first:end]))
            first = end
        return b"".join(found)

    def _view(self, number: int) -> memoryview:
        with self._lock:
            if number not in self._views:
                region = self.regions[number]
                self._views[number] = memoryview((ctypes.c_char * region.num_bytes).from_address(region.address)).cast(
                    "B"
                )
            return self._views[number]


def _digest(views: Sequence[memoryview]) -> bytes:
    import xxhash

    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    return digest.digest()
