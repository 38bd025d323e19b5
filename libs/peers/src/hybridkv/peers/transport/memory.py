"""Table of registered memory. Private to the transports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridkv.peers.errors import PeersProtocolError
from hybridkv.peers.ranges import Int64Array
from hybridkv.peers.transport.contract import Region

MAX_REGIONS = 65536


class RegisteredMemory:
    """Immutable table of regions: one thread may check ranges while another replaces it. Numbers are not reused."""

    __slots__ = ("addresses", "num_bytes", "regions")

    def __init__(self, regions: tuple[Region | None, ...] = ()) -> None:
        self.regions = regions
        self.addresses = np.array([each.address if each else 0 for each in regions], dtype=np.int64)
        self.num_bytes = np.array([each.num_bytes if each else 0 for each in regions], dtype=np.int64)

    def with_regions(self, regions: Sequence[Region]) -> RegisteredMemory:
        """Table with more regions. Raises `PeersProtocolError` for an invalid memory range."""
        for region in regions:
            if region.address <= 0 or region.num_bytes <= 0 or region.address + region.num_bytes >= 1 << 63:
                extent = f"[{region.address:#x}, +{region.num_bytes})"
                raise PeersProtocolError(f"register: expected a range of memory, got {extent}")
        if len(self.regions) + len(regions) > MAX_REGIONS:
            raise PeersProtocolError(f"register: more than {MAX_REGIONS} regions")
        return RegisteredMemory((*self.regions, *regions))

    def without(self, numbers: Sequence[int]) -> RegisteredMemory:
        """Table without some regions. Raises `PeersProtocolError` for an unknown number."""
        for number in numbers:
            if not 0 <= number < len(self.regions) or self.regions[number] is None:
                raise PeersProtocolError(f"deregister: there is no region {number}")
        gone = set(numbers)
        return RegisteredMemory(tuple(None if at in gone else each for at, each in enumerate(self.regions)))

    def bounds_error(self, side: str, regions: Int64Array, offsets: Int64Array, num_bytes: Int64Array) -> str | None:
        """None if each range lies in one region, else a text about the first invalid range. Safe for any numbers."""
        if not len(num_bytes):
            return None
        is_wrong = (regions < 0) | (regions >= len(self.regions)) | (num_bytes <= 0) | (offsets < 0)
        known = ~is_wrong
        # Do not compute offset + num_bytes: it could overflow.
        is_wrong[known] = num_bytes[known] > self.num_bytes[regions[known]] - offsets[known]
        if not is_wrong.any():
            return None
        at = int(np.flatnonzero(is_wrong)[0])
        extent = f"[{int(offsets[at])}, +{int(num_bytes[at])}) of region {int(regions[at])}"
        return f"range {at}: {side} {extent} does not lie in registered memory"

    def places(self, regions: Int64Array, offsets: Int64Array) -> Int64Array:
        """Addresses of checked ranges."""
        return self.addresses[regions] + offsets
