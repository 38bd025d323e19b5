"""Ledger over plain Python tables: states (reserved, committed, deleted), pins, links between keys, eviction.

The base of the reference indexes, and the reference for `RemoteLedger`.

A key extends at most one other key: the key of a chunk before it in the same prefix. To make room, the ledger evicts
only leaves: keys that no other key extends. Suppose that key B extends key A. If B is gone and no other key extends A,
A is evicted next. Exception: if A was used in a later call than B, A becomes the most recently used key.

Has no files and no addresses: a `Space` assigns places, an `LruPolicy` chooses the next key to evict, and an optional
`LedgerObserver` is called for most steps. The cost of a call does not depend on the number of keys. Exceptions:
`eviction_order`, refusals with NO_ROOM, and a call that links a key to the keys before it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, takewhile
from typing import Generic, Protocol, TypeVar

import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import MAX_CHANGED_KEYS, Changes
from hybridkv.tiers.contract import UNSPECIFIED, Extends, Key, Refusal, Slot, SyncLookups, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import Entry, KeyState
from hybridkv.tiers.tally import Tally

E = TypeVar("E", bound=Entry)
E_contra = TypeVar("E_contra", bound=Entry, contravariant=True)

# Every call uses these enum members, and a lookup by name takes time.
_RESERVED, _COMMITTED = KeyState.RESERVED, KeyState.COMMITTED
_DELETED_WRITE, _DELETED_READ = KeyState.DELETED_WHILE_WRITTEN, KeyState.DELETED_WHILE_PINNED
_MISS = LookupResult.MISS


class Space(Protocol[E]):
    """Space of a tier: assigns and frees places. The ledger never requests more than the free space."""

    def take(self, key: Key, num_bytes: int, cost: int) -> E:
        """Assign space, and return a reserved entry. The ledger counts `cost`."""
        ...

    def free(self, entry: E) -> None:
        """Free the space of an entry."""
        ...

    def keep_only(self, entries: Iterable[E]) -> None:
        """Free the space of all other entries, without a loop over these."""
        ...


class LedgerObserver(Protocol[E_contra]):
    """Callbacks for state changes and uses of a key. Not called for reservations, and not by `forget_all`."""

    def on_written(self, entry: E_contra) -> None:
        """The write ended: the entry is committed, or is freed next."""
        ...

    def on_pinned(self, entry: E_contra) -> None:
        """The entry got its first pin."""
        ...

    def on_unpinned(self, entry: E_contra) -> None:
        """The entry lost its last pin: the entry is committed, or is freed next."""
        ...

    def on_used(self, entries: Iterable[E_contra]) -> None:
        """Committed, unpinned entries were touched."""
        ...

    def on_deleted(self, entry: E_contra) -> None:
        """The entry is not offered any more."""
        ...


class LruPolicy(Generic[E]):
    """The committed and unpinned keys that no key extends. Iterates from the least to the most recently used key."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, E] = OrderedDict()

    def track(self, key: Key, entry: E, *, is_next: bool = False) -> None:
        """Add a key as the most recently used key, or with `is_next` as the next key to evict."""
        self._entries[key] = entry
        if is_next:
            self._entries.move_to_end(key, last=False)

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark keys as used, in order. Ignores other keys."""
        for key in keys:
            if key in self._entries:
                self._entries.move_to_end(key)

    def pick(self) -> tuple[Key, E]:
        """Remove and return the next key to evict."""
        return self._entries.popitem(last=False)

    def forget(self, key: Key) -> None:
        del self._entries[key]

    def clear(self) -> None:
        self._entries = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)


class ChangeFeed:
    """Collects changed keys. With more than `MAX_CHANGED_KEYS` keys, `take` reports that any key may have changed."""

    __slots__ = ("_is_any", "_keys")

    def __init__(self) -> None:
        self._keys: set[Key] = set()
        self._is_any = False

    def add(self, key: Key) -> None:
        """Record that the lookup result of this key changed."""
        if self._is_any:
            return
        self._keys.add(key)
        if len(self._keys) > MAX_CHANGED_KEYS:
            self.add_all()

    def add_all(self) -> None:
        """Record that the lookup result of any key may have changed."""
        self._keys = set()
        self._is_any = True

    def take(self) -> Changes:
        """Changes since the last call."""
        taken = Changes(self._keys, self._is_any)
        self._keys, self._is_any = set(), False
        return taken


class KeyLedger(SyncLookups, Generic[E]):
    """All keys of one tier. Used by one thread. Other threads may read the tables: `forget_all` replaces the tables,
    and does not empty them.

    Args:
        space: assigns places.
        order: chooses the next key to evict.
        capacity_bytes: limit of the cost of all keys. The cost of a key: the bytes of the capacity that it uses.
        observer: see `LedgerObserver`.
        largest_bytes: limit of the cost of one key; None: the capacity.
        max_keys: limit of the number of keys, deleted keys in use included; None: no limit.
    """

    def __init__(
        self,
        space: Space[E],
        order: LruPolicy[E],
        capacity_bytes: int,
        observer: LedgerObserver[E] | None = None,
        largest_bytes: int | None = None,
        max_keys: int | None = None,
    ) -> None:
        self._space = space
        self._observer = observer
        self.capacity_bytes = capacity_bytes
        self._largest_bytes = capacity_bytes if largest_bytes is None else largest_bytes
        self._max_keys = sys.maxsize if max_keys is None else max_keys
        self.by_key: dict[Key, E] = {}
        self.evictable = order
        """Committed and unpinned keys that no key extends: all keys that may be evicted now."""
        self._extends: dict[Key, Key] = {}
        """The key that each key extends. Both are in `by_key`."""
        self._last_use: dict[Key, int] = {}
        """For each key, the value of `_num_calls` at its last use."""
        self._num_calls = 0
        """Number of calls that used keys (`touch`, `commit_all`, `unpin_all`)."""
        self._extended_by: dict[Key, set[Key]] = {}
        self.unpinned_bytes = 0
        """Bytes of all committed and unpinned keys."""
        self.reserved_now: dict[Key, E] = {}
        """Keys that may be written now, deleted keys included."""
        self.pinned_now: dict[Key, E] = {}
        """Keys that may be read now, deleted keys included."""
        # Sets, because one set operation looks up many keys. `_held`: reserved or committed; `_pending`: reserved.
        self._held: set[Key] = set()
        self._pending: set[Key] = set()
        self.used_bytes = 0
        """Bytes in use, including rounding and deleted keys; never above `capacity_bytes`."""
        self.generation = 0
        """Number that changes whenever the result of any lookup may have changed."""
        self.is_closed = False
        """If True, reservations are refused."""
        self.tally = Tally()
        self._changes: ChangeFeed | None = None
        """Changed keys; None before `watch`."""

    # Lookups.

    @property
    def num_keys(self) -> int:
        """Number of committed and reserved keys."""
        return len(self._held)

    @property
    def num_reserved(self) -> int:
        """Number of keys that may be written now, deleted keys included."""
        return len(self.reserved_now)

    @property
    def num_pinned(self) -> int:
        """Number of keys that may be read now, deleted keys included."""
        return len(self.pinned_now)

    def eviction_order(self) -> list[Key]:
        """Committed and unpinned keys in the order of eviction.

        Leaves out the keys that a reserved or pinned key extends, directly or through other keys.
        """
        return list(self._victims(None))

    def lacks(self, key: Key) -> bool:
        """True if the key is neither committed nor reserved."""
        return key not in self._held

    def lookup(self, key: Key) -> LookupResult:
        entry = self.by_key.get(key)
        return _MISS if entry is None else entry.state.result

    def leading(self, keys: Iterable[Key]) -> int:
        """Number of leading keys that are HIT or PENDING."""
        return sum(1 for _ in takewhile(self._held.__contains__, keys))

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """Position of the last key that is HIT or PENDING, None if there is none."""
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
        """True if one of the keys is PENDING."""
        return bool(self._pending) and not self._pending.isdisjoint(keys)

    def take_counts(self) -> TierCounts:
        return self.tally.take()

    def watch(self) -> None:
        """Start to keep changed keys."""
        self._changes = self._changes or ChangeFeed()

    def take_changes(self) -> Changes:
        """Keys with a changed lookup result since the last call."""
        return self._changes.take() if self._changes is not None else Changes(set(), is_any=False)

    # Reservations. The index calls `reserve_refusal`, `make_room` and `take`, and may refuse for other reasons in
    # between.

    def reserve_refusal(self, key: Key, cost: int, extends: Extends = ()) -> Refusal | None:
        """Reason why the ledger cannot reserve a key now; None if it can. Changes nothing and counts nothing."""
        if self.is_closed:
            return Refusal.CLOSED
        if key in self.by_key:
            return Refusal.PRESENT
        if cost > self._largest_bytes:
            return Refusal.TOO_LARGE
        missing_bytes = self.used_bytes + cost - self.capacity_bytes
        num_missing = len(self.by_key) + 1 - self._max_keys
        if missing_bytes <= 0 and num_missing <= 0:
            return None
        for victim in self._victims(self._first_held(extends)):
            missing_bytes -= self.by_key[victim].cost
            num_missing -= 1
            if missing_bytes <= 0 and num_missing <= 0:
                return None
        return Refusal.NO_ROOM

    def _victims(self, kept: Key | None) -> Iterator[Key]:
        """Keys in the order of eviction, without `kept` and the keys that `kept` extends, directly or through other
        keys."""
        num_left: dict[Key, int] = {}
        later: list[Key] = []
        for leaf in chain(self.evictable, later):
            key = leaf
            while key != kept:
                yield key
                extended = self._extends.get(key)
                if extended is None:
                    break
                entry = self.by_key[extended]
                num_left[extended] = num_left.get(extended, len(self._extended_by[extended])) - 1
                if num_left[extended] or entry.state is not _COMMITTED or entry.num_pins:
                    break
                if self._last_use[extended] > self._last_use[key]:
                    later.append(extended)
                    break
                key = extended

    def make_room(self, cost: int, num_keys: int = 1, extends: Extends = ()) -> None:
        """Evict until `cost` more bytes and `num_keys` more keys fit, or no key is evictable. Does not evict the first
        held key of `extends`, nor the keys that this key extends."""
        kept = self._first_held(extends)
        if kept is not None:
            if self._evictable_entry(kept) is not None:
                self.evictable.forget(kept)
            self._extended_by.setdefault(kept, set()).add(kept)  # so that `kept` is no leaf
        while len(self.evictable) and (
            self.used_bytes + cost > self.capacity_bytes or len(self.by_key) + num_keys > self._max_keys
        ):
            self.evict_next()
        if kept is not None:
            self._unextend(kept, kept)

    def take(self, key: Key, num_bytes: int, cost: int, extends: Extends = ()) -> E:
        """Reserve space for a key, after `reserve_refusal` returned None and `make_room`.

        Args:
            key: key to reserve.
            num_bytes: size of the chunk.
            cost: bytes of the capacity that the key uses.
            extends: keys; the chunk extends the first one that the ledger holds.
        """
        entry = self._space.take(key, num_bytes, cost)
        extended = self._first_held(extends)  # before the new key itself is in `_held`
        self.by_key[key] = self.reserved_now[key] = entry
        self._held.add(key)
        self._pending.add(key)
        self._last_use[key] = self._num_calls
        if extended is not None:
            self._extend(key, extended)
        self.used_bytes += cost
        self._note_change(key)
        self.tally.reservations += 1
        return entry

    # Life cycle of a key.

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        """Make committed keys the most recently used, in order: the last key becomes the most recent. Ignores other
        keys.

        Args:
            keys: used keys.
            extends: for each committed or reserved key, as for `take`; ignored for a key that already extends another.
        """
        keys = list(keys)
        self._num_calls += 1
        for key, extended in zip(keys, extends, strict=False):
            self._link(key, extended)
        self.evictable.touch(keys)
        for key in keys:
            entry = self.by_key.get(key)
            if entry is not None and entry.state is _COMMITTED and not entry.num_pins:
                self._last_use[key] = self._num_calls
        if self._observer is not None:
            entries = filter(None, map(self.by_key.get, keys))
            self._observer.on_used(entry for entry in entries if entry.state is _COMMITTED and not entry.num_pins)

    def _evictable_entry(self, key: Key | None) -> E | None:
        """Entry of the key; None if the key may not be evicted now."""
        entry = None if key is None or key in self._extended_by else self.by_key.get(key)
        return entry if entry is not None and entry.state is _COMMITTED and not entry.num_pins else None

    def _first_held(self, keys: Extends) -> Key | None:
        return next((key for key in keys if key and key in self._held), None)

    def _link(self, key: Key, keys: Extends) -> None:
        extends = self._first_held(keys)
        if extends is None or key in self._extends or key not in self._held:
            return
        above: Key | None = extends
        while above is not None:
            if above == key:
                return
            above = self._extends.get(above) if key in self._extended_by else None
        self._extend(key, extends)

    def _extend(self, key: Key, extends: Key) -> None:
        if self._evictable_entry(extends) is not None:
            self.evictable.forget(extends)
        self._extends[key] = extends
        self._extended_by.setdefault(extends, set()).add(key)

    def _unlink(self, key: Key) -> None:
        """Remove a key from its chain: its successors now extend its predecessor. The predecessor becomes evictable if
        no key extends it any more."""
        extended = self._extends.pop(key, None)
        for other in self._extended_by.pop(key, ()):
            del self._extends[other]
            if extended is not None:
                self._extend(other, extended)
        if extended is not None:
            self._unextend(extended, key)

    def _unextend(self, extended: Key, key: Key) -> None:
        self._extended_by[extended].remove(key)
        if not self._extended_by[extended]:
            del self._extended_by[extended]
            entry = self._evictable_entry(extended)
            if entry is not None:
                is_next = self._last_use[extended] <= self._last_use[key]
                self.evictable.track(extended, entry, is_next=is_next)

    def _track(self, key: Key, entry: E) -> None:
        """Set the last use of a committed, unpinned key. The key becomes evictable if no key extends it."""
        self._last_use[key] = self._num_calls
        if key not in self._extended_by:
            self.evictable.track(key, entry)
        self.unpinned_bytes += entry.cost

    def _untrack(self, key: Key, entry: E) -> None:
        if key not in self._extended_by:
            self.evictable.forget(key)
        self.unpinned_bytes -= entry.cost

    def commit(self, key: Key) -> bool:
        """Make a reserved key a HIT: its bytes are stored now. If the key was invalidated meanwhile, frees its space
        and returns False."""
        return self.commit_all((key,))[0]

    def _commit(self, key: Key) -> bool:
        entry = self.reserved_now.pop(key, None)
        if entry is None:
            raise self._wrong_state("commit", key)
        if entry.state is _DELETED_WRITE:
            self._end_deleted_write(key, entry)
            return False
        entry.state = _COMMITTED
        self._pending.remove(key)
        self._track(key, entry)
        self._note_change(key)
        self.tally.commits += 1
        if self._observer is not None:
            self._observer.on_written(entry)
        return True

    def commit_all(self, keys: Iterable[Key]) -> list[bool]:
        """`commit` each key, in order."""
        self._num_calls += 1
        return [self._commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        """Free a reservation that will not be committed; the key may be invalidated already."""
        entry = self.reserved_now.pop(key, None)
        if entry is None:
            raise self._wrong_state("abort", key)
        if entry.state is _DELETED_WRITE:
            self._end_deleted_write(key, entry)
        else:
            self._withdraw(key)
            if self._observer is not None:
                self._observer.on_written(entry)
                self._observer.on_deleted(entry)
            self._forget(key, entry)
        self.tally.aborts += 1

    def _wrong_state(self, operation: str, key: Key) -> TierProtocolError:
        entry = self.by_key.get(key)
        if entry is None:
            return TierProtocolError(f"{operation}: expected a reserved key, got unknown key {key.hex()}")
        return TierProtocolError(f"{operation}: expected a reserved key, got {key.hex()} ({entry.state.text})")

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        """Delete a key: the stored bytes are never offered again. False if the key is not committed or reserved."""
        return self.withdraw(key) is not None

    def invalidate_all(self, keys: Iterable[Key]) -> int:
        """`invalidate` each key; returns the number of deleted keys."""
        return sum(self.withdraw(key) is not None for key in keys)

    def withdraw(self, key: Key) -> E | None:
        """`invalidate` that returns the deleted entry; None if no key was deleted."""
        entry = self.by_key.get(key)
        if entry is None or entry.state.result is _MISS:
            return None
        self._withdraw(key)
        self.tally.invalidations += 1
        if self._observer is not None:
            self._observer.on_deleted(entry)
        if entry.state is _RESERVED:
            entry.state = _DELETED_WRITE
        elif entry.num_pins:
            entry.state = _DELETED_READ
        else:
            self._untrack(key, entry)
            self._forget(key, entry)
        return entry

    def pin(self, key: Key) -> Slot | None:
        """Protect a committed key from eviction and return its slot; None if it is not a HIT. Pins are counted."""
        entry = self.by_key.get(key)
        if entry is None or entry.state is not _COMMITTED:
            return None
        if not entry.num_pins:
            self._untrack(key, entry)
            self.pinned_now[key] = entry
            if self._observer is not None:
                self._observer.on_pinned(entry)
        entry.num_pins += 1
        return entry.slot

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        """`pin` all keys and return their slots. None, and no change, if one of the keys is not a HIT."""
        if not (self._held.issuperset(keys) and self._pending.isdisjoint(keys)):
            return None
        return [slot for slot in map(self.pin, keys) if slot is not None]

    def unpin(self, key: Key) -> None:
        """Undo one `pin`. The last `unpin` makes the key the most recently used, or frees a deleted key."""
        self.unpin_all((key,))

    def _unpin(self, key: Key) -> None:
        entry = self.pinned_now.get(key)
        if entry is None:
            raise TierProtocolError(f"unpin: expected a pinned key, got {key.hex()}")
        entry.num_pins -= 1
        if entry.num_pins:
            return
        del self.pinned_now[key]
        if self._observer is not None:
            self._observer.on_unpinned(entry)
        if entry.state is _COMMITTED:
            self._track(key, entry)
        else:
            self._forget(key, entry)

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """`unpin` each key, in order."""
        self._num_calls += 1
        for key in keys:
            self._unpin(key)

    # Eviction.

    def evict_next(self) -> E:
        """Evict the next key. `evictable` must not be empty."""
        key, entry = self.evictable.pick()
        self.unpinned_bytes -= entry.cost
        self._evicted(key, entry)
        return entry

    def evict(self, key: Key) -> None:
        """Evict a committed, unpinned key out of order, even if other keys extend it."""
        self._untrack(key, self.by_key[key])
        self._evicted(key, self.by_key[key])

    def _evicted(self, key: Key, entry: E) -> None:
        self._held.remove(key)
        self._note_change(key)
        self.tally.evictions += 1
        self.tally.evicted_bytes += entry.cost
        if self._observer is not None:
            self._observer.on_deleted(entry)
        self._forget(key, entry)

    def forget_all(self) -> int:
        """`invalidate` every key at once, without calls of the observer. Returns the number of deleted keys.

        Replaces the tables by copies of the pinned and reserved entries. So the cost does not depend on the number of
        other keys, and other threads can still read the old tables.
        """
        num_withdrawn = len(self._held)
        self.evictable.clear()
        self._extends, self._extended_by, self._last_use = {}, {}, {}
        self.reserved_now = {key: _deleted(entry) for key, entry in self.reserved_now.items()}
        self.pinned_now = {key: _deleted(entry) for key, entry in self.pinned_now.items()}
        self.by_key = self.reserved_now | self.pinned_now
        self._held, self._pending = set(), set()
        self.unpinned_bytes = 0
        self.used_bytes = sum(entry.cost for entry in self.by_key.values())
        self._space.keep_only(self.by_key.values())
        self.generation += num_withdrawn
        if self._changes is not None:
            self._changes.add_all()
        self.tally.invalidations += num_withdrawn
        return num_withdrawn

    def _note_change(self, key: Key) -> None:
        self.generation += 1
        if self._changes is not None:
            self._changes.add(key)

    def _withdraw(self, key: Key) -> None:
        self._held.remove(key)
        self._pending.discard(key)
        self._note_change(key)

    def _end_deleted_write(self, key: Key, entry: E) -> None:
        if self._observer is not None:
            self._observer.on_written(entry)
        self._forget(key, entry)

    def _forget(self, key: Key, entry: E) -> None:
        del self.by_key[key]
        self._unlink(key)
        self._last_use.pop(key, None)
        self.used_bytes -= entry.cost
        self._space.free(entry)


def _deleted(entry: E) -> E:
    """Copy of an entry, in the deleted state."""
    state = _DELETED_READ if entry.num_pins else _DELETED_WRITE
    return msgspec.structs.replace(entry, state=state)
