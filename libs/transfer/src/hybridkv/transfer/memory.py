"""Which memory runs may touch. Private to the engines of this library."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybridkv.transfer.runs import CopyEngineError, CopyRuns, Integers

_HIGHEST_ADDRESS = (1 << 63) - 1


class AddressRanges:
    """Some ranges of addresses. Immutable, so that one thread may ask while another replaces it."""

    __slots__ = ("_ends", "_ranges", "_starts")

    def __init__(self, ranges: tuple[tuple[int, int], ...] = ()) -> None:
        self._ranges = tuple(sorted(ranges))
        self._starts = np.array([start for start, _ in self._ranges], dtype=np.int64)
        self._ends: Integers = np.maximum.accumulate(np.array([end for _, end in self._ranges], dtype=np.int64))

    def with_range(self, address: int, num_bytes: int) -> AddressRanges:
        return AddressRanges((*self._ranges, (address, address + num_bytes)))

    def contain(self, addresses: Integers) -> npt.NDArray[np.bool_]:
        """For each address, whether it lies in one of the ranges."""
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        found = index >= 0
        found[found] = addresses[found] < self._ends[index[found]]
        return found


class RegisteredMemory:
    """An immutable set of named ranges, so that one thread may check while another replaces it with a larger one."""

    __slots__ = ("_names", "_reaches", "_regions", "_starts")

    def __init__(self, regions: tuple[tuple[int, int, str], ...] = ()) -> None:
        self._regions = tuple(sorted(regions))
        self._starts = np.array([start for start, _, _ in self._regions], dtype=np.int64)
        # The farthest end of all ranges that start at or before each start: overlaps need no other treatment.
        self._reaches: Integers = np.maximum.accumulate(
            np.array([start + num_bytes for start, num_bytes, _ in self._regions], dtype=np.int64)
        )
        self._names = [name for _, _, name in self._regions]

    def with_region(self, address: int, num_bytes: int, name: str) -> RegisteredMemory:
        if address < 0 or num_bytes <= 0 or address + num_bytes > _HIGHEST_ADDRESS:
            raise CopyEngineError(f"register {name}: expected a range of memory, got [{address:#x}, +{num_bytes})")
        return RegisteredMemory((*self._regions, (address, num_bytes, name)))

    def why_not(self, runs: CopyRuns) -> str | None:
        """None when each run lies, on both sides, in one range."""
        return self._why_not("source", runs.sources, runs.num_bytes) or self._why_not(
            "destination", runs.destinations, runs.num_bytes
        )

    def _why_not(self, side: str, addresses: Integers, num_bytes: Integers) -> str | None:
        if len(addresses) and self._hold(int(addresses.min()), int(addresses.max()) + int(num_bytes.max())):
            return None
        region = np.searchsorted(self._starts, addresses, side="right") - 1
        is_outside = region < 0
        known = ~is_outside
        # Not address + num_bytes: that could overflow and look small.
        is_outside[known] = num_bytes[known] > self._reaches[region[known]] - addresses[known]
        if not is_outside.any():
            return None
        first = int(np.flatnonzero(is_outside)[0])
        nearest = f"; the nearest before it is {self._names[int(region[first])]!r}" if region[first] >= 0 else ""
        extent = f"[{int(addresses[first]):#x}, +{int(num_bytes[first])})"
        return f"run {first}: {side} {extent} does not lie in registered memory{nearest}"

    def _hold(self, start: int, end: int) -> bool:
        """Whether one range holds all of [start, end)."""
        region = int(np.searchsorted(self._starts, start, side="right")) - 1
        return region >= 0 and end <= int(self._reaches[region])
