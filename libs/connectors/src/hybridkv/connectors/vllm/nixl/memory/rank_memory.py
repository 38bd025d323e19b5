"""This rank's memory as its peers and its own reads see it: the KV cache, the table of leases, and room to read leases.

A number of a region is its place in `regions`; the table is the last but one, and so a peer knows where it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from hybridkv.connectors.vllm.common.identity.background import Background, Outcome
from hybridkv.connectors.vllm.nixl.memory.description import MemoryRegion
from hybridkv.peers.digests import DigestRuns, plain_digester

SCRATCH_SLOTS = 256
"""Leases that may be read at the same time."""


class NixlRankMemory:
    """What of this process peers may read, and what is read into.

    Args:
        kv: the engine's allocations.
        max_leases: entries of the table.
    """

    def __init__(self, kv: Sequence[MemoryRegion], max_leases: int) -> None:
        self._table = np.zeros((max_leases, 2), dtype="<u8")
        self._scratch = np.zeros((SCRATCH_SLOTS, 2), dtype="<u8")
        own = [MemoryRegion(array.ctypes.data, array.nbytes) for array in (self._table, self._scratch)]
        self.regions = (*kv, *own)
        self.scratch_region = len(self.regions) - 1
        self._free = list(range(SCRATCH_SLOTS))
        self._views = [_view(region) for region in kv]
        self._digester = plain_digester(self._views, xxhash.xxh3_128)

    @staticmethod
    def table_region(num_regions: int) -> int:
        """Which of a peer's regions is its table."""
        return num_regions - 2

    def write_slot(self, slot: int, nonce: int) -> None:
        """Puts a lease's nonce into the table, or `NO_NONCE`."""
        self._table[slot] = (nonce, 0)

    # Reading others' tables.

    def take_scratch(self) -> int | None:
        """Room for one lease; None where as many as there is room for are being read."""
        if not self._free:
            return None
        place = self._free.pop()
        self._scratch[place] = (0, 0)
        return place

    def give_scratch(self, place: int) -> None:
        """The room is free again."""
        self._free.append(place)

    def has_nonce(self, place: int, nonce: int) -> bool:
        """Whether what was read there is this lease."""
        found, rest = (int(word) for word in self._scratch[place])
        return found == nonce and rest == 0

    # Digests.

    def digests(self, runs: DigestRuns) -> list[bytes]:
        """XXH3-128 of runs in the KV cache. Any thread may ask.

        Raises:
            ValueError: a run leaves its region.
        """
        return list(self._digester(runs))


def _view(region: MemoryRegion) -> memoryview:
    return memoryview((ctypes.c_char * region.num_bytes).from_address(region.address)).cast("B")


INLINE_DIGEST_BYTES = 4 << 20
"""Digested in a fraction of a millisecond, which is how long the agent's thread may be held up."""


class DigestThread(Background):
    """Calls come from one thread.

    Args:
        memory: that is digested.
        wake: has the calling thread look again.
    """

    def __init__(self, memory: NixlRankMemory, wake: Callable[[], None]) -> None:
        super().__init__("hybridkv-peer-digests")
        self._memory = memory
        self._wake = wake

    def take(self, runs: DigestRuns) -> Outcome[list[bytes]] | None:
        """None where too much is waiting already."""
        if int(runs.num_bytes.sum()) <= INLINE_DIGEST_BYTES:
            outcome: Outcome[list[bytes]] = Outcome()
            outcome.run(lambda: self._memory.digests(runs))
            return outcome
        found = self.submit(lambda: self._memory.digests(runs))
        # Behind it, so that it is done by then. Where there is no room the caller looks again by itself.
        self.submit(self._wake)
        return found
