"""Decides which chunks stay in host memory: least recently used goes first. Holds no bytes and starts no thread.

What a call asks and does is C++ (`csrc/ledger`); here is only what it cannot know, such as who is to be asked before
space is taken. Every call holds the interpreter lock, so that other threads may `find` at any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import MAX_CHANGED_KEYS, Changes
from hybridkv.tiers.contract import NOTHING_HEARD, Heard, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierConfigurationError, TierProtocolError
from hybridkv.tiers.native import GranuleLedger
from hybridkv.tiers.ram.sizes import count_granules, count_keys, in_granules

if TYPE_CHECKING:
    _Ledger = GranuleLedger[LookupResult, Refusal, Slot]
else:
    _Ledger = GranuleLedger

_ANSWERS = (LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT)
_REFUSALS = (Refusal.NO_ROOM, Refusal.TOO_LARGE, Refusal.PRESENT, Refusal.CLOSED)
_SEED_BYTES = 8


class RamIndex(_Ledger):
    """A `TierIndex` over granules of host memory.

    `capacity_bytes` is rounded down to whole granules; `TierConfigurationError` when not even one fits. The media
    must be `RamArena`s of the same two numbers.

    No chunk has fewer than `smallest_bytes`: so many keys there may be at most, and the index has room for them
    from the start. One that has fewer is taken, too, and counts as one key.

    Beside what a `TierIndex` is, and `TellsChanges`: `find`, for any thread; `commit_all` and `invalidate_all`;
    `eviction_order`, `num_reserved` and `num_pinned`; `before_reserving`. What it takes at most is
    `most_index_bytes`, for `max_keys`.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int, smallest_bytes: int = 1) -> None:
        num_granules = count_granules(capacity_bytes, granule_bytes)
        max_keys = count_keys(num_granules, granule_bytes, smallest_bytes)
        # Of chance, so that nobody can choose prompts whose keys all belong to one place.
        seed = int.from_bytes(os.urandom(_SEED_BYTES), "little")
        try:
            super().__init__(num_granules, granule_bytes, max_keys, seed, _ANSWERS, _REFUSALS, Slot, TierProtocolError)
        except ValueError as error:
            raise TierConfigurationError(
                "capacity_bytes", f"granules that an index can have ({error})", capacity_bytes, hint="use larger ones"
            ) from error
        except MemoryError as error:
            raise TierConfigurationError(
                "capacity_bytes",
                "tables for which the system has addresses",
                capacity_bytes,
                hint="lift what bounds them (ulimit -v, vm.overcommit_memory), or lower it",
            ) from error
        self.before_reserving: Callable[[], None] | None = None
        """Called before space is taken, which alone evicts, for whoever has something to pin that peers read."""

    # Everything is known here, as `AnswersAtOnce` says it for a class that may have several bases.

    @property
    def answers_late(self) -> bool:
        """Never."""
        return False

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        """Nothing to find out."""

    @property
    def heard(self) -> Heard:
        """Nothing: nobody is asked."""
        return NOTHING_HEARD

    def cost(self, num_bytes: int) -> int:
        return in_granules(self.granule_bytes, num_bytes)

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        if self.before_reserving is not None:
            self.before_reserving()
        return super().reserve(key, num_bytes)

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        # Once is enough: until it returns no other thread runs.
        if self.before_reserving is not None:
            self.before_reserving()
        return super().reserve_all(chunks)

    def take_counts(self) -> TierCounts:
        return TierCounts(*self.take_tally())

    def watch(self) -> None:
        """Keep the keys whose answers change, from now on."""
        self.watch_at_most(MAX_CHANGED_KEYS)

    def take_changes(self) -> Changes:
        """Keys whose answers changed since the last call."""
        return Changes(*self.take_changed())
