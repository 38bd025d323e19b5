"""Descriptors of a read. Arithmetic only.

They are built for each post. Prepared lists, indexed by number, did not make reads faster: see docs/reference/nixl.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hybridkv.peers.ranges import Int64Array, Ranges
from hybridkv.peers.transport.memory import RegisteredMemory

HOST_DEVICE = 0
"""Device id of host memory in NIXL."""


def descriptors(
    memory: RegisteredMemory, regions: Int64Array, offsets: Int64Array, num_bytes: Int64Array
) -> npt.NDArray[np.uint64]:
    """(address, bytes, device) of each range. The ranges must be checked."""
    devices = np.full(len(num_bytes), HOST_DEVICE, dtype=np.int64)
    return np.stack([memory.places(regions, offsets), num_bytes, devices], axis=1).astype(np.uint64)


def posts_of(ranges: Ranges, post_bytes: int) -> Iterator[Ranges]:
    """Splits a read into posts of about `post_bytes`, in order. Longer ranges are cut."""
    ranges = ranges.cut(post_bytes)
    begins = np.cumsum(ranges.num_bytes) - ranges.num_bytes
    share = begins // post_bytes
    bounds = [0, *(np.flatnonzero(share[1:] != share[:-1]) + 1).tolist(), len(ranges)]
    for first, last in itertools.pairwise(bounds):
        yield ranges.rows(first, last)
