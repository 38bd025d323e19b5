"""What this engine knows of a fleet's store: a `TierIndex` that holds nothing itself.

What was found or stored is offered for a while, and asked for again after it, because packs expire. A prompt may have
thousands of chunks: what is asked and heard about all of them at once is a few calls on tables, and only what somebody
reads or stores is kept by the rules of a ledger. Starts no thread and opens no connection; a `Courier` does.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, FailureReason, Heard, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import KeyLedger, LeastRecentlyUsed
from hybridkv.tiers.object.asked import Asked, Ended
from hybridkv.tiers.object.courier import Courier, Found, Moved
from hybridkv.tiers.object.format.record import LARGEST_KEY_BYTES
from hybridkv.tiers.object.heard import HeardPlaces
from hybridkv.tiers.object.known import Known, PackPlace, Shelves
from hybridkv.tiers.object.names import pack_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import Packs, Stored
from hybridkv.tiers.object.quarantine import Quarantine

_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS
_BAD = frozenset({FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.MISSING})


class ObjectIndex:
    """The scheduler's half.

    Args:
        courier: speaks with the store. The index closes it.
        options: bounds.
        clock: seconds; answers are dated by the same.
        clears_all: whether `clear` is for the whole fleet.
    """

    def __init__(
        self, courier: Courier, options: ObjectOptions, clock: Callable[[], float], *, clears_all: bool = False
    ) -> None:
        self._courier = courier
        self._options = options
        self._clock = clock
        self._clears_all = clears_all
        self._shelves = Shelves()
        self._known: KeyLedger[Known] = KeyLedger(
            self._shelves, LeastRecentlyUsed(), options.known_bytes, max_keys=options.max_known
        )
        """What is stored or read, or was."""
        self._heard = HeardPlaces(options.believed_s)
        self._asked = Asked(options.max_asked, options.missing_s, options.given_up_s)
        self._request = 0
        """The last one."""
        self._packs = Packs(options.pack_bytes, self._new_pack)
        self._engine = uuid.uuid4().hex
        self._num_packs = 0
        self._needs: tuple[Key, Sequence[Key]] = (b"", ())
        """What the key that is reserved next needs."""
        self._believed: deque[tuple[float, Known]] = deque()
        """Of what the ledger has: until when, the earliest first."""
        self._due_s = math.inf
        """None of that is over before."""
        self._faded: dict[Key, None] = {}
        """What was believed once: worth asking for, and not worth storing before that. The oldest first."""
        self._bad: Quarantine[tuple[str, int], bool] = Quarantine(options.max_asked, options.bad_s, clock)
        """Places that are not believed."""
        self._changes = 0
        """How often the answer of a lookup about what was heard may have changed."""
        self._heard_of = [0, 0, 0, 0]
        """Reservations and commits that were no stores, what was withdrawn because nobody knows any more, and what was
        heard of and made room."""

    def _new_pack(self) -> str:
        namespace = self._courier.namespace
        assert namespace is not None, "`reserve` looked"
        self._num_packs += 1
        return pack_name(namespace, f"{self._engine}-{self._num_packs}")

    # What is not known yet.

    @property
    def answers_late(self) -> bool:
        return True

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        self._hear()
        if self._known.is_closed:
            return
        keys = list(keys)
        for known in (self._known.by_key, self._heard.by_key):
            if known and not known.keys().isdisjoint(keys):
                keys = [key for key in keys if key not in known]
        keys = self._asked.unknown(keys, deadline_s, self._clock())
        if not keys:
            return
        self._request += 1
        if self._courier.ask(self._request, keys, self._asked.given_up_s(deadline_s)):
            self._asked.begin(self._request, keys, deadline_s)
            self._hear()
        else:
            self._asked.unasked(len(keys))

    @property
    def heard(self) -> Heard:
        self._hear()
        return self._asked.heard

    def lacks(self, key: Key) -> bool:
        """What was there a while ago, and was not asked for since, is taken to be there still."""
        self._hear()
        is_unknown = self._known.lacks(key) and key not in self._heard.by_key
        return is_unknown and (key not in self._faded or key in self._asked)

    # What is heard.

    def _hear(self) -> None:
        """What was answered by now, and what was not in time."""
        news = self._courier.news
        while news:
            event = news.popleft()
            if isinstance(event, Moved):
                self._move()
            elif (ended := self._asked.end(event.request, event.heard_s)) is not None:
                self._asked.tell(ended, self._learn(ended, event) if isinstance(event, Found) else None)
        now_s = self._clock()
        if now_s >= self._asked.due_s:
            self._asked.pass_time(now_s)
        if now_s >= self._heard.due_s:
            self._changes += 1
            self._fade(self._heard.pass_time(now_s))
        if now_s >= self._due_s:
            self._doubt(now_s)

    def _move(self) -> None:
        """What was heard of is of an epoch that is over. What is being stored is nobody's when it has come."""
        self._asked.give_up()
        self._heard_of[2] += self._forget()

    def _learn(self, ended: Ended, found: Found) -> int:
        """Offer what lies there. How much of it."""
        places = found.places
        if self._known.is_closed:
            return 0
        if not ended.is_whole or self._bad:
            places = {
                key: place
                for key in ended.keys
                if (place := places.get(key)) is not None and (place.pack, place.offset) not in self._bad
            }
        if not self._make_room(sum(place.num_bytes for place in places.values()), len(places)):
            places = self._fitting(ended.keys, places)
        if places:
            self._heard.learn(places, self._clock())
            self._changes += 1
            faded = self._faded
            if faded and not faded.keys().isdisjoint(places):
                self._faded = {key: None for key in faded if key not in places}
        if len(places) < len(ended.keys):
            missing = [key for key in ended.keys if key not in places]
            self._asked.miss(missing, found.heard_s)
            for key in missing if self._faded else ():
                self._faded.pop(key, None)
        return len(places)

    def _fitting(self, keys: Iterable[Key], places: Mapping[Key, PackPlace]) -> dict[Key, PackPlace]:
        """As much of it as there is room to know of, from its beginning on."""
        left_bytes = self.capacity_bytes - self.used_bytes
        left_keys = self._options.max_known - len(self._known.by_key) - len(self._heard.by_key)
        fitting: dict[Key, PackPlace] = {}
        for key in keys:
            place = places.get(key)
            if place is not None and place.num_bytes <= left_bytes and len(fitting) < left_keys:
                fitting[key] = place
                left_bytes -= place.num_bytes
        return fitting

    def _make_room(self, num_bytes: int, num_keys: int) -> bool:
        """Forget what was heard of first, and then what was stored or read, until there is room for so much more. False
        where that is not enough."""
        known, heard = self._known, self._heard
        while self._is_over(num_bytes, num_keys):
            if heard.by_key:
                self._heard_of[3] += len(heard.forget_oldest())
                self._changes += 1
            elif known.evictable_bytes:
                known.evict_next()
            else:
                return False
        return True

    def _is_over(self, num_bytes: int, num_keys: int) -> bool:
        num_known = len(self._known.by_key) + len(self._heard.by_key)
        return self.used_bytes + num_bytes > self.capacity_bytes or num_known + num_keys > self._options.max_known

    def _believe(self, entry: Known) -> None:
        self._faded.pop(entry.key, None)
        until_s = self._clock() + self._options.believed_s
        self._believed.append((until_s, entry))
        self._due_s = min(self._due_s, until_s)

    def _doubt(self, now_s: float) -> None:
        believed, by_key = self._believed, self._known.by_key
        while believed and (believed[0][0] <= now_s or len(believed) > 2 * len(by_key) + self._options.max_asked):
            _, entry = believed.popleft()
            if by_key.get(entry.key) is entry and self._known.lookup(entry.key) is _HIT:
                if entry.num_pins:
                    entry.is_over = True
                else:
                    self._fade_known(entry)
        self._due_s = believed[0][0] if believed else math.inf

    def _fade_known(self, entry: Known) -> None:
        self._known.withdraw(entry.key)
        self._heard_of[2] += 1
        self._fade((entry.key,))

    def _fade(self, keys: Sequence[Key]) -> None:
        faded = self._faded
        faded.update(dict.fromkeys(keys))
        if (surplus := len(faded) - self._options.max_known) > 0:
            for key in list(islice(faded, surplus)):
                del faded[key]

    # What is known.

    @property
    def capacity_bytes(self) -> int:
        return self._known.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What others hold for this side, and this side stored, as far as it knows."""
        return self._known.used_bytes + self._heard.num_bytes

    def cost(self, num_bytes: int) -> int:
        return num_bytes

    @property
    def num_keys(self) -> int:
        return self._known.num_keys + len(self._heard.by_key)

    @property
    def generation(self) -> int:
        self._hear()
        return self._known.generation + self._asked.changes + self._changes

    def lookup(self, key: Key) -> LookupResult:
        self._hear()
        return self._answer(key)

    def _answer(self, key: Key) -> LookupResult:
        if key in self._heard.by_key:
            return _HIT
        answer = self._known.lookup(key)
        return _PENDING if answer is _MISS and self._asked.is_pending(key) else answer

    def leading(self, keys: Iterable[Key]) -> int:
        self._hear()
        heard, held = self._heard.by_key, 0
        for key in keys:
            if key not in heard and self._answer(key) is _MISS:
                break
            held += 1
        return held

    def last_held(self, keys: Sequence[Key]) -> int | None:
        self._hear()
        if self._asked.is_empty and not self.num_keys:
            return None
        for place in range(len(keys) - 1, -1, -1):
            if self._answer(keys[place]) is not _MISS:
                return place
        return None

    def any_pending(self, keys: Iterable[Key]) -> bool:
        self._hear()
        return any(self._answer(key) is _PENDING for key in keys)

    def touch(self, keys: Iterable[Key]) -> None:
        self._known.touch(keys)

    def demote(self, keys: Iterable[Key]) -> None:
        """What was stored or read of these goes first. What lies in the store is others' too, and hears nothing."""
        self._known.demote(keys)

    # Storing.

    def follows(self, key: Key, needs: Sequence[Key]) -> None:
        """As `GathersPlaces` says."""
        self._needs = (key, needs)

    def end_batch(self) -> None:
        """As `GathersPlaces` says."""
        self._publish(self._packs.end_batch())

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """A promise: the place is there when the media say that they stored."""
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        if not 0 < len(key) <= LARGEST_KEY_BYTES:
            raise TierProtocolError(f"reserve: expected a key of 1 to {LARGEST_KEY_BYTES} bytes, got {len(key)}")
        self._hear()
        known = self._known
        refusal = known.why_not(key, num_bytes)
        if refusal is None and key in self._heard.by_key:
            refusal = Refusal.PRESENT
        if refusal is None and (self._courier.namespace is None or not self._courier.takes_objects):
            refusal = Refusal.BUSY
        if refusal is not None:
            return known.tally.refuse(refusal)
        self._make_room(num_bytes, 1)
        self._asked.withdraw(key)
        follower, needs = self._needs
        place = self._packs.place(key, num_bytes, needs if follower == key else ())
        self._shelves.next = place
        return known.take(key, num_bytes, num_bytes).slot

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        return [self.reserve(key, num_bytes) for key, num_bytes in chunks]

    def commit(self, key: Key) -> bool:
        is_committed = self._known.commit(key)
        if is_committed:
            self._believe(self._known.by_key[key])
        self._publish(self._packs.end(key, is_stored=is_committed))
        return is_committed

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        self._known.abort(key)
        self._publish(self._packs.end(key, is_stored=False))

    def _publish(self, stored: Sequence[Stored]) -> None:
        if stored:
            self._courier.publish(stored)

    # What is read, and what is not believed any more.

    def pin(self, key: Key) -> Slot | None:
        slots = self.pin_all((key,))
        return None if slots is None else slots[0]

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self._hear()
        heard = self._heard.by_key
        if not all(key in heard or self._known.lookup(key) is _HIT for key in keys):
            return None
        for key in keys:
            if key in heard:
                self._take_over(key)
        return self._known.pin_all(keys)

    def _take_over(self, key: Key) -> None:
        """What was heard of is read: the ledger keeps it from now on."""
        place = self._heard.pop(key)
        assert place is not None, "somebody looked"
        self._shelves.next = place
        entry = self._known.take(key, place.num_bytes, place.num_bytes)
        self._known.commit(key)
        self._heard_of[0] += 1
        self._heard_of[1] += 1
        self._believe(entry)

    def unpin(self, key: Key) -> None:
        self.unpin_all((key,))

    def unpin_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self._known.by_key.get(key)
            self._known.unpin(key)
            if entry is not None and entry.is_over and not entry.num_pins and self._known.lookup(key) is _HIT:
                self._fade_known(entry)

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        self._asked.withdraw(key)
        self._faded.pop(key, None)
        if key in self._heard.by_key:
            self._take_over(key)
        entry = self._known.by_key.get(key)
        if entry is not None and reason in _BAD:
            self._distrust(key, entry.place)
        return self._known.invalidate(key, reason)

    def _distrust(self, key: Key, place: PackPlace) -> None:
        """What lies there is not to be learned again from a manifest that names it."""
        self._bad.add((place.pack, place.offset), True)
        self._courier.retract(key, place)

    def clear(self) -> int:
        """`invalidate` every key here. What lies in the store is others' too, and stays, unless this is for all."""
        self._asked.clear()
        num_withdrawn = self._forget()
        self._courier.clear(is_for_all=self._clears_all)
        return num_withdrawn

    def _forget(self) -> int:
        self._believed.clear()
        self._faded.clear()
        self._packs.give_up()
        num_heard = self._heard.clear()
        self._changes += 1
        self._known.tally.invalidations += num_heard
        return self._known.forget_all() + num_heard

    def take_counts(self) -> TierCounts:
        """What was heard of is no store, and what is doubted no withdrawal: only what happened to it is counted."""
        self._hear()
        counts = self._known.tally.take()
        reservations, commits, faded, evictions = self._heard_of
        self._heard_of = [0, 0, 0, 0]
        return TierCounts(
            reservations=counts.reservations - reservations,
            commits=counts.commits - commits,
            aborts=counts.aborts,
            invalidations=counts.invalidations - faded,
            evictions=counts.evictions + evictions,
            evicted_bytes=counts.evicted_bytes,
            refusals=counts.refusals,
            answers=self._asked.take_answers(),
        )

    def close(self) -> None:
        if self._known.is_closed:
            return
        self._known.is_closed = True
        self._publish(self._packs.give_up())
        self._asked.clear()
        self._forget()
        self._courier.close()
