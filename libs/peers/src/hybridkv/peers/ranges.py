"""Byte ranges from remote to local regions, as columns of numbers, and merging of adjacent ranges.

A `Template` holds the runs of one pair of blocks, independent of block ids. `Template.at` makes ranges for block ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.peers.errors import PeersProtocolError

Int64Array = npt.NDArray[np.int64]


COLUMNS = ("local_regions", "local_offsets", "remote_regions", "remote_offsets", "num_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Byte ranges that are read from a peer's regions into local regions. Bounds are not checked here.

    Range i has `num_bytes[i]` bytes, at `remote_offsets[i]` in region `remote_regions[i]` of the peer and at
    `local_offsets[i]` in local region `local_regions[i]`. The five int64 arrays have equal length, become read-only and
    belong to this value. The transport checks the bounds, because a peer may send any numbers.
    """

    local_regions: Int64Array
    local_offsets: Int64Array
    remote_regions: Int64Array
    remote_offsets: Int64Array
    num_bytes: Int64Array

    def __post_init__(self) -> None:
        for name in COLUMNS:
            array = getattr(self, name)
            if array.dtype != np.int64 or array.ndim != 1 or len(array) != len(self.num_bytes):
                expected = f"a one-dimensional int64 array of length {len(self.num_bytes)}"
                raise PeersProtocolError(f"{name}: expected {expected}, got {array.dtype}{list(array.shape)}")
            array.setflags(write=False)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int, int]]) -> Ranges:
        """Ranges from rows of (local_region, local_offset, remote_region, remote_offset, num_bytes)."""
        table = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
        return cls(*(table[:, column].copy() for column in range(5)))

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def columns(self) -> tuple[Int64Array, ...]:
        return self.local_regions, self.local_offsets, self.remote_regions, self.remote_offsets, self.num_bytes

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @property
    def overlap(self) -> bool:
        """True if two ranges write the same local byte."""
        order = np.lexsort((self.local_offsets, self.local_regions))
        regions, offsets = self.local_regions[order], self.local_offsets[order]
        ends = offsets + self.num_bytes[order]
        return bool(((regions[1:] == regions[:-1]) & (offsets[1:] < ends[:-1])).any())

    def rows(self, first: int, last: int) -> Ranges:
        """Ranges [first, last), in order."""
        return Ranges(*(column[first:last] for column in self.columns))

    def cut(self, max_bytes: int) -> Ranges:
        """The same bytes in the same order, with no range longer than `max_bytes`."""
        if not len(self) or int(self.num_bytes.max()) <= max_bytes:
            return self
        pieces = -(-self.num_bytes // max_bytes)
        row = np.repeat(np.arange(len(self), dtype=np.int64), pieces)
        first = np.cumsum(pieces) - pieces
        into = (np.arange(len(row), dtype=np.int64) - first[row]) * max_bytes
        return Ranges(
            self.local_regions[row],
            self.local_offsets[row] + into,
            self.remote_regions[row],
            self.remote_offsets[row] + into,
            np.minimum(self.num_bytes[row] - into, max_bytes),
        )


def joined(parts: Sequence[Ranges]) -> Ranges:
    """Concatenates ranges, without merging."""
    if not parts:
        return Ranges(*(np.empty(0, dtype=np.int64) for _ in range(5)))
    return Ranges(*(np.concatenate(columns) for columns in zip(*(part.columns for part in parts), strict=True)))


def merged(ranges: Ranges) -> Ranges:
    """The same bytes in the fewest ranges, ordered by local region, remote region and local offset. Merges ranges that
    are adjacent on both sides."""
    order = np.lexsort((ranges.local_offsets, ranges.remote_regions, ranges.local_regions))
    lr, lo, rr, ro, size = (column[order] for column in ranges.columns)
    starts = _run_starts((lr, rr), ((lo, size), (ro, size)))
    return Ranges(lr[starts], lo[starts], rr[starts], ro[starts], np.add.reduceat(size, starts) if size.size else size)


class Template(NamedTuple):
    """Byte runs of one local and one remote block, independent of block ids. One entry per run.

    Args:
        local: array of shape (3, runs): region, offset of block 0, and block stride in bytes.
        remote: the same for the remote side.
        num_bytes: size of each run.
    """

    local: Int64Array
    remote: Int64Array
    num_bytes: Int64Array

    def at(self, local_ids: Int64Array, remote_ids: Int64Array) -> Ranges:
        """Ranges for pairs of blocks, in the order of the pairs, without merging."""
        count = local_ids.size

        def columns(side: Int64Array, ids: Int64Array) -> tuple[Int64Array, Int64Array]:
            regions, offsets, strides = side
            places: Int64Array = (offsets[None, :] + ids[:, None] * strides[None, :]).reshape(-1)
            return np.tile(regions, count), places

        return Ranges(
            *columns(self.local, local_ids), *columns(self.remote, remote_ids), np.tile(self.num_bytes, count)
        )


def template(local: Sequence[Int64Array], remote: Sequence[Int64Array], num_bytes: Sequence[Int64Array]) -> Template:
    """Template of several parts. Merges runs that are adjacent in every block.

    Args:
        local: for each part an array of shape (3, n), as in `Template`.
        remote: the same for the remote side.
        num_bytes: n sizes for each part.
    """
    if not num_bytes:
        empty = np.empty((3, 0), dtype=np.int64)
        return Template(empty, empty, np.empty(0, dtype=np.int64))
    ours, theirs, size = np.concatenate(local, axis=1), np.concatenate(remote, axis=1), np.concatenate(num_bytes)
    order = np.lexsort((ours[1], theirs[2], ours[2], theirs[0], ours[0]))
    ours, theirs, size = ours[:, order], theirs[:, order], size[order]
    starts = _run_starts((ours[0], theirs[0], ours[2], theirs[2]), ((ours[1], size), (theirs[1], size)))
    return Template(ours[:, starts], theirs[:, starts], np.add.reduceat(size, starts) if size.size else size)


def _run_starts(same: Sequence[Int64Array], places: Sequence[tuple[Int64Array, Int64Array]]) -> Int64Array:
    """Indexes of entries that start a run: entries that differ in `same` from the entry before, or are not adjacent to
    the entry before."""
    begins = np.ones(same[0].size, dtype=bool)
    begins[1:] = False
    for column in same:
        begins[1:] |= column[1:] != column[:-1]
    for offset, size in places:
        begins[1:] |= offset[1:] != offset[:-1] + size[:-1]
    return np.flatnonzero(begins)
