"""Index of the RAM tier: LRU over granules of host memory. Holds no bytes and starts no thread.

The ledger is C++ (`csrc/ledger`); `RamIndex` adds the parts that need Python. Every call holds the GIL, so any thread
may call `find` at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import MAX_CHANGED_KEYS, Changes
from hybridkv.tiers.contract import NO_LOOKUPS, Extends, Key, LookupCounts, NewChunk, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierConfigurationError, TierProtocolError
from hybridkv.tiers.native import GranuleLedger
from hybridkv.tiers.ram.sizes import count_granules, count_keys, round_up_to_granules

if TYPE_CHECKING:
    _Ledger = GranuleLedger[LookupResult, Refusal, Slot]
else:
    _Ledger = GranuleLedger

_ANSWERS = (LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT)
_REFUSALS = (Refusal.NO_ROOM, Refusal.TOO_LARGE, Refusal.PRESENT, Refusal.CLOSED)
_SEED_BYTES = 8


class RamIndex(_Ledger):
    """A `TierIndex` over granules of host memory, with a change feed (`ReportsChanges`).

    Further methods: `find`, for any thread: the slot of a committed key, which may be stale when it is used;
    `invalidate_all`; `eviction_order`, `num_reserved` and `num_pinned`.
    `max_index_bytes` is the size of the full tables: with `max_keys` keys of at most 48 bytes. `leftover_bytes` is the
    size of old tables after `clear`, in addition.

    Args:
        capacity_bytes: size, rounded down to whole granules. The media are `RamArena`s with the same two sizes.
        granule_bytes: unit of allocation.
        smallest_bytes: size of the smallest chunk; limits the number of keys. A smaller chunk is accepted, and counts
            as one key.

    Raises:
        TierConfigurationError: a size is not positive, not even one granule fits, or the granules are too many or the
            tables too large.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int, smallest_bytes: int = 1) -> None:
        num_granules = count_granules(capacity_bytes, granule_bytes)
        max_keys = count_keys(num_granules, granule_bytes, smallest_bytes)
        # Random, so that an attacker cannot choose prompts that collide in the hash table.
        seed = int.from_bytes(os.urandom(_SEED_BYTES), "little")
        try:
            super().__init__(num_granules, granule_bytes, max_keys, seed, _ANSWERS, _REFUSALS, Slot, TierProtocolError)
        except ValueError as error:
            raise TierConfigurationError(
                "capacity_bytes",
                f"a number of granules that an index supports ({error})",
                capacity_bytes,
                hint="use larger granules",
            ) from error
        except MemoryError as error:
            raise TierConfigurationError(
                "capacity_bytes",
                "tables that fit into the address space",
                capacity_bytes,
                hint="raise the limit (ulimit -v, vm.overcommit_memory), or lower the capacity",
            ) from error
        self.before_reserving: Callable[[], None] | None = None
        """Called once before each `reserve` or `reserve_all`; only these calls evict. Used to pin chunks that peers
        read."""

    # The same as `SyncLookups`, because `SyncLookups` cannot be a second base of this class.

    @property
    def has_async_lookups(self) -> bool:
        """False: `lookup` finds all keys."""
        return False

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Does nothing."""

    @property
    def lookup_counts(self) -> LookupCounts:
        """All counts 0."""
        return NO_LOOKUPS

    @property
    def answer_s(self) -> float:
        """Always 0."""
        return 0.0

    def cost(self, num_bytes: int) -> int:
        return round_up_to_granules(self.granule_bytes, num_bytes)

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        if self.before_reserving is not None:
            self.before_reserving()
        return super().reserve(key, num_bytes, extends)

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        # One call is enough: no other thread runs until `reserve_all` returns.
        if self.before_reserving is not None:
            self.before_reserving()
        return super().reserve_all(chunks)

    def take_counts(self) -> TierCounts:
        return TierCounts(*self.take_tally())

    def watch(self) -> None:
        """Start to keep changed keys."""
        self.watch_at_most(MAX_CHANGED_KEYS)

    def take_changes(self) -> Changes:
        """Keys with a changed lookup result since the last call."""
        return Changes(*self.take_changed())
