"""Checksums of memory: XXH3-128 with seed 0, of many records in one call, without the interpreter lock.

Private to the tiers of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from hybridkv.tiers.native import MemoryCopier

DIGEST_BYTES = 16

Integers = npt.NDArray[np.int64]

RecordsDigest = Callable[[Integers, Integers, Integers], bytes]
"""Given addresses, their bytes and the ends of records: XXH3-128 of each record, one behind the other. Record i is
places `record_ends[i - 1]` to `record_ends[i]`, in order; the last end is the number of places. The caller keeps the
memory alive."""


@cache
def records_digest(num_threads: int) -> RecordsDigest:
    """What takes checksums of records in this process, by so many threads: one set of threads for each number, whose
    callers take turns."""
    return MemoryCopier(num_threads).digest


def view_digest(views: Sequence[memoryview]) -> bytes:
    """XXH3-128 over the concatenation of contiguous views, by this thread."""
    arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
    addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
    sizes = np.array([array.nbytes for array in arrays], dtype=np.int64)
    return records_digest(1)(addresses, sizes, np.array([len(arrays)], dtype=np.int64))
