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
    """Digest function with this many threads. Callers with the same number share the threads, one call at a time."""
    return MemoryCopier(num_threads).digest


def view_digest(views: Sequence[memoryview]) -> bytes:
    """XXH3-128 of the concatenated contiguous views, in one thread."""
    return view_digests([views])[0]


def view_digests(records: Sequence[Sequence[memoryview]]) -> list[bytes]:
    """`view_digest` of each record, in one call."""
    arrays = [np.frombuffer(view, dtype=np.uint8) for views in records for view in views]
    addresses = np.array([array.__array_interface__["data"][0] for array in arrays], dtype=np.int64)
    sizes = np.array([array.nbytes for array in arrays], dtype=np.int64)
    digests = records_digest(1)(addresses, sizes, np.cumsum([len(views) for views in records], dtype=np.int64))
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
