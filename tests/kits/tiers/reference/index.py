"""Executable specification of `TierIndex`: every answer is computed from first principles, over all keys.

Other indices are tested against it. It is slow on purpose and not meant to serve an engine.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, Extends, Key, NewChunk, Refusal, Slot, SyncLookups, TierCounts
from hybridkv.tiers.errors import TierConfigurationError, TierProtocolError
from hybridkv.tiers.tally import Tally


@dataclass
class _Entry:
    num_bytes: int
    slot_number: int
    is_reserved: bool = True
    is_doomed: bool = False
    num_pins: int = 0
    last_used: int = 0
    last_call: int = 0
    extends: Extends = ()


class ReferenceIndex(SyncLookups):
    """A `TierIndex` with numbered slots, each as large as the whole tier.

    A chunk uses whole multiples of `granule_bytes`, so that it can be compared with tiers that round up.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int = 1) -> None:
        if granule_bytes <= 0:
            raise TierConfigurationError("granule_bytes", "a number > 0", granule_bytes)
        if capacity_bytes < granule_bytes:
            raise TierConfigurationError("capacity_bytes", f"at least {granule_bytes}", capacity_bytes)
        self._granule_bytes = granule_bytes
        self._capacity_bytes = capacity_bytes // granule_bytes * granule_bytes
        self._entries: dict[Key, _Entry] = {}
        self._clock = 0
        self._num_calls = 0
        self._generation = 0
        self._is_closed = False
        self._tally = Tally()

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return sum(self.cost(entry.num_bytes) for entry in self._entries.values())

    @property
    def num_keys(self) -> int:
        return sum(not entry.is_doomed for entry in self._entries.values())

    @property
    def generation(self) -> int:
        return self._generation

    def lacks(self, key: Key) -> bool:
        return not self._is_held(key)

    def lookup(self, key: Key) -> LookupResult:
        entry = self._entries.get(key)
        if entry is None or entry.is_doomed:
            return LookupResult.MISS
        return LookupResult.PENDING if entry.is_reserved else LookupResult.HIT

    def leading(self, keys: Iterable[Key]) -> int:
        return sum(1 for _ in itertools.takewhile(self._is_held, keys))

    def last_held(self, keys: Sequence[Key]) -> int | None:
        return max((place for place, key in enumerate(keys) if self._is_held(key)), default=None)

    def any_pending(self, keys: Iterable[Key]) -> bool:
        return any(self.lookup(key) is LookupResult.PENDING for key in keys)

    def _is_held(self, key: Key) -> bool:
        return self.lookup(key) is not LookupResult.MISS

    def is_doomed(self, key: Key) -> bool:
        """Whether it was invalidated while still written or read."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_doomed

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        keys = list(keys)
        self._num_calls += 1
        for key, extended in zip(keys, extends, strict=False):
            if self._is_held(key) and self._entries[key].extends is None:
                self._link(key, extended)
        for key in keys:
            if self.lookup(key) is LookupResult.HIT:
                self._give_back(self._entries[key])

    def _first_held(self, keys: Extends) -> Key | None:
        return next((key for key in keys if self._is_held(key)), None)

    def _link(self, key: Key, keys: Extends) -> None:
        extends = above = self._first_held(keys)
        while above is not None:
            if above == key:
                return
            above = self._entries[above].extends
        self._entries[key].extends = extends

    def _remove(self, key: Key) -> _Entry:
        """Removes the entry. Its extensions extend its predecessor, which is the next to go if nothing extends it."""
        gone = self._entries.pop(key)
        for entry in self._entries.values():
            if entry.extends == key:
                entry.extends = gone.extends
        if gone.extends and not any(entry.extends == gone.extends for entry in self._entries.values()):
            extended = self._entries[gone.extends]
            extended.last_used = self._now() * (1 if extended.last_call > gone.last_call else -1)
        return gone

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        victims = self._victims(self._first_held(extends))
        refusal = self._refusal(key, self.cost(num_bytes), victims)
        if refusal is not None:
            return self._tally.refuse(refusal)
        while self.used_bytes + self.cost(num_bytes) > self._capacity_bytes:
            self._evict(victims.pop(0))
        used_numbers = {entry.slot_number for entry in self._entries.values()}
        slot_number = next(number for number in itertools.count() if number not in used_numbers)
        self._entries[key] = _Entry(num_bytes, slot_number, last_call=self._num_calls)
        self._link(key, extends)
        self._generation += 1
        self._tally.reservations += 1
        return self._slot(self._entries[key])

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        return [self.reserve(*chunk) for chunk in chunks]

    def _refusal(self, key: Key, cost: int, victims: list[Key]) -> Refusal | None:
        if self._is_closed:
            return Refusal.CLOSED
        if key in self._entries:
            return Refusal.PRESENT
        if cost > self._capacity_bytes:
            return Refusal.TOO_LARGE
        evictable_bytes = sum(self.cost(self._entries[victim].num_bytes) for victim in victims)
        if cost > self._capacity_bytes - self.used_bytes + evictable_bytes:
            return Refusal.NO_ROOM
        return None

    def _victims(self, kept: Key | None) -> list[Key]:
        """Evictable keys, first to go first."""
        num_extend = Counter(entry.extends for entry in self._entries.values())
        num_extend[kept] += 1
        free = {key for key, entry in self._entries.items() if not entry.is_reserved and not entry.num_pins}
        victims: list[Key] = []
        leaves = [key for key in free if not num_extend[key]]
        leaves.sort(key=lambda key: self._entries[key].last_used)
        while leaves:
            victims.append(leaves.pop(0))
            gone = self._entries[victims[-1]]
            num_extend[gone.extends] -= 1
            if gone.extends in free and not num_extend[gone.extends]:
                is_later = self._entries[gone.extends].last_call > gone.last_call
                leaves.insert(len(leaves) if is_later else 0, gone.extends)
        return victims

    def _evict(self, key: Key) -> None:
        self._tally.evictions += 1
        self._tally.evicted_bytes += self.cost(self._remove(key).num_bytes)
        self._generation += 1

    def commit(self, key: Key) -> bool:
        return self.commit_all([key])[0]

    def _commit(self, key: Key) -> bool:
        entry = self._reserved_entry("commit", key)
        if entry.is_doomed:
            self._remove(key)
            return False
        entry.is_reserved = False
        self._give_back(entry)
        self._generation += 1
        self._tally.commits += 1
        return True

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        self._num_calls += 1
        return [self._commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        entry = self._reserved_entry("abort", key)
        self._remove(key)
        if not entry.is_doomed:
            self._generation += 1
        self._tally.aborts += 1

    def _reserved_entry(self, operation: str, key: Key) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or not entry.is_reserved:
            raise TierProtocolError(f"{operation}: expected a reserved key, got {key.hex()}")
        return entry

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        if self.lookup(key) is LookupResult.MISS:
            return False
        entry = self._entries[key]
        if entry.is_reserved or entry.num_pins:
            entry.is_doomed = True
        else:
            self._remove(key)
        self._generation += 1
        self._tally.invalidations += 1
        return True

    def pin(self, key: Key) -> Slot | None:
        if self.lookup(key) is not LookupResult.HIT:
            return None
        entry = self._entries[key]
        entry.num_pins += 1
        return self._slot(entry)

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        if any(self.lookup(key) is not LookupResult.HIT for key in keys):
            return None
        return [slot for key in keys if (slot := self.pin(key)) is not None]

    def unpin(self, key: Key) -> None:
        self.unpin_all([key])

    def _unpin(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None or not entry.num_pins:
            raise TierProtocolError(f"unpin: expected a pinned key, got {key.hex()}")
        entry.num_pins -= 1
        if not entry.num_pins:
            self._give_back(entry)
            if entry.is_doomed:
                self._remove(key)

    def _give_back(self, entry: _Entry) -> None:
        """Marks the entry as used now, without readers or writers."""
        entry.last_used, entry.last_call = self._now(), self._num_calls

    def unpin_all(self, keys: Iterable[Key]) -> None:
        self._num_calls += 1
        for key in keys:
            self._unpin(key)

    def clear(self) -> int:
        return sum(self.invalidate(key) for key in list(self._entries))

    def take_counts(self) -> TierCounts:
        return self._tally.take()

    def close(self) -> None:
        self._is_closed = True
        self.clear()

    def cost(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granule_bytes) * self._granule_bytes

    def _slot(self, entry: _Entry) -> Slot:
        return Slot(((entry.slot_number * self._capacity_bytes, entry.num_bytes),))

    def _now(self) -> int:
        self._clock += 1
        return self._clock
