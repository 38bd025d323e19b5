"""Ledger of a remote index: states, pins and LRU order of the chunks that were read or stored.

Contains no found chunks, and does not know how much room they leave: the index evicts until a new chunk fits. The cost
of a call does not depend on the number of keys. Exception: the cost of `forget_all` depends on the number of keys in
use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Generic

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Refusal, Slot
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import Entry, KeyState
from hybridkv.tiers.remote.found import P
from hybridkv.tiers.tally import Tally

_RESERVED, _COMMITTED = KeyState.RESERVED, KeyState.COMMITTED
_DELETED_WRITE, _DELETED_READ = KeyState.DELETED_WHILE_WRITTEN, KeyState.DELETED_WHILE_PINNED
_MISS = LookupResult.MISS


class RemoteEntry(Entry, Generic[P]):
    """Ledger entry of a chunk that was read or stored. Its cost is the size of the chunk."""

    key: Key
    number: int
    place: P
    is_expired: bool
    """True if the chunk expired while it was pinned. It is offered until the last unpin."""

    @property
    def slot(self) -> Slot:
        return self.place.slot(self.number)


class RemoteLedger(Generic[P]):
    """Entries by key. For one thread.

    Args:
        capacity_bytes: limit of the bytes of all chunks.
        max_keys: limit of the number of keys, deleted keys in use included.
    """

    def __init__(self, capacity_bytes: int, max_keys: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._max_keys = max_keys
        self._next_number = 0
        self.by_key: dict[Key, RemoteEntry[P]] = {}
        # Each key of `by_key` is in one of these two tables.
        self.evictable: OrderedDict[Key, RemoteEntry[P]] = OrderedDict()
        """Committed and unpinned keys, the least recently used first."""
        self._in_use: dict[Key, RemoteEntry[P]] = {}
        """Keys that may be written or read now, deleted keys included."""
        self.used_bytes = 0
        """Bytes of all chunks, deleted ones in use included."""
        self.in_use_bytes = 0
        """Bytes of the chunks that may be written or read now."""
        self.num_keys = 0
        """Number of committed and reserved keys."""
        self.generation = 0
        """Number that changes whenever the result of any lookup may have changed."""
        self.is_closed = False
        """If True, reservations are refused."""
        self.tally = Tally()

    # Lookups.

    @property
    def num_in_use(self) -> int:
        """Number of keys that may be written or read now, deleted keys included."""
        return len(self._in_use)

    def lookup(self, key: Key) -> LookupResult:
        entry = self.by_key.get(key)
        return _MISS if entry is None else entry.state.result

    # Reservations. The index calls `reserve_refusal`, `evict_next` and `take`, and may refuse for other reasons in
    # between.

    def reserve_refusal(self, key: Key, num_bytes: int) -> Refusal | None:
        """Reason why a key cannot be reserved now; None if it can. Changes nothing and counts nothing."""
        if self.is_closed:
            return Refusal.CLOSED
        if key in self.by_key:
            return Refusal.PRESENT
        if num_bytes > self.capacity_bytes:
            return Refusal.TOO_LARGE
        has_room = self.in_use_bytes + num_bytes <= self.capacity_bytes and len(self._in_use) < self._max_keys
        return None if has_room else Refusal.NO_ROOM

    def evict_next(self) -> None:
        """Evict the least recently used key. One key must be committed and unpinned."""
        key, entry = self.evictable.popitem(last=False)
        self._count_miss()
        self.tally.evictions += 1
        self.tally.evicted_bytes += entry.cost
        self._forget(key, entry)

    def take(self, key: Key, place: P) -> RemoteEntry[P]:
        """Reserve a key that is not in the ledger, after the index has made room."""
        entry = RemoteEntry(place.num_bytes, _RESERVED, 0, key, self._next_number, place, False)
        self._next_number += entry.cost
        self.by_key[key] = entry
        self._begin_use(key, entry)
        self.used_bytes += entry.cost
        self.num_keys += 1
        self.generation += 1
        self.tally.reservations += 1
        return entry

    # Life cycle of a key.

    def commit(self, key: Key) -> bool:
        """Make a reserved key a HIT. If the key was invalidated meanwhile, removes it and returns False."""
        entry = self._written("commit", key)
        is_committed = entry.state is _RESERVED
        if is_committed:
            entry.state = _COMMITTED
            self.generation += 1
            self.tally.commits += 1
        self._end_use(key, entry)
        return is_committed

    def abort(self, key: Key) -> None:
        """Remove a reservation that will not be committed; the key may be invalidated already."""
        entry = self._written("abort", key)
        if entry.state is _RESERVED:
            self._count_miss()
        self._end_use(key, entry)
        self.tally.aborts += 1

    def _written(self, operation: str, key: Key) -> RemoteEntry[P]:
        """Entry of a key that is being stored. `TierProtocolError` if there is none."""
        entry = self.by_key.get(key)
        if entry is None:
            raise TierProtocolError(f"{operation}: expected a reserved key, got unknown key {key.hex()}")
        if entry.state is not _RESERVED and entry.state is not _DELETED_WRITE:
            raise TierProtocolError(f"{operation}: expected a reserved key, got {key.hex()} ({entry.state.text})")
        return entry

    def touch(self, keys: Iterable[Key]) -> None:
        """Make committed, unpinned keys the most recently used, in order: the last key becomes the most recent. Ignores
        other keys."""
        evictable = self.evictable
        for key in keys:
            if key in evictable:
                evictable.move_to_end(key)

    def withdraw(self, key: Key) -> RemoteEntry[P] | None:
        """Delete a key: it is never offered again. Returns the entry; None if the key is not committed or reserved."""
        entry = self.by_key.get(key)
        if entry is None or entry.state.result is _MISS:
            return None
        self._count_miss()
        self.tally.invalidations += 1
        if key in self._in_use:
            _delete(entry)
        else:
            del self.evictable[key]
            self._forget(key, entry)
        return entry

    def pin_all(self, keys: Sequence[Key]) -> list[Slot]:
        """Protect committed keys from eviction and return their slots. Each key must be a HIT. Pins are counted."""
        slots = []
        for key in keys:
            entry = self.by_key[key]
            if not entry.num_pins:
                del self.evictable[key]
                self._begin_use(key, entry)
            entry.num_pins += 1
            slots.append(entry.slot)
        return slots

    def unpin(self, key: Key) -> None:
        """Undo one pin. The last `unpin` makes the key the most recently used, or removes a deleted key.
        `TierProtocolError` if the key is not pinned."""
        entry = self.by_key.get(key)
        if entry is None or not entry.num_pins:
            raise TierProtocolError(f"unpin: expected a pinned key, got {key.hex()}")
        entry.num_pins -= 1
        if not entry.num_pins:
            self._end_use(key, entry)

    def forget_all(self) -> int:
        """`withdraw` every key at once. Returns the number of deleted keys. Does not loop over the keys that are not in
        use."""
        num_withdrawn = self.num_keys
        for entry in self._in_use.values():
            _delete(entry)
        self.by_key = dict(self._in_use)
        self.evictable = OrderedDict()
        self.used_bytes = self.in_use_bytes
        self.num_keys = 0
        self.generation += num_withdrawn
        self.tally.invalidations += num_withdrawn
        return num_withdrawn

    def _count_miss(self) -> None:
        """Count a committed or reserved key that becomes a MISS now."""
        self.num_keys -= 1
        self.generation += 1

    def _begin_use(self, key: Key, entry: RemoteEntry[P]) -> None:
        self._in_use[key] = entry
        self.in_use_bytes += entry.cost

    def _end_use(self, key: Key, entry: RemoteEntry[P]) -> None:
        """End a write, or the last read. A committed key becomes the most recently used."""
        del self._in_use[key]
        self.in_use_bytes -= entry.cost
        if entry.state is _COMMITTED:
            self.evictable[key] = entry
        else:
            self._forget(key, entry)

    def _forget(self, key: Key, entry: RemoteEntry[P]) -> None:
        del self.by_key[key]
        self.used_bytes -= entry.cost


def _delete(entry: RemoteEntry[P]) -> None:
    """Set the deleted state of an entry in use."""
    entry.state = _DELETED_READ if entry.num_pins else _DELETED_WRITE
