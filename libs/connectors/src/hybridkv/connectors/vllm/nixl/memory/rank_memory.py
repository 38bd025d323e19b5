"""Registered memory of a rank: its KV cache, the table of its leases, and scratch memory to read peers' leases.

A region's number is its index in `regions`. The table is always the last region but one, so peers can compute its
number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from hybridkv.connectors.vllm.nixl.memory.description import MemoryRegion
from hybridkv.peers.digests import DigestRuns, plain_digester
from hybridkv.tiers.threads import MAX_QUEUED, BackgroundThread, Outcome

SCRATCH_SLOTS = 256
"""Maximum leases that this rank reads at the same time."""


class NixlRankMemory:
    """Registered memory: peers read it, and this rank reads into it.

    Args:
        kv: the engine's allocations.
        max_leases: entries of the lease table.
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
        """Number of the region that is a peer's lease table."""
        return num_regions - 2

    def write_slot(self, slot: int, nonce: int) -> None:
        """Writes a lease's nonce, or `NO_NONCE`, into the table."""
        self._table[slot] = (nonce, 0)

    # To read peers' tables.

    def take_scratch(self) -> int | None:
        """Takes a scratch slot, to read one lease into this slot. None if all slots are in use."""
        if not self._free:
            return None
        place = self._free.pop()
        self._scratch[place] = (0, 0)
        return place

    def give_scratch(self, place: int) -> None:
        """Returns a scratch slot."""
        self._free.append(place)

    def has_nonce(self, place: int, nonce: int) -> bool:
        """True if the lease that was read into a scratch slot has this nonce."""
        found, rest = (int(word) for word in self._scratch[place])
        return found == nonce and rest == 0

    # Digests.

    def digests(self, runs: DigestRuns) -> list[bytes]:
        """XXH3-128 digests of runs of bytes in the KV cache. Thread-safe.

        Raises:
            ValueError: a run leaves its region.
        """
        return list(self._digester(runs))


def _view(region: MemoryRegion) -> memoryview:
    return memoryview((ctypes.c_char * region.num_bytes).from_address(region.address)).cast("B")


INLINE_DIGEST_BYTES = 4 << 20
"""Maximum bytes that the agent's thread digests itself, in a fraction of a millisecond. More go to another thread."""


class DigestThread(BackgroundThread):
    """Thread that digests many bytes. The calling thread digests few bytes itself, because a hand-over takes longer.

    Call `start_digests` from one thread.

    Args:
        memory: memory of this rank.
        wake: wakes the calling thread.
    """

    def __init__(self, memory: NixlRankMemory, wake: Callable[[], None]) -> None:
        super().__init__("hybridkv-peer-digests", MAX_QUEUED)
        self._memory = memory
        self._wake = wake

    def start_digests(self, runs: DigestRuns) -> Outcome[list[bytes]] | None:
        """Digests up to `INLINE_DIGEST_BYTES` before it returns. Queues more bytes for the thread.

        Returns None if the thread's queue is full.
        """
        if int(runs.num_bytes.sum()) <= INLINE_DIGEST_BYTES:
            outcome: Outcome[list[bytes]] = Outcome()
            outcome.run(lambda: self._memory.digests(runs))
            return outcome
        found = self.submit(lambda: self._memory.digests(runs))
        # `wake` is queued after the digests, so it runs when they are done. If the queue is full, the caller polls.
        self.submit(self._wake)
        return found
