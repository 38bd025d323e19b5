"""Chooses who takes checksums of memory: the C++ of `hybridkv.native`, or xxhash. Private to the tiers of this library.

Both give XXH3-128 with seed 0. The C++ reads several places at once, which for memory that is not in a cache is the
faster way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import xxhash

logger = logging.getLogger(__name__)

Digest = Callable[[Sequence[memoryview]], bytes]
"""The 16 bytes of XXH3-128 over the concatenation of contiguous views."""


@cache
def view_digest() -> Digest:
    """What takes checksums in this process. Chosen once, and said once."""
    try:
        from hybridkv.native import MemoryCopier
    except ImportError as error:
        logger.warning(
            "hybridkv.native cannot be imported (%s): checksums are taken by xxhash; "
            "hint: install a hybridkv-vllm wheel that was built for this Python",
            error,
        )
        return digest_by_xxhash
    copier = MemoryCopier()

    def digest(views: Sequence[memoryview]) -> bytes:
        arrays = [np.frombuffer(view, dtype=np.uint8) for view in views]
        addresses = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
        sizes = np.array([array.nbytes for array in arrays], dtype=np.int64)
        return copier.digest(addresses, sizes, np.array([len(arrays)], dtype=np.int64))

    return digest


def digest_by_xxhash(views: Sequence[memoryview]) -> bytes:
    """The reference."""
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    return digest.digest()
