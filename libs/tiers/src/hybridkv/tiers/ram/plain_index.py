"""The index of host memory in Python alone: what the native one is compared with, and what runs where there is none.

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
from hybridkv.tiers.ram.sizes import count_granules, count_keys, in_granules

_FREED_AT_A_TIME = 256
"""Entries of what was cleared, by one reservation."""
_MAX_SIZES = 1024
"""Of chunks, whose cost is remembered: all that cost the same then share one number."""
_BYTES_A_KEY = 720
"""Of all tables and objects, measured over a million."""


class PlainRamIndex(KeyLedger[SlotEntry]):
    """As `RamIndex`, in Python."""

    is_native = False

    def __init__(self, capacity_bytes: int, granule_bytes: int, smallest_bytes: int = 1) -> None:
        num_granules = count_granules(capacity_bytes, granule_bytes)
        self.max_keys = count_keys(num_granules, granule_bytes, smallest_bytes)
        order: EvictionOrder[SlotEntry] = LeastRecentlyUsed()
        space = GranuleAllocator(num_granules, granule_bytes)
        super().__init__(space, order, num_granules * granule_bytes, max_keys=self.max_keys)
        self.granule_bytes = granule_bytes
        self._cost = lru_cache(_MAX_SIZES)(partial(in_granules, granule_bytes))
        self._leftovers = Leftovers()
        self.before_reserving: Callable[[], None] | None = None
        """Called before space is taken, which alone evicts, for whoever has something to pin that peers read."""

    @property
    def most_index_bytes(self) -> int:
        """About what the index itself takes when it is full."""
        return self.max_keys * _BYTES_A_KEY

    def find(self, key: Key) -> Slot | None:
        """Where a committed key lies. Also for other threads, to whom it may not be true any more when they hear it."""
        entry = self.by_key.get(key)
        return entry.slot if entry is not None and entry.state is KeyState.COMMITTED else None

    def cost(self, num_bytes: int) -> int:
        return in_granules(self.granule_bytes, num_bytes)

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        if self.before_reserving is not None:
            self.before_reserving()
        cost = self._cost(num_bytes)
        refusal = self.why_not(key, cost)
        if refusal is not None:
            return self.tally.refuse(refusal)
        if self.used_bytes + cost > self.capacity_bytes or len(self.by_key) >= self.max_keys:
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
