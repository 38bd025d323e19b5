"""Index of a remote tier: a `TierIndex` that manages no space.

The index offers a found chunk until the chunk expires; after that, the chunk is looked up again. A prompt may have
thousands of chunks, so a lookup result is added with a few bulk operations. Only chunks that are read or stored get a
ledger entry. The index starts no thread and opens no connection; its `LookupClient` does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, Protocol

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import (
    UNSPECIFIED,
    Extends,
    Key,
    LookupAnswer,
    LookupCounts,
    NewChunk,
    Refusal,
    Slot,
    TierCounts,
)
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.remote.found import FoundPlaces, P
from hybridkv.tiers.remote.ledger import RemoteEntry, RemoteLedger
from hybridkv.tiers.remote.lookups import LookupTracker
from hybridkv.tiers.remote.options import RemoteOptions

_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS


class LookupClient(Protocol):
    """Sends lookups and receives answers. Each tier adds its own methods for sending. Only `close` waits."""

    @property
    def events(self) -> deque[Any]:
        """Events in order of arrival, appended by another thread. The index pops from the left."""
        ...

    def close(self) -> None:
        """Close every connection, within a bounded time. Idempotent."""
        ...


class RemoteIndex(Generic[P]):
    """Base class of the index of a remote tier.

    Args:
        client: lookup client. The index closes it.
        options: limits.
        clock: seconds; the times of answers use the same clock.
    """

    def __init__(self, client: LookupClient, options: RemoteOptions, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._options = options
        self._events, self._close_client = client.events, client.close
        self._tracker = LookupTracker(options.max_open_keys, options.missing_s, options.forget_after_s)
        self._number = 0
        """Number of the last lookup."""
        self._found: FoundPlaces[P] = FoundPlaces(2 * options.max_known)
        self._ledger: RemoteLedger[P] = RemoteLedger(options.known_bytes, options.max_known)
        """Chunks that were read or stored."""
        self._expiries: list[tuple[float, int, RemoteEntry[P]]] = []
        """Heap of (expiry time, number, entry) of the committed ledger entries, and of some that are gone. At most
        twice `max_known`."""
        self._expiry_numbers = itertools.count()
        self._expired: dict[Key, None] = {}
        """Keys of expired chunks, the oldest first. They are looked up again before they are stored again."""
        self._changes = 0
        """Number of changes to the found chunks. Part of `generation`."""
        self._num_taken_over = 0
        """Number of found chunks that were moved into the ledger. The ledger counts a reservation and a commit for
        each, but no chunk was stored, so `take_counts` subtracts them."""
        self._num_expired = 0
        """Number of ledger entries that were withdrawn because they expired. `take_counts` subtracts them from the
        invalidations."""
        self._forgotten = [0, 0]
        """Number and bytes of found chunks that were dropped to make room."""

    # Overridden by each tier.

    @property
    def _is_urgent(self) -> bool:
        """True if a request waits for the lookup that is being started."""
        return True

    def _send(self, number: int, keys: Sequence[Key], until_s: float) -> bool:
        """Send a lookup. An answer after `until_s` is ignored. False if it cannot be sent."""
        raise NotImplementedError

    def _on_event(self, event: Any) -> None:
        """Handle one event of the client."""
        raise NotImplementedError

    def _expires_s(self, place: P) -> float:
        """Expiry time of a chunk that is read now, or was just stored."""
        raise NotImplementedError

    def _new_place(self, key: Key, num_bytes: int, extends: Extends) -> P | Refusal:
        """Place for a chunk to store, or the reason why the chunk cannot be stored. `extends`: keys of preceding
        chunks."""
        raise NotImplementedError

    def _on_forgotten(self, places: Mapping[Key, P]) -> None:
        """Called with found chunks that were dropped before a read."""

    def _on_unused(self, entries: Sequence[RemoteEntry[P]]) -> None:
        """Called with entries after their last unpin, and with unpinned entries that are invalidated."""

    # Lookups.

    @property
    def has_async_lookups(self) -> bool:
        return True

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        self._poll_events()
        if self._ledger.is_closed:
            return
        keys = list(keys)
        for known in (self._ledger.by_key, self._found.by_key):
            if known and not known.keys().isdisjoint(keys):
                keys = [key for key in keys if key not in known]
        keys = self._tracker.keys_to_send(keys, deadline_s, self._clock(), is_urgent=self._is_urgent)
        if not keys:
            return
        self._number += 1
        if self._send(self._number, keys, self._tracker.forget_at_s(deadline_s)):
            self._tracker.begin(self._number, keys, self._clock(), deadline_s, is_urgent=self._is_urgent)
            self._poll_events()
        else:
            self._tracker.not_sent(len(keys))

    @property
    def lookup_counts(self) -> LookupCounts:
        self._poll_events()
        return self._tracker.lookup_counts

    @property
    def answer_s(self) -> float:
        self._poll_events()
        return self._tracker.answer_s

    def lacks(self, key: Key) -> bool:
        """True if a key should be stored. False for an expired key, unless a new lookup of the key is open, or has
        found that the key is missing."""
        self._poll_events()
        is_unknown = self._ledger.lookup(key) is _MISS and key not in self._found.by_key
        return is_unknown and (key not in self._expired or key in self._tracker)

    def _poll_events(self) -> None:
        """Handle pending events, timeouts and expiries."""
        news = self._events
        while news:
            self._on_event(news.popleft())
        now_s = self._clock()
        if now_s >= self._tracker.due_s:
            self._tracker.pass_time(now_s)
        if now_s >= self._found.due_s:
            self._changes += 1
            places = self._found.expire(now_s)
            self._remember_expired(places)
            self._on_forgotten(places)
        if self._expiries and now_s >= self._expiries[0][0]:
            self._expire_entries(now_s)

    def _add_found(self, number: int, places: Mapping[Key, P], until_s: float, answered_s: float) -> Mapping[Key, P]:
        """Offer found chunks, and drop older chunks to make room. The keys of the found chunks must be open: this
        lookup still waits for their answers. Returns the chunks for which there was room."""
        if not self._make_room(sum(place.num_bytes for place in places.values()), len(places)):
            places = self._fitting(self._tracker.open_keys(number), places)
        if places:
            self._tracker.found(number, places.keys(), answered_s)
            self._found.add(places, until_s)
            self._changes += 1
            expired = self._expired
            if expired and not expired.keys().isdisjoint(places):
                self._expired = {key: None for key in expired if key not in places}
        return places

    def _end_lookup(self, number: int, answer: LookupAnswer, answered_s: float) -> None:
        """End a lookup. All its open keys get this answer."""
        keys = self._tracker.end(number, answer, answered_s)
        if self._expired and answer is LookupAnswer.MISSING:
            for key in keys:
                self._expired.pop(key, None)

    def _fitting(self, keys: Iterable[Key], places: Mapping[Key, P]) -> dict[Key, P]:
        """Places for which there is room, in the order of the keys."""
        left_bytes = self.capacity_bytes - self.used_bytes
        left_keys = self._options.max_known - len(self._ledger.by_key) - len(self._found.by_key)
        fitting: dict[Key, P] = {}
        for key in keys:
            place = places.get(key)
            if place is not None and place.num_bytes <= left_bytes and len(fitting) < left_keys:
                fitting[key] = place
                left_bytes -= place.num_bytes
        return fitting

    def _make_room(self, num_bytes: int, num_keys: int) -> bool:
        """Drop found chunks, then chunks that were stored or read, until there is room. If that cannot be enough, drops
        no chunk and returns False."""
        ledger, found = self._ledger, self._found
        has_bytes = ledger.in_use_bytes + num_bytes <= self.capacity_bytes
        if not has_bytes or ledger.num_in_use + num_keys > self._options.max_known:
            return False
        while self._exceeds_limits(num_bytes, num_keys):
            if found.by_key:
                places = found.forget_oldest()
                self._forgotten[0] += len(places)
                self._forgotten[1] += sum(place.num_bytes for place in places.values())
                self._changes += 1
                self._on_forgotten(places)
            else:
                ledger.evict_next()
        return True

    def _exceeds_limits(self, num_bytes: int, num_keys: int) -> bool:
        num_known = len(self._ledger.by_key) + len(self._found.by_key)
        return self.used_bytes + num_bytes > self.capacity_bytes or num_known + num_keys > self._options.max_known

    # Ledger entries.

    def _take_over(self, key: Key) -> RemoteEntry[P]:
        """Move a found chunk into the ledger, because it is read or invalidated now."""
        entry = self._ledger.take(key, self._found.pop(key))
        self._ledger.commit(key)
        self._num_taken_over += 1
        self._track_expiry(entry)
        return entry

    def _track_expiry(self, entry: RemoteEntry[P]) -> None:
        self._expired.pop(entry.key, None)
        until_s = self._expires_s(entry.place)
        expiries, by_key = self._expiries, self._ledger.by_key
        heapq.heappush(expiries, (until_s, next(self._expiry_numbers), entry))
        if len(expiries) > 2 * self._options.max_known:
            expiries[:] = [expiry for expiry in expiries if by_key.get(expiry[2].key) is expiry[2]]
            heapq.heapify(expiries)

    def _expire_entries(self, now_s: float) -> None:
        expiries, by_key = self._expiries, self._ledger.by_key
        while expiries and expiries[0][0] <= now_s:
            _, _, entry = heapq.heappop(expiries)
            if by_key.get(entry.key) is entry and self._ledger.lookup(entry.key) is _HIT:
                if entry.num_pins:
                    entry.is_expired = True
                else:
                    self._expire_entry(entry)

    def _expire_entry(self, entry: RemoteEntry[P]) -> None:
        self._ledger.withdraw(entry.key)
        self._num_expired += 1
        self._remember_expired((entry.key,))

    def _remember_expired(self, keys: Iterable[Key]) -> None:
        expired = self._expired
        expired.update(dict.fromkeys(keys))
        if (surplus := len(expired) - self._options.max_known) > 0:
            for key in list(islice(expired, surplus)):
                del expired[key]

    # Queries.

    @property
    def capacity_bytes(self) -> int:
        return self._ledger.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Number of bytes of all known chunks. The bytes themselves are stored elsewhere."""
        return self._ledger.used_bytes + self._found.num_bytes

    def cost(self, num_bytes: int) -> int:
        return num_bytes

    @property
    def num_keys(self) -> int:
        return self._ledger.num_keys + len(self._found.by_key)

    @property
    def generation(self) -> int:
        self._poll_events()
        return self._ledger.generation + self._tracker.changes + self._changes

    def lookup(self, key: Key) -> LookupResult:
        self._poll_events()
        return self._answer(key)

    def _answer(self, key: Key) -> LookupResult:
        if key in self._found.by_key:
            return _HIT
        answer = self._ledger.lookup(key)
        return _PENDING if answer is _MISS and self._tracker.is_pending(key) else answer

    def leading(self, keys: Iterable[Key]) -> int:
        self._poll_events()
        found, num_held = self._found.by_key, 0
        for key in keys:
            if key not in found and self._answer(key) is _MISS:
                break
            num_held += 1
        return num_held

    def last_held(self, keys: Sequence[Key]) -> int | None:
        self._poll_events()
        if self._knows_none(keys):  # usual for a new prompt, and faster than key by key
            return None
        for place in range(len(keys) - 1, -1, -1):
            if self._answer(keys[place]) is not _MISS:
                return place
        return None

    def _knows_none(self, keys: Sequence[Key]) -> bool:
        """True if none of these keys is found, held, or in an open lookup."""
        return (
            self._found.by_key.keys().isdisjoint(keys)
            and self._ledger.by_key.keys().isdisjoint(keys)
            and not self._tracker.has_any(keys)
        )

    def any_pending(self, keys: Iterable[Key]) -> bool:
        self._poll_events()
        return any(self._answer(key) is _PENDING for key in keys)

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        self._ledger.touch(keys)

    # Storing.

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        self._poll_events()
        refusal = self._ledger.reserve_refusal(key, num_bytes)
        if refusal is None and key in self._found.by_key:
            refusal = Refusal.PRESENT
        place = refusal or self._new_place(key, num_bytes, extends)
        if isinstance(place, Refusal):
            return self._ledger.tally.refuse(place)
        self._make_room(num_bytes, 1)
        self._tracker.withdraw(key)
        return self._ledger.take(key, place).slot

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        return [self.reserve(*chunk) for chunk in chunks]

    def commit(self, key: Key) -> bool:
        is_committed = self._ledger.commit(key)
        if is_committed:
            self._track_expiry(self._ledger.by_key[key])
        return is_committed

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        self._ledger.abort(key)

    # Reading.

    def pin(self, key: Key) -> Slot | None:
        slots = self.pin_all((key,))
        return None if slots is None else slots[0]

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self._poll_events()
        found = self._found.by_key
        if not all(key in found or self._ledger.lookup(key) is _HIT for key in keys):
            return None
        for key in keys:
            if key in found:
                self._take_over(key)
        return self._ledger.pin_all(keys)

    def unpin(self, key: Key) -> None:
        self.unpin_all((key,))

    def unpin_all(self, keys: Iterable[Key]) -> None:
        unused: list[RemoteEntry[P]] = []
        for key in keys:
            entry = self._ledger.by_key.get(key)
            self._ledger.unpin(key)
            if entry is not None and not entry.num_pins:
                unused.append(entry)
                if entry.is_expired and self._ledger.lookup(key) is _HIT:
                    self._expire_entry(entry)
        self._on_unused(unused)

    # Withdrawing.

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        self._tracker.withdraw(key)
        self._expired.pop(key, None)
        if key in self._found.by_key:
            self._take_over(key)
        entry = self._ledger.withdraw(key)
        if entry is not None and not entry.num_pins:
            self._on_unused((entry,))
        return entry is not None

    def clear(self) -> int:
        """Invalidate every key of this index, and forget its lookups. Remote copies stay."""
        self._tracker.clear()
        return self._forget_all()

    def _forget_all(self) -> int:
        self._expiries.clear()
        self._expired.clear()
        places = self._found.clear()
        self._changes += 1
        self._ledger.tally.invalidations += len(places)
        self._on_forgotten(places)
        return self._ledger.forget_all() + len(places)

    def take_counts(self) -> TierCounts:
        """Counts since the last call, without the ledger's reservations and commits of found chunks, and without its
        invalidations of expired chunks."""
        self._poll_events()
        counts = self._ledger.tally.take()
        num_taken_over, self._num_taken_over = self._num_taken_over, 0
        num_expired, self._num_expired = self._num_expired, 0
        num_forgotten, forgotten_bytes = self._forgotten
        self._forgotten = [0, 0]
        return TierCounts(
            reservations=counts.reservations - num_taken_over,
            commits=counts.commits - num_taken_over,
            aborts=counts.aborts,
            invalidations=counts.invalidations - num_expired,
            evictions=counts.evictions + num_forgotten,
            evicted_bytes=counts.evicted_bytes + forgotten_bytes,
            refusals=counts.refusals,
            answers=self._tracker.take_answers(),
        )

    def close(self) -> None:
        if self._ledger.is_closed:
            return
        self._ledger.is_closed = True
        self._tracker.clear()
        self._forget_all()
        self._close_client()
