"""Which bytes are read into which: columns of numbers, checked where they are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hybridkv.peers.errors import PeersProtocolError

Integers: TypeAlias = npt.NDArray[np.int64]

COLUMNS = ("local_regions", "local_offsets", "remote_regions", "remote_offsets", "num_bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Range i: `num_bytes[i]` bytes at `remote_offsets[i]` of the peer's region, into ours at `local_offsets[i]`.

    Five int64 arrays of one length, which become read-only and belong to this value. What they point to is checked by
    who reads and by who is read, not here: the numbers of a peer may be anything.
    """

    local_regions: Integers
    local_offsets: Integers
    remote_regions: Integers
    remote_offsets: Integers
    num_bytes: Integers

    def __post_init__(self) -> None:
        for name in COLUMNS:
            array = getattr(self, name)
            if array.dtype != np.int64 or array.ndim != 1 or len(array) != len(self.num_bytes):
                expected = f"a one-dimensional int64 array of length {len(self.num_bytes)}"
                raise PeersProtocolError(f"{name}: expected {expected}, got {array.dtype}{list(array.shape)}")
            array.setflags(write=False)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int, int]]) -> Ranges:
        """From (local_region, local_offset, remote_region, remote_offset, num_bytes)."""
        table = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
        return cls(*(table[:, column].copy() for column in range(5)))

    def __len__(self) -> int:
        return len(self.num_bytes)

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    def rows(self, first: int, last: int) -> Ranges:
        """Some of them, in order."""
        return Ranges(*(getattr(self, name)[first:last] for name in COLUMNS))

    def cut(self, max_bytes: int) -> Ranges:
        """The same bytes in the same order, no range longer than `max_bytes`."""
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

