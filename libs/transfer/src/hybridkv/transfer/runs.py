"""Runs of bytes, the input of copy engines: addresses and sizes, without blocks, groups, layers or tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt


class TransferError(Exception):
    """Base of the errors of `hybridkv.transfer`."""


class RunsError(TransferError, ValueError):
    """Invalid arrays: lengths differ, or sizes are not positive."""


class CopyEngineError(TransferError, RuntimeError):
    """Wrong use of a copy engine: after `close`, with a job id in use, or with invalid memory."""


Integers: TypeAlias = npt.NDArray[np.int64]

Extent: TypeAlias = tuple[int, int]
"""(address, num_bytes)"""


@dataclass(frozen=True, slots=True, eq=False)
class CopyRuns:
    """Runs: `num_bytes[i]` bytes from address `sources[i]` to address `destinations[i]`, for each i in order.

    Three int64 arrays of one length. They become read-only and belong to this value. `RunsError` if a size is not
    positive or an address is negative. A destination must not overlap another destination or any source: the result
    would depend on the order, which `coalesce` and parallel copies change. This is not checked.
    """

    sources: Integers
    destinations: Integers
    num_bytes: Integers

    def __post_init__(self) -> None:
        for name in ("sources", "destinations", "num_bytes"):
            array = getattr(self, name)
            if array.dtype != np.int64 or array.ndim != 1 or len(array) != len(self.sources):
                expected = f"a one-dimensional int64 array of length {len(self.sources)}"
                raise RunsError(f"{name}: expected {expected}, got {array.dtype}{list(array.shape)}")
            array.setflags(write=False)
        if len(self.num_bytes) and int(self.num_bytes.min()) <= 0:
            raise RunsError(f"num_bytes: expected sizes > 0, got {int(self.num_bytes.min())}")
        for name in ("sources", "destinations"):
            array = getattr(self, name)
            if len(array) and int(array.min()) < 0:
                raise RunsError(f"{name}: expected addresses >= 0, got {int(array.min())}")

    @classmethod
    def empty(cls) -> CopyRuns:
        return cls.of([])

    @classmethod
    def of(cls, triples: Iterable[tuple[int, int, int]]) -> CopyRuns:
        """From (source, destination, num_bytes)."""
        table = np.array(list(triples), dtype=np.int64).reshape(-1, 3)
        return cls(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())

    @classmethod
    def concatenate(cls, parts: Sequence[CopyRuns]) -> CopyRuns:
        if not parts:
            return cls.empty()
        return cls(
            np.concatenate([part.sources for part in parts]),
            np.concatenate([part.destinations for part in parts]),
            np.concatenate([part.num_bytes for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    def triples(self) -> list[tuple[int, int, int]]:
        """(source, destination, num_bytes) as Python integers."""
        return list(zip(self.sources.tolist(), self.destinations.tolist(), self.num_bytes.tolist(), strict=True))

    def reversed(self) -> CopyRuns:
        """Runs in the opposite direction, from each destination to its source."""
        return CopyRuns(self.destinations, self.sources, self.num_bytes)

    def coalesce(self) -> CopyRuns:
        """The same bytes in fewer runs: joins runs that are adjacent on both sides."""
        if len(self) < 2:
            return self
        continues = (self.sources[1:] == self.sources[:-1] + self.num_bytes[:-1]) & (
            self.destinations[1:] == self.destinations[:-1] + self.num_bytes[:-1]
        )
        starts = np.concatenate(([0], np.flatnonzero(~continues) + 1))
        return CopyRuns(self.sources[starts], self.destinations[starts], np.add.reduceat(self.num_bytes, starts))

    def select(self, which: npt.NDArray[np.bool_]) -> CopyRuns:
        """Runs at the true positions of a mask."""
        if which.all():
            return self
        if not which.any():
            return CopyRuns.empty()
        return CopyRuns(self.sources[which], self.destinations[which], self.num_bytes[which])

    def cut_at_multiples(self, num_bytes: int) -> CopyRuns:
        """The same bytes, cut at each source or destination address that is a multiple of `num_bytes`."""
        if not len(self):
            return self
        longest = int(self.num_bytes.max())
        sides = [
            addresses
            for addresses in (self.sources, self.destinations)
            if int(addresses.min()) // num_bytes != (int(addresses.max()) + longest - 1) // num_bytes
        ]
        if not sides:  # as usual: no multiple lies between the lowest and the highest address
            return self
        begins = np.cumsum(self.num_bytes) - self.num_bytes
        cuts: list[int] = []
        for addresses in sides:
            offsets = addresses % num_bytes
            for run in np.flatnonzero(offsets + self.num_bytes > num_bytes).tolist():
                into_run = range(num_bytes - int(offsets[run]), int(self.num_bytes[run]), num_bytes)
                cuts += [int(begins[run]) + position for position in into_run]
        return self._cut_at(np.array(cuts, dtype=np.int64)) if cuts else self

    def split(self, num_parts: int) -> list[CopyRuns]:
        """Split into at most `num_parts` non-empty parts of nearly equal bytes. Cuts runs if needed."""
        if num_parts < 1:
            raise RunsError(f"num_parts: expected a number >= 1, got {num_parts}")
        if not len(self):
            return []
        total = self.total_bytes
        num_parts = min(num_parts, total)
        cuts = np.array([total * part // num_parts for part in range(1, num_parts)], dtype=np.int64)
        pieces = self._cut_at(cuts)
        ends = np.searchsorted(np.cumsum(pieces.num_bytes), cuts) + 1
        bounds = [0, *ends.tolist(), len(pieces)]
        return [pieces._slice(first, last) for first, last in itertools.pairwise(bounds)]

    def _slice(self, first: int, last: int) -> CopyRuns:
        return CopyRuns(self.sources[first:last], self.destinations[first:last], self.num_bytes[first:last])

    def _cut_at(self, positions: Integers) -> CopyRuns:
        """Cut runs at these byte positions, counted over all runs. Each position is below the total."""
        ends = np.cumsum(self.num_bytes)
        bounds = np.union1d(np.concatenate(([0], ends)), positions)
        run = np.searchsorted(ends, bounds[:-1], side="right")
        into_run = bounds[:-1] - (ends - self.num_bytes)[run]
        return CopyRuns(self.sources[run] + into_run, self.destinations[run] + into_run, np.diff(bounds))
