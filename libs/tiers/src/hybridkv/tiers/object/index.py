"""What this engine knows of a fleet's store: a `TierIndex` that holds nothing itself.

What was found or stored is offered for a while, and asked for again after it, because packs expire. Starts no thread
and opens no connection; a `Courier` does.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.asking import AskedIndex, Question, Questions
from hybridkv.tiers.contract import UNSPECIFIED, Answer, FailureReason, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import KeyLedger, LeastRecentlyUsed
from hybridkv.tiers.object.courier import Courier, Found, Moved
from hybridkv.tiers.object.format.record import LARGEST_KEY_BYTES
from hybridkv.tiers.object.known import Known, Place, Shelves
from hybridkv.tiers.object.names import pack_name
from hybridkv.tiers.object.options import ObjectOptions
from hybridkv.tiers.object.packs import Packs, Stored

_HIT = LookupResult.HIT
_BAD = frozenset({FailureReason.CHECKSUM, FailureReason.WRONG_KEY, FailureReason.MISSING})


class ObjectIndex(AskedIndex[Question, Known]):
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
        self._shelves = Shelves()
        known: KeyLedger[Known] = KeyLedger(
            self._shelves, LeastRecentlyUsed(), options.known_bytes, max_keys=options.max_known
        )
        super().__init__(known, Questions(options.max_asked, options.missing_s, options.given_up_s), clock)
        self._courier = courier
        self._options = options
        self._clears_all = clears_all
        self._packs = Packs(options.pack_bytes, self._new_pack)
        self._engine = uuid.uuid4().hex
        self._num_packs = 0
        self._request = 0
        """The last one."""
        self._requests: dict[int, Sequence[Key]] = {}
        """Questions without an answer."""
        self._needs: tuple[Key, Sequence[Key]] = (b"", ())
        """What the key that is reserved next needs."""
        self._believed: deque[tuple[float, Known]] = deque()
        """Until when, the earliest first."""
        self._faded: dict[Key, None] = {}
        """What was believed once: worth asking for, and not worth storing before that. The oldest first."""
        self._bad: dict[tuple[str, int], float] = {}
        """Until when a place is not believed."""
        self._heard_of = [0, 0, 0]
        """Reservations and commits that were no stores, and what was withdrawn because nobody knows any more."""

    def _new_pack(self) -> str:
        namespace = self._courier.namespace
        assert namespace is not None, "`reserve` looked"
        self._num_packs += 1
        return pack_name(namespace, f"{self._engine}-{self._num_packs}")

    # What is not known yet.

    def _question(self, deadline_s: float, now_s: float) -> Question:
        return Question(deadline_s, self._questions.given_up_s(deadline_s), self._request + 1)

    def _put(self, keys: Sequence[Key], deadline_s: float) -> None:
        questions = self._questions
        self._request += 1
        if self._courier.ask(self._request, keys, questions.given_up_s(deadline_s)):
            self._requests[self._request] = keys
            for key in keys:
                questions.wait(key)
        else:
            for key in keys:
                questions.unasked(key)

    def lacks(self, key: Key) -> bool:
        """What was there a while ago, and was not asked for since, is taken to be there still."""
        return super().lacks(key) and (key not in self._faded or key in self._questions.by_key)

    # What is heard.

    def _take_news(self) -> None:
        news = self._courier.news
        while news:
            event = news.popleft()
            if isinstance(event, Moved):
                self._move(event.heard_s)
                continue
            for key in self._requests.pop(event.request, ()):
                question = self._questions.by_key.get(key)
                if question is None or event.request < question.since:
                    continue
                if not isinstance(event, Found):
                    self._questions.end(key, Answer.LATE, event.heard_s)
                elif (place := event.places.get(key)) is not None and self._learn(key, place, event.source):
                    self._questions.end(key, Answer.HELD, event.heard_s)
                else:
                    self._faded.pop(key, None)
                    self._questions.miss(key, event.heard_s)
                    self._questions.end(key, Answer.MISSING, event.heard_s)

    def _move(self, heard_s: float) -> None:
        """What was heard of is of an epoch that is over. What is being stored is nobody's when it has come."""
        for key in list(self._questions.by_key):
            self._questions.end(key, Answer.LATE, heard_s)
        self._requests.clear()
        self._believed.clear()
        self._faded.clear()
        self._packs.give_up()
        self._heard_of[2] += self._known.forget_all().num_withdrawn

    def _learn(self, key: Key, place: Place, source: bytes) -> bool:
        """Offer what lies there. False where it is known from elsewhere, is bad, or there is no room to know of it."""
        known, num_bytes = self._known, place.num_bytes
        if self._clock() < self._bad.get((place.pack, place.offset), -math.inf):
            return False
        if known.is_closed or known.why_not(key, num_bytes) is not None:
            return False
        known.make_room(num_bytes)
        self._shelves.next = (place, source)
        entry = known.take(key, num_bytes, num_bytes)
        known.commit(key)
        self._heard_of[0] += 1
        self._heard_of[1] += 1
        self._believe(entry)
        return True

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
                    self._fade(entry)
        for request in [request for request, keys in self._requests.items() if not self._is_waited_for(request, keys)]:
            del self._requests[request]
        self._due_s = believed[0][0] if believed else math.inf

    def _is_waited_for(self, request: int, keys: Sequence[Key]) -> bool:
        by_key = self._questions.by_key
        return any((question := by_key.get(key)) is not None and question.since <= request for key in keys)

    def _fade(self, entry: Known) -> None:
        self._known.withdraw(entry.key)
        self._heard_of[2] += 1
        if len(self._faded) >= self._options.max_known:
            del self._faded[next(iter(self._faded))]
        self._faded[entry.key] = None

    # Storing.

    def follows(self, key: Key, needs: Sequence[Key]) -> None:
        """As `GathersStores` says."""
        self._needs = (key, needs)

    def end_batch(self) -> None:
        """As `GathersStores` says."""
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
        if refusal is None and self._courier.namespace is None:
            refusal = Refusal.BUSY
        if refusal is not None:
            return known.tally.refuse(refusal)
        known.make_room(num_bytes)
        self._questions.withdraw(key)
        follower, needs = self._needs
        place = self._packs.place(key, num_bytes, needs if follower == key else ())
        self._shelves.next = (place, b"")
        return known.take(key, num_bytes, num_bytes).slot

    def commit(self, key: Key) -> bool:
        is_committed = self._known.commit(key)
        if is_committed:
            self._believe(self._known.by_key[key])
        self._publish(self._packs.end(key, is_stored=is_committed))
        return is_committed

    def abort(self, key: Key) -> None:
        self._known.abort(key)
        self._publish(self._packs.end(key, is_stored=False))

    def _publish(self, stored: Sequence[Stored]) -> None:
        if stored:
            self._courier.publish(stored)

    # What is read, and what is not believed any more.

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        self._questions.withdraw(key)
        self._faded.pop(key, None)
        entry = self._known.by_key.get(key)
        if entry is not None and reason in _BAD:
            self._distrust(entry)
        return self._known.invalidate(key, reason)

    def _distrust(self, entry: Known) -> None:
        """What lies there is not to be learned again from a manifest that names it."""
        where = (entry.place.pack, entry.place.offset)
        self._bad.pop(where, None)
        if len(self._bad) >= self._options.max_asked:
            del self._bad[next(iter(self._bad))]
        self._bad[where] = self._clock() + self._options.bad_s
        if entry.source:
            self._courier.retract(entry.source)

    def unpin_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self._known.by_key.get(key)
            self._known.unpin(key)
            if entry is not None and entry.is_over and not entry.num_pins and self._known.lookup(key) is _HIT:
                self._fade(entry)

    def clear(self) -> int:
        """`invalidate` every key here. What lies in the store is others' too, and stays, unless this is for all."""
        num_withdrawn = self._forget()
        self._courier.clear(is_for_all=self._clears_all)
        return num_withdrawn

    def _forget(self) -> int:
        self._questions.clear()
        self._requests.clear()
        self._believed.clear()
        self._faded.clear()
        self._packs.give_up()
        return self._known.forget_all().num_withdrawn

    def take_counts(self) -> TierCounts:
        """What was heard of is no store, and what is doubted no withdrawal: only what happened to it is counted."""
        self._hear()
        counts = self._known.tally.take()
        reservations, commits, faded = self._heard_of
        self._heard_of = [0, 0, 0]
        return TierCounts(
            reservations=counts.reservations - reservations,
            commits=counts.commits - commits,
            aborts=counts.aborts,
            invalidations=counts.invalidations - faded,
            evictions=counts.evictions,
            evicted_bytes=counts.evicted_bytes,
            refusals=counts.refusals,
            answers=self._questions.take_answers(),
        )

    def close(self) -> None:
        if self._known.is_closed:
            return
        self._known.is_closed = True
        self._publish(self._packs.give_up())
        self._forget()
        self._courier.close()
