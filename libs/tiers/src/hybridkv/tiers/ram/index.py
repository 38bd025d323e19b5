"""Decides which chunks stay in host memory: least recently used goes first. Holds no bytes and starts no thread.

Every operation costs O(1) in the number of keys (a reservation: plus what it evicts, plus the extents of its slot;
`clear` and `close`: plus what is reserved or pinned). What they forget is freed in pieces, by later reservations.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.leftovers import Leftovers
from hybridkv.tiers.ram.granules import GranuleAllocator
from hybridkv.tiers.ram.sizes import count_granules
from hybridkv.tiers.tally import Tally

_FREED_AT_A_TIME = 256
"""Entries of what was cleared, by one reservation."""


class _State(enum.Enum):
    RESERVED = ("reserved", LookupResult.PENDING)
    COMMITTED = ("committed", LookupResult.HIT)
    DOOMED_WRITE = ("invalidated while it is being stored", LookupResult.MISS)
    DOOMED_READ = ("invalidated while it is pinned", LookupResult.MISS)

    def __init__(self, words: str, answer: LookupResult) -> None:
        self.words = words
        self.answer = answer


class _Entry(msgspec.Struct, gc=False, eq=False):
    """In no cycle, so Python's collector of garbage is told not to look at it: there may be many."""

    slot: Slot
    num_granules: int
    state: _State = _State.RESERVED
    num_pins: int = 0


class RamIndex:
    """A `TierIndex` over granules of host memory.

    `capacity_bytes` is rounded down to whole granules; `TierConfigurationError` when not even one fits. The media must
    be `RamArena`s of the same two numbers.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int) -> None:
        self._granules = GranuleAllocator(count_granules(capacity_bytes, granule_bytes), granule_bytes)
        self._entries: dict[Key, _Entry] = {}
        # Committed and unpinned, least recently used first: exactly what may be evicted.
        self._evictable: OrderedDict[Key, _Entry] = OrderedDict()
        self._num_evictable_granules = 0
        # Sets beside the entries, because a set answers for many keys in one call: reserved or committed, and reserved.
        self._held: set[Key] = set()
        self._pending: set[Key] = set()
        # The other entries: reserved, pinned or doomed.
        self._in_use: dict[Key, _Entry] = {}
        self._leftovers = Leftovers()
        self._generation = 0
        self._is_closed = False
        self._tally = Tally()

    @property
    def granule_bytes(self) -> int:
        return self._granules.granule_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._granules.num_granules * self._granules.granule_bytes

    @property
    def used_bytes(self) -> int:
        return (self._granules.num_granules - self._granules.num_free) * self._granules.granule_bytes

    def cost(self, num_bytes: int) -> int:
        return self._granules.granules_for(num_bytes) * self._granules.granule_bytes

    @property
    def num_keys(self) -> int:
        return len(self._held)

    @property
    def generation(self) -> int:
        return self._generation

    def lookup(self, key: Key) -> LookupResult:
        entry = self._entries.get(key)
        return LookupResult.MISS if entry is None else entry.state.answer

    def leading(self, keys: Iterable[Key]) -> int:
        held = self._held
        if isinstance(keys, list | tuple) and held.issuperset(keys):
            return len(keys)
        place = -1
        for place, key in enumerate(keys):
            if key not in held:
                return place
        return place + 1

    def last_held(self, keys: Sequence[Key]) -> int | None:
        held = self._held
        if not keys:
            return None
        place = len(keys) - 1
        if keys[place] in held:
            return place
        if held.isdisjoint(keys):
            return None
        while keys[place] not in held:
            place -= 1
        return place

    def any_pending(self, keys: Iterable[Key]) -> bool:
        return bool(self._pending) and not self._pending.isdisjoint(keys)

    def touch(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key in self._evictable:
                self._evictable.move_to_end(key)

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        num_granules = self._granules.granules_for(num_bytes)
        refusal = self._why_not(key, num_granules)
        if refusal is not None:
            return self._tally.refuse(refusal)
        while self._granules.num_free < num_granules:
            self._evict_oldest()
        self._leftovers.free_some(_FREED_AT_A_TIME)
        slot = self._granules.take(num_bytes)
        self._entries[key] = self._in_use[key] = _Entry(slot, num_granules)
        self._held.add(key)
        self._pending.add(key)
        self._generation += 1
        self._tally.reservations += 1
        return slot

    def _why_not(self, key: Key, num_granules: int) -> Refusal | None:
        if self._is_closed:
            return Refusal.CLOSED
        if key in self._entries:
            return Refusal.PRESENT
        if num_granules > self._granules.num_granules:
            return Refusal.TOO_LARGE
        if num_granules > self._granules.num_free + self._num_evictable_granules:
            return Refusal.NO_ROOM
        return None

    def _evict_oldest(self) -> None:
        key, entry = self._evictable.popitem(last=False)
        self._num_evictable_granules -= entry.num_granules
        self._held.remove(key)
        self._forget(key, entry)
        self._generation += 1
        self._tally.evictions += 1
        self._tally.evicted_bytes += entry.num_granules * self._granules.granule_bytes

    def commit(self, key: Key) -> bool:
        entry = self._reserved_entry("commit", key)
        if entry.state is _State.DOOMED_WRITE:
            self._forget(key, entry)
            return False
        entry.state = _State.COMMITTED
        self._pending.remove(key)
        self._make_evictable(key, entry)
        self._generation += 1
        self._tally.commits += 1
        return True

    def abort(self, key: Key) -> None:
        entry = self._reserved_entry("abort", key)
        if entry.state is _State.RESERVED:
            self._withdraw(key)
            self._generation += 1
        self._forget(key, entry)
        self._tally.aborts += 1

    def _reserved_entry(self, operation: str, key: Key) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise TierProtocolError(f"{operation}: expected a reserved key, got unknown key {key.hex()}")
        if entry.state not in (_State.RESERVED, _State.DOOMED_WRITE):
            raise TierProtocolError(f"{operation}: expected a reserved key, got {key.hex()} ({entry.state.words})")
        return entry

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        entry = self._entries.get(key)
        if entry is None or entry.state in (_State.DOOMED_WRITE, _State.DOOMED_READ):
            return False
        self._withdraw(key)
        if entry.state is _State.RESERVED:
            entry.state = _State.DOOMED_WRITE
        elif entry.num_pins:
            entry.state = _State.DOOMED_READ
        else:
            self._make_unevictable(key, entry)
            self._forget(key, entry)
        self._generation += 1
        self._tally.invalidations += 1
        return True

    def pin(self, key: Key) -> Slot | None:
        entry = self._entries.get(key)
        if entry is None or entry.state is not _State.COMMITTED:
            return None
        if not entry.num_pins:
            self._make_unevictable(key, entry)
        entry.num_pins += 1
        return entry.slot

    def unpin(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None or not entry.num_pins:
            raise TierProtocolError(f"unpin: expected a pinned key, got {key.hex()}")
        entry.num_pins -= 1
        if entry.num_pins:
            return
        if entry.state is _State.COMMITTED:
            self._make_evictable(key, entry)
        else:
            self._forget(key, entry)

    def clear(self) -> int:
        num_withdrawn = len(self._held)
        self._leftovers.add(self._entries, self._evictable, self._held)
        for entry in self._in_use.values():
            entry.state = _State.DOOMED_READ if entry.num_pins else _State.DOOMED_WRITE
        self._entries, self._evictable, self._held, self._pending = dict(self._in_use), OrderedDict(), set(), set()
        self._num_evictable_granules = 0
        self._granules.keep_only(entry.slot for entry in self._in_use.values())
        self._generation += num_withdrawn
        self._tally.invalidations += num_withdrawn
        return num_withdrawn

    def take_counts(self) -> TierCounts:
        return self._tally.take()

    def close(self) -> None:
        self._is_closed = True
        self.clear()

    def _make_evictable(self, key: Key, entry: _Entry) -> None:
        del self._in_use[key]
        self._evictable[key] = entry
        self._num_evictable_granules += entry.num_granules

    def _make_unevictable(self, key: Key, entry: _Entry) -> None:
        del self._evictable[key]
        self._in_use[key] = entry
        self._num_evictable_granules -= entry.num_granules

    def _withdraw(self, key: Key) -> None:
        self._held.remove(key)
        self._pending.discard(key)

    def _forget(self, key: Key, entry: _Entry) -> None:
        del self._entries[key]
        self._in_use.pop(key, None)
        self._granules.free(entry.slot)
