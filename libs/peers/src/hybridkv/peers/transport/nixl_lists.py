"""Which descriptors a read needs. Only sums.

They are made anew for each post. With lists that are prepared once, and chosen from by number, reads were not faster:
docs/reference/nixl.md has the numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hybridkv.peers.ranges import Int64Array, Ranges
from hybridkv.peers.transport.memory import RegisteredMemory

HOST_DEVICE = 0
"""As NIXL counts them."""


def descriptors(
    memory: RegisteredMemory, regions: Int64Array, offsets: Int64Array, num_bytes: Int64Array
) -> npt.NDArray[np.uint64]:
    """(address, bytes, device) of each range, which was checked."""
    devices = np.full(len(num_bytes), HOST_DEVICE, dtype=np.int64)
    return np.stack([memory.places(regions, offsets), num_bytes, devices], axis=1).astype(np.uint64)


def posts_of(ranges: Ranges, post_bytes: int) -> Iterator[Ranges]:
    """The read in pieces of about so many bytes, in order. One range is cut where it is longer."""
    ranges = ranges.cut(post_bytes)
    begins = np.cumsum(ranges.num_bytes) - ranges.num_bytes
    share = begins // post_bytes
    bounds = [0, *(np.flatnonzero(share[1:] != share[:-1]) + 1).tolist(), len(ranges)]
    for first, last in itertools.pairwise(bounds):
        yield ranges.rows(first, last)
