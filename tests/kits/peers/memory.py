"""Memory for tests: regions with bytes that identify their region and offset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybridkv.peers.transport import Ranges, Region

Bytes = npt.NDArray[np.uint8]

POISON = 0xA5


def pattern(region: int, num_bytes: int, seed: int = 0) -> Bytes:
    """Bytes that differ between regions and between nearby offsets."""
    places = np.arange(num_bytes, dtype=np.uint64)
    mixed = (places + np.uint64(1 + region * 1_000_003 + seed * 7_919)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


def poisoned(num_bytes: int) -> Bytes:
    return np.full(num_bytes, POISON, dtype=np.uint8)


def region_of(memory: Bytes) -> Region:
    """The caller keeps `memory` alive."""
    return Region(memory.ctypes.data, memory.nbytes)


def expected(local: Sequence[Bytes], remote: Sequence[Bytes], ranges: Ranges) -> list[Bytes]:
    """Content of local memory after a read, computed with a plain loop."""
    after = [each.copy() for each in local]
    columns = (
        ranges.local_regions,
        ranges.local_offsets,
        ranges.remote_regions,
        ranges.remote_offsets,
        ranges.num_bytes,
    )
    for to, at, source, begin, size in zip(*(column.tolist() for column in columns), strict=True):
        after[to][at : at + size] = remote[source][begin : begin + size]
    return after
