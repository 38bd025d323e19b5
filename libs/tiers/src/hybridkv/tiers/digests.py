"""Checksums of memory: XXH3-128, seed 0, of many records in one call, without the GIL. Private to this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.native import MemoryCopier

DIGEST_BYTES = 16

Integers = npt.NDArray[np.int64]

RecordsDigest = Callable[[Integers, Integers, Integers], bytes]
"""`digest(addresses, sizes, record_ends)`: the XXH3-128 of each record, concatenated. Record i consists of the ranges
`record_ends[i - 1]` to `record_ends[i]`, in order; the last end is the number of ranges. The caller keeps the memory
alive."""


@cache
def records_digest(num_threads: int) -> RecordsDigest:
    """Digest function with this many threads. Callers with the same number share the threads, and take turns."""
    return MemoryCopier(num_threads).digest


def view_digest(views: Sequence[memoryview]) -> bytes:
    """XXH3-128 of the concatenated contiguous views, in one thread."""
    arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
    addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
    sizes = np.array([array.nbytes for array in arrays], dtype=np.int64)
    return records_digest(1)(addresses, sizes, np.array([len(arrays)], dtype=np.int64))
