"""Chooses who takes checksums of memory: the C++ of `hybridkv.native`, or xxhash. Private to the tiers of this library.

Both give XXH3-128 with seed 0. The C++ reads several places at once, which for memory that is not in a cache is the
faster way, and many records in one call without the interpreter lock.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from hybridkv.native import MemoryCopier

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16

Integers = npt.NDArray[np.int64]

RecordsDigest = Callable[[Integers, Integers, Integers], bytes]
"""Given addresses, their bytes and the ends of records: XXH3-128 of each record, one behind the other. Record i is
places `record_ends[i - 1]` to `record_ends[i]`, in order; the last end is the number of places. The caller keeps the
memory alive."""


@cache
def records_digest(num_threads: int) -> RecordsDigest:
    """What takes checksums of records in this process, by so many threads: one set of threads for each number, whose
    callers take turns. xxhash has one thread."""
    copier = _native_copier()
    return digest_by_xxhash if copier is None else copier(num_threads).digest


def view_digest(views: Sequence[memoryview]) -> bytes:
    """XXH3-128 over the concatenation of contiguous views, by this thread."""
    arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
    addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
    sizes = np.array([array.nbytes for array in arrays], dtype=np.int64)
    return records_digest(1)(addresses, sizes, np.array([len(arrays)], dtype=np.int64))


def digest_by_xxhash(addresses: Integers, num_bytes: Integers, record_ends: Integers) -> bytes:
    """The reference."""
    places = list(zip(addresses.tolist(), num_bytes.tolist(), strict=True))
    digests, start = [], 0
    for end in record_ends.tolist():
        digest = xxhash.xxh3_128()
        for address, size in places[start:end]:
            digest.update((ctypes.c_ubyte * size).from_address(address))
        digests.append(digest.digest())
        start = end
    return b"".join(digests)


@cache
def _native_copier() -> type[MemoryCopier] | None:
    """None where it is not installed, which is said once."""
    try:
        from hybridkv.native import MemoryCopier
    except ImportError as error:
        logger.warning(
            "hybridkv.native cannot be imported (%s): checksums are taken by xxhash; "
            "hint: install a hybridkv-vllm wheel that was built for this Python",
            error,
        )
        return None
    return MemoryCopier
