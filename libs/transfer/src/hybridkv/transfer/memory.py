"""Registered memory: the address ranges that runs may use. Private to the engines of this library."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from hybridkv.transfer.runs import CopyEngineError, CopyRuns, Integers

_MOST_PATTERNS = 64
"""If the shape changes this often or more between adjacent rows, the runs are checked one by one."""

_HIGHEST_ADDRESS = (1 << 63) - 1


class AddressRanges:
    """Immutable set of address ranges. One thread can read it while another replaces it."""

    __slots__ = ("_ranges", "_reaches", "_starts")

    def __init__(self, ranges: tuple[tuple[int, int], ...] = ()) -> None:
        self._ranges = tuple(sorted(ranges))
        self._starts = np.array([start for start, _ in self._ranges], dtype=np.int64)
        self._reaches: Integers = np.maximum.accumulate(np.array([end for _, end in self._ranges], dtype=np.int64))

    def with_range(self, address: int, num_bytes: int) -> AddressRanges:
        return AddressRanges((*self._ranges, (address, address + num_bytes)))

    def contain_all(self, start: int, end: int) -> bool | None:
        """True if one range contains all of [start, end), False if no range overlaps it, else None."""
        first, last = (np.searchsorted(self._starts, (start, end - 1), side="right") - 1).tolist()
        if first >= 0 and end <= self._reaches[first]:
            return True
        return False if first == last and (first < 0 or start >= self._reaches[first]) else None

    def contain(self, addresses: Integers) -> npt.NDArray[np.bool_]:
        """True for each address that lies in one of the ranges."""
        if not len(addresses):
            return np.zeros(0, dtype=np.bool_)
        low, high = int(addresses.min()), int(addresses.max())
        first, last = (np.searchsorted(self._starts, (low, high), side="right") - 1).tolist()
        # Usually all addresses lie in one range, or between two ranges.
        if first == last and (first < 0 or low >= self._reaches[first] or high < self._reaches[first]):
            return np.full(len(addresses), first >= 0 and low < self._reaches[first])
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        found = index >= 0
        found[found] = addresses[found] < self._reaches[index[found]]
        return found


class RegisteredRanges:
    """Immutable set of named ranges. One thread can check runs while another replaces the set with a larger one."""

    __slots__ = ("_names", "_reaches", "_regions", "_starts")

    def __init__(self, regions: tuple[tuple[int, int, str], ...] = ()) -> None:
        self._regions = tuple(sorted(regions))
        self._starts = np.array([start for start, _, _ in self._regions], dtype=np.int64)
        # The largest end of all ranges up to each start. This handles overlaps.
        self._reaches: Integers = np.maximum.accumulate(
            np.array([start + num_bytes for start, num_bytes, _ in self._regions], dtype=np.int64)
        )
        self._names = [name for _, _, name in self._regions]

    def with_region(self, address: int, num_bytes: int, name: str) -> RegisteredRanges:
        if address < 0 or num_bytes <= 0 or address + num_bytes > _HIGHEST_ADDRESS:
            raise CopyEngineError(f"register {name}: expected a range of memory, got [{address:#x}, +{num_bytes})")
        return RegisteredRanges((*self._regions, (address, num_bytes, name)))

    def check(self, runs: CopyRuns) -> str | None:
        """None if the source of each run lies in one range, and the destination too; else the failure."""
        if not len(runs):
            return None
        spans = runs.spans
        if not self._contains(*spans[:2]) and not self._contain_rows(runs.row_table, 0):
            failure = self._check_side("source", runs.sources, runs.num_bytes)
            if failure is not None:
                return failure
        if not self._contains(*spans[2:]) and not self._contain_rows(runs.row_table, 1):
            return self._check_side("destination", runs.destinations, runs.num_bytes)
        return None

    def _contain_rows(self, table: Integers | None, side: int) -> bool:
        """True if each run of each row lies in one range. False if this is not true, or was not decided.

        Adjacent rows of one shape are checked together. Each run of the first row is looked up. Another row passes if
        its distance from the first row is so small that all its runs lie in the same ranges.
        """
        if table is None:
            return False
        firsts, shapes = table[:, side], table[:, [2 + side, 4, 5]]
        starts = np.flatnonzero((shapes[1:] != shapes[:-1]).any(axis=1)) + 1
        if len(starts) >= _MOST_PATTERNS:
            return False
        for begin, end in itertools.pairwise([0, *starts.tolist(), len(table)]):
            step, num_bytes, num_runs = shapes[begin].tolist()
            runs = firsts[begin] + np.arange(num_runs, dtype=np.int64) * step
            region = np.searchsorted(self._starts, runs, side="right") - 1
            if int(region.min()) < 0:
                return False
            below = int((runs - self._starts[region]).min())
            above = int((self._reaches[region] - runs).min()) - num_bytes
            low, high = int(firsts[begin:end].min()), int(firsts[begin:end].max())
            if above < 0 or low < int(firsts[begin]) - below or high > int(firsts[begin]) + above:
                return False
        return True

    def _check_side(self, side: str, addresses: Integers, num_bytes: Integers) -> str | None:
        region = np.searchsorted(self._starts, addresses, side="right") - 1
        is_outside = region < 0
        known = ~is_outside
        # address + num_bytes could overflow.
        is_outside[known] = num_bytes[known] > self._reaches[region[known]] - addresses[known]
        if not is_outside.any():
            return None
        first = int(np.flatnonzero(is_outside)[0])
        nearest = f"; the nearest before it is {self._names[int(region[first])]!r}" if region[first] >= 0 else ""
        extent = f"[{int(addresses[first]):#x}, +{int(num_bytes[first])})"
        return f"run {first}: {side} {extent} does not lie in one registered range{nearest}"

    def _contains(self, start: int, end: int) -> bool:
        """True if one range contains all of [start, end)."""
        region = int(np.searchsorted(self._starts, start, side="right")) - 1
        return region >= 0 and end <= int(self._reaches[region])
