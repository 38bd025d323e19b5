"""Which keys a tier holds, and what may be done to them now: reserved, committed, doomed; pinned; first to go.

The one place where these rules stand, for tiers in memory and on disk alike. Knows no file and no address: a `Space`
hands out places, an `EvictionOrder` says which key goes first, and a `Witness`, if there is one, hears what happens.
What a call costs does not depend on the number of keys, and each is one call deep: the tiers' indexes derive from this
or hold it, and the loops are here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from operator import length_hint
from typing import Generic

import msgspec

from hybridkv.planner import LookupResult
from hybridkv.tiers.changes import ChangeFeed, Changes
from hybridkv.tiers.contract import UNSPECIFIED, AnswersAtOnce, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger.order import EvictionOrder
from hybridkv.tiers.ledger.states import E, KeyState, Space, Witness
from hybridkv.tiers.tally import Tally

# An enum's members are looked up by name each time; these are asked for in every call.
_RESERVED, _COMMITTED = KeyState.RESERVED, KeyState.COMMITTED
_DOOMED_WRITE, _DOOMED_READ = KeyState.DOOMED_WRITE, KeyState.DOOMED_READ
_MISS = LookupResult.MISS


def _sets_stop_early() -> bool:
    """Whether a set that is asked for many keys looks at none behind the first that it lacks."""
    rest = iter((0, 0))
    return not {1}.issuperset(rest) and length_hint(rest) == 1


_SETS_STOP_EARLY = _sets_stop_early()
_LISTS = (list, tuple)


class KeyLedger(AnswersAtOnce, Generic[E]):
    """All keys of one tier. Used by one thread; others may read its tables, which are never emptied under them.

    Args:
        space: what is handed out.
        order: which key goes first.
        capacity_bytes: that all keys together may cost.
        witness: who hears what happens.
        largest_bytes: that one key may cost; None: all of it.
        max_keys: how many there may be; None: as many as fit.
    """

    def __init__(
        self,
        space: Space[E],
        order: EvictionOrder[E],
        capacity_bytes: int,
        witness: Witness[E] | None = None,
        largest_bytes: int | None = None,
        max_keys: int | None = None,
    ) -> None:
        self._space = space
        self._witness = witness
        self.capacity_bytes = capacity_bytes
        self._largest_bytes = capacity_bytes if largest_bytes is None else largest_bytes
        self._max_keys = sys.maxsize if max_keys is None else max_keys
        self.by_key: dict[Key, E] = {}
        self.evictable = order
        """Committed and unpinned: exactly what may be evicted."""
        self.evictable_bytes = 0
        self.reserved_now: dict[Key, E] = {}
        """Doomed ones included: somebody may be writing them."""
        self.pinned_now: dict[Key, E] = {}
        """Doomed ones included: somebody may be reading them."""
        # Sets beside the entries, because a set answers for many keys in one call: reserved or committed, and reserved.
        self._held: set[Key] = set()
        self._pending: set[Key] = set()
        self.used_bytes = 0
        """Space that is not free, rounding and doomed keys included; never above `capacity_bytes`."""
        self.generation = 0
        """Changes whenever the answer of any lookup may have changed."""
        self.is_closed = False
        """Nothing more is reserved."""
        self.tally = Tally()
        self._changes: ChangeFeed | None = None
        """Of keys, beside `generation`; None while nobody watches."""

    # What is asked.

    @property
    def num_keys(self) -> int:
        """Keys that are committed or reserved; doomed ones are not counted."""
        return len(self._held)

    @property
    def num_reserved(self) -> int:
        """Doomed ones included: somebody may be writing them."""
        return len(self.reserved_now)

    @property
    def num_pinned(self) -> int:
        """Keys, doomed ones included: somebody may be reading them."""
        return len(self.pinned_now)

    def eviction_order(self) -> list[Key]:
        """What is committed and not pinned, as the order has it: what goes first first, where it says that."""
        return list(self.evictable)

    def lacks(self, key: Key) -> bool:
        """Whether it is neither committed nor reserved."""
        return key not in self._held

    def lookup(self, key: Key) -> LookupResult:
        entry = self.by_key.get(key)
        return _MISS if entry is None else entry.state.answer

    def leading(self, keys: Iterable[Key]) -> int:
        """How many in a row, from the first one on, are HIT or PENDING."""
        held = self._held
        if _SETS_STOP_EARLY and isinstance(keys, _LISTS):
            rest = iter(keys)
            return len(keys) if held.issuperset(rest) else len(keys) - length_hint(rest) - 1
        place = -1
        for place, key in enumerate(keys):
            if key not in held:
                return place
        return place + 1

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """The position of the last one that is HIT or PENDING, None when none is."""
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
        """Whether one of them is PENDING."""
        return bool(self._pending) and not self._pending.isdisjoint(keys)

    def take_counts(self) -> TierCounts:
        return self.tally.take()

    def watch(self) -> None:
        """Keep the keys whose answers change, from now on."""
        self._changes = self._changes or ChangeFeed()

    def take_changes(self) -> Changes:
        """Keys whose answers changed since the last call."""
        return self._changes.take() if self._changes is not None else Changes(set(), is_any=False)

    # Reserving: the tier's index asks `why_not`, then for room, then takes; it may know reasons of its own in between.

    def why_not(self, key: Key, cost: int) -> Refusal | None:
        """Why there can be no such key, as far as the ledger knows. Changes nothing and counts nothing."""
        if self.is_closed:
            return Refusal.CLOSED
        if key in self.by_key:
            return Refusal.PRESENT
        if cost > self._largest_bytes:
            return Refusal.TOO_LARGE
        if self.used_bytes + cost - self.evictable_bytes > self.capacity_bytes:
            return Refusal.NO_ROOM
        if len(self.reserved_now) + len(self.pinned_now) >= self._max_keys:
            return Refusal.NO_ROOM
        return None

    def make_room(self, cost: int, num_keys: int = 1) -> None:
        """Evict until this much more, and so many keys more, are within bounds, or nothing is left to evict."""
        while self.evictable_bytes and (
            self.used_bytes + cost > self.capacity_bytes or len(self.by_key) + num_keys > self._max_keys
        ):
            self.evict_next()

    def take(self, key: Key, num_bytes: int, cost: int) -> E:
        """Reserve space for a key for which there is room, and no reason why not."""
        entry = self._space.take(key, num_bytes, cost)
        self.by_key[key] = self.reserved_now[key] = entry
        self._held.add(key)
        self._pending.add(key)
        self.used_bytes += cost
        self._answers_anew(key)
        self.tally.reservations += 1
        return entry

    # The life of a key.

    def touch(self, keys: Iterable[Key]) -> None:
        """Make committed keys the most recently used, the last one most; other keys are passed over."""
        if self._witness is None:
            self.evictable.touch(keys)
            return
        keys, find = list(keys), self.by_key.get
        if self.evictable.touch(keys):
            keys = [key for key in keys if (entry := find(key)) and entry.state is _COMMITTED and not entry.num_pins]
        self._witness.used(map(self.by_key.__getitem__, keys))

    def _track(self, key: Key, entry: E) -> None:
        """It may be evicted from now on."""
        self.evictable.track(key, entry)
        self.evictable_bytes += entry.cost

    def commit(self, key: Key) -> bool:
        """The bytes of a reserved key are there: offer it. False, and its space is free, when it was invalidated."""
        entry = self.reserved_now.pop(key, None)
        if entry is None:
            raise self._misfit("commit", key)
        if entry.state is _DOOMED_WRITE:
            self._end_doomed_write(key, entry)
            return False
        entry.state = _COMMITTED
        self._pending.remove(key)
        self._track(key, entry)
        self._answers_anew(key)
        self.tally.commits += 1
        if self._witness is not None:
            self._witness.written(entry)
        return True

    def commit_all(self, keys: Iterable[Key]) -> list[bool]:
        """`commit` of each, in their order."""
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        """A reservation, doomed or not, that will never be committed: its space is freed now."""
        entry = self.reserved_now.pop(key, None)
        if entry is None:
            raise self._misfit("abort", key)
        if entry.state is _DOOMED_WRITE:
            self._end_doomed_write(key, entry)
        else:
            self._withdraw(key)
            if self._witness is not None:
                self._witness.written(entry)
                self._witness.gone(entry)
            self._forget(key, entry)
        self.tally.aborts += 1

    def _misfit(self, operation: str, key: Key) -> TierProtocolError:
        entry = self.by_key.get(key)
        if entry is None:
            return TierProtocolError(f"{operation}: expected a reserved key, got unknown key {key.hex()}")
        return TierProtocolError(f"{operation}: expected a reserved key, got {key.hex()} ({entry.state.words})")

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        """Never offer what is stored under this key again. False when there is nothing to withdraw."""
        return self.withdraw(key) is not None

    def invalidate_all(self, keys: Iterable[Key]) -> int:
        """`invalidate` of each; how many were withdrawn."""
        return sum(self.withdraw(key) is not None for key in keys)

    def withdraw(self, key: Key) -> E | None:
        """As `invalidate`. The entry that is offered no more, None when none was."""
        entry = self.by_key.get(key)
        if entry is None or entry.state.answer is _MISS:
            return None
        self._withdraw(key)
        self.tally.invalidations += 1
        if self._witness is not None:
            self._witness.gone(entry)
        if entry.state is _RESERVED:
            entry.state = _DOOMED_WRITE
        elif entry.num_pins:
            entry.state = _DOOMED_READ
        else:
            self.evictable.forget(key)
            self.evictable_bytes -= entry.cost
            self._forget(key, entry)
        return entry

    def pin(self, key: Key) -> Slot | None:
        """Protect a committed key from eviction and learn where it lies; None when it is not a HIT. Counted."""
        entry = self.by_key.get(key)
        if entry is None or entry.state is not _COMMITTED:
            return None
        if not entry.num_pins:
            self.evictable.forget(key)
            self.evictable_bytes -= entry.cost
            self.pinned_now[key] = entry
            if self._witness is not None:
                self._witness.held(entry)
        entry.num_pins += 1
        return entry.slot

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        """`pin` of each, or, when one of them is not a HIT, of none, and None."""
        if not (self._held.issuperset(keys) and self._pending.isdisjoint(keys)):
            return None
        return [slot for slot in map(self.pin, keys) if slot is not None]

    def unpin(self, key: Key) -> None:
        """Undo one `pin`. The last one makes the key the most recently used, or frees it if it was invalidated."""
        entry = self.pinned_now.get(key)
        if entry is None:
            raise TierProtocolError(f"unpin: expected a pinned key, got {key.hex()}")
        entry.num_pins -= 1
        if entry.num_pins:
            return
        del self.pinned_now[key]
        if self._witness is not None:
            self._witness.released(entry)
        if entry.state is _COMMITTED:
            self._track(key, entry)
        else:
            self._forget(key, entry)

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """`unpin` of each, in their order."""
        for key in keys:
            self.unpin(key)

    # Evicting and forgetting.

    def evict_next(self) -> E:
        """Give up what goes first. There is something."""
        key, entry = self.evictable.pick()
        self._evicted(key, entry)
        return entry

    def evict(self, key: Key) -> None:
        """Give up a key that is committed and not pinned, out of turn."""
        self.evictable.forget(key)
        self._evicted(key, self.by_key[key])

    def _evicted(self, key: Key, entry: E) -> None:
        self.evictable_bytes -= entry.cost
        self._held.remove(key)
        self._answers_anew(key)
        self.tally.evictions += 1
        self.tally.evicted_bytes += entry.cost
        if self._witness is not None:
            self._witness.gone(entry)
        self._forget(key, entry)

    def forget_all(self) -> int:
        """`invalidate` everything at once, of which a witness does not hear. How many keys that are.

        Begins new tables with copies of what is pinned or reserved, so that it costs nothing for every other key, and
        whoever reads the old ones reads what was there.
        """
        num_withdrawn = len(self._held)
        self.evictable.give_up()
        self.reserved_now = {key: _doomed(entry) for key, entry in self.reserved_now.items()}
        self.pinned_now = {key: _doomed(entry) for key, entry in self.pinned_now.items()}
        self.by_key = self.reserved_now | self.pinned_now
        self._held, self._pending = set(), set()
        self.evictable_bytes = 0
        self.used_bytes = sum(entry.cost for entry in self.by_key.values())
        self._space.keep_only(self.by_key.values())
        self.generation += num_withdrawn
        if self._changes is not None:
            self._changes.add_all()
        self.tally.invalidations += num_withdrawn
        return num_withdrawn

    def _answers_anew(self, key: Key) -> None:
        self.generation += 1
        if self._changes is not None:
            self._changes.add(key)

    def _withdraw(self, key: Key) -> None:
        self._held.remove(key)
        self._pending.discard(key)
        self._answers_anew(key)

    def _end_doomed_write(self, key: Key, entry: E) -> None:
        if self._witness is not None:
            self._witness.written(entry)
        self._forget(key, entry)

    def _forget(self, key: Key, entry: E) -> None:
        del self.by_key[key]
        self.used_bytes -= entry.cost
        self._space.free(entry)


def _doomed(entry: E) -> E:
    """A copy that is not offered."""
    state = _DOOMED_READ if entry.num_pins else _DOOMED_WRITE
    return msgspec.structs.replace(entry, state=state)
