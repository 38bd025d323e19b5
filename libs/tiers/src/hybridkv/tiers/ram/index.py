"""Decides which chunks stay in host memory: least recently used goes first. Holds no bytes and starts no thread.

Every operation costs O(1) in the number of keys (a reservation: plus what it evicts, plus the extents of its slot;
`clear` and `close`: plus what is reserved or pinned). What they forget is freed in pieces, by later reservations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from hybridkv.tiers.contract import Key, Refusal, Slot
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import EvictionOrder, KeyLedger, KeyState, LeastRecentlyUsed
from hybridkv.tiers.leftovers import Leftovers
from hybridkv.tiers.ram.granules import GranuleAllocator, SlotEntry
from hybridkv.tiers.ram.sizes import count_granules

_FREED_AT_A_TIME = 256
"""Entries of what was cleared, by one reservation."""
_MAX_SIZES = 1024
"""Of chunks, whose cost is remembered: all that cost the same then share one number."""


class RamIndex(KeyLedger[SlotEntry]):
    """A `TierIndex` over granules of host memory.

    `capacity_bytes` is rounded down to whole granules; `TierConfigurationError` when not even one fits. The media must
    be `RamArena`s of the same two numbers.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None:
        num_granules = count_granules(capacity_bytes, granule_bytes)
        order: EvictionOrder[SlotEntry] = LeastRecentlyUsed()
        super().__init__(GranuleAllocator(num_granules, granule_bytes), order, num_granules * granule_bytes)
        self.granule_bytes = granule_bytes
        self._cost = lru_cache(_MAX_SIZES)(partial(_in_granules, granule_bytes))
        self._leftovers = Leftovers()
        self.before_reserving: Callable[[], None] | None = None
        """Called before space is taken, which alone evicts, for whoever has something to pin that peers read."""

    def find(self, key: Key) -> Slot | None:
        """Where a committed key lies. Also for other threads, to whom it may not be true any more when they hear it."""
        entry = self.by_key.get(key)
        return entry.slot if entry is not None and entry.state is KeyState.COMMITTED else None

    def cost(self, num_bytes: int) -> int:
        return _in_granules(self.granule_bytes, num_bytes)

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        if self.before_reserving is not None:
            self.before_reserving()
        cost = self._cost(num_bytes)
        refusal = self.why_not(key, cost)
        if refusal is not None:
            return self.tally.refuse(refusal)
        if self.used_bytes + cost > self.capacity_bytes:
            self.make_room(cost)
        self._leftovers.free_some(_FREED_AT_A_TIME)
        return self.take(key, num_bytes, cost).slot

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        return [self.reserve(key, num_bytes) for key, num_bytes in chunks]

    def clear(self) -> int:
        forgotten = self.forget_all()
        self._leftovers.add(*forgotten.tables)
        return forgotten.num_withdrawn

    def close(self) -> None:
        self.is_closed = True
        self.clear()


def _in_granules(granule_bytes: int, num_bytes: int) -> int:
    return -(-num_bytes // granule_bytes) * granule_bytes
