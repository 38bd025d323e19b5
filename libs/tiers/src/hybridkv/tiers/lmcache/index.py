"""What a server of LMCache was asked and is believed to hold: a `TierIndex` that holds nothing itself.

A server evicts without a word, so nothing is believed for long: what was found or stored is offered for a while, and
asked for again after it. Starts no thread and opens no connection; a `Courier` does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.asking import AskedIndex, Question, Questions
from hybridkv.tiers.contract import UNSPECIFIED, Answer, FailureReason, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import KeyLedger, LeastRecentlyUsed
from hybridkv.tiers.lmcache.known import Known, Names
from hybridkv.tiers.lmcache.options import LMCacheOptions
from hybridkv.tiers.lmcache.questioner import Courier, Found, Lost

_HIT = LookupResult.HIT
_BAD = frozenset({FailureReason.CHECKSUM, FailureReason.WRONG_KEY})


class LMCacheIndex(AskedIndex[Question, Known]):
    """The scheduler's half.

    Args:
        courier: carries questions. The index closes it.
        sizes: of chunks, in bytes, that a rank may have.
        options: bounds.
        clock: seconds; answers are dated by the same.
    """

    def __init__(
        self, courier: Courier, sizes: Container[int], options: LMCacheOptions, clock: Callable[[], float]
    ) -> None:
        known: KeyLedger[Known] = KeyLedger(
            Names(), LeastRecentlyUsed(), options.known_bytes, max_keys=options.max_known
        )
        super().__init__(known, Questions(options.max_asked, options.missing_s, options.given_up_s), clock)
        self._courier = courier
        self._sizes = sizes
        self._options = options
        self._request = 0
        """The last one."""
        self._believed: deque[tuple[float, Known]] = deque()
        """Until when, the earliest first."""
        self._faded: dict[Key, None] = {}
        """What was believed once: worth asking for, and not worth storing before that. The oldest first."""
        self._bad: dict[Key, float] = {}
        """Until when a chunk is left alone whose bytes were wrong."""
        self._heard_of = [0, 0, 0]
        """Reservations and commits that were no stores, and what was withdrawn because nobody knows any more."""

    # What is not known yet.

    def _question(self, deadline_s: float, now_s: float) -> Question:
        return Question(deadline_s, self._questions.given_up_s(deadline_s), self._request + 1)

    def _put(self, keys: Sequence[Key], deadline_s: float) -> None:
        questions, now_s = self._questions, self._clock()
        self._request += 1
        good = []
        for key in keys:
            if now_s < self._bad.get(key, -math.inf):
                questions.unasked(key, Answer.MISSING)
            else:
                good.append(key)
        is_asked = bool(good) and self._courier.ask(self._request, good, questions.given_up_s(deadline_s))
        for key in good:
            questions.wait(key) if is_asked else questions.unasked(key)

    def lacks(self, key: Key) -> bool:
        """What was there a while ago, and was not asked for since, is taken to be there still."""
        return super().lacks(key) and (key not in self._faded or key in self._questions.by_key)

    # What is heard.

    def _take_news(self) -> None:
        self._courier.look()
        news = self._courier.news
        while news:
            event = news.popleft()
            if isinstance(event, Lost):
                self._lose(event.heard_s)
                continue
            question = self._questions.by_key.get(event.key)
            if question is None or event.request < question.since:
                continue
            if not isinstance(event, Found):
                self._questions.end(event.key, Answer.LATE, event.heard_s)
            elif event.num_bytes is not None and self._learn(event.key, event.num_bytes):
                self._questions.end(event.key, Answer.HELD, event.heard_s)
            else:
                self._faded.pop(event.key, None)
                self._questions.miss(event.key, event.heard_s)
                self._questions.end(event.key, Answer.MISSING, event.heard_s)

    def _learn(self, key: Key, num_bytes: int) -> bool:
        """Offer what the server holds. False where there is no room to know of it."""
        known = self._known
        if known.is_closed or known.why_not(key, num_bytes) is not None:
            return False
        known.make_room(num_bytes)
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
        self._due_s = believed[0][0] if believed else math.inf

    def _fade(self, entry: Known) -> None:
        self._known.withdraw(entry.key)
        self._heard_of[2] += 1
        if len(self._faded) >= self._options.max_known:
            del self._faded[next(iter(self._faded))]
        self._faded[entry.key] = None

    def _lose(self, heard_s: float) -> None:
        """What this server held is nobody's to offer. What is being stored ends by itself."""
        for key in [key for key, entry in self._known.by_key.items() if self._known.lookup(key) is _HIT]:
            self._known.withdraw(key)
            self._heard_of[2] += 1
        self._believed.clear()
        self._faded.clear()
        for key in list(self._questions.by_key):
            self._questions.end(key, Answer.LATE, heard_s)

    # Storing.

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """A promise: the place is there when the medium says that it stored.

        BUSY while the server is gone: a store that cannot succeed would count against the tier, which would then be
        left alone for long after the server came back.
        """
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        self._hear()
        known, refusal = self._known, None
        if key not in known.by_key and not known.is_closed:
            if num_bytes not in self._sizes:
                refusal = Refusal.TOO_LARGE
            elif self._clock() < self._bad.get(key, -math.inf):
                refusal = Refusal.PRESENT
        refusal = refusal or known.why_not(key, num_bytes)
        if refusal is None and not self._courier.is_there:
            refusal = Refusal.BUSY
        if refusal is not None:
            return known.tally.refuse(refusal)
        known.make_room(num_bytes)
        self._questions.withdraw(key)
        return known.take(key, num_bytes, num_bytes).slot

    def commit(self, key: Key) -> bool:
        is_committed = self._known.commit(key)
        if is_committed:
            self._believe(self._known.by_key[key])
        return is_committed

    # What is read, and what is not believed any more.

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        self._questions.withdraw(key)
        self._faded.pop(key, None)
        if reason in _BAD:
            self._bad.pop(key, None)
            if len(self._bad) >= self._options.max_asked:
                del self._bad[next(iter(self._bad))]
            self._bad[key] = self._clock() + self._options.bad_s
        return self._known.invalidate(key, reason)

    def unpin_all(self, keys: Iterable[Key]) -> None:
        for key in keys:
            entry = self._known.by_key.get(key)
            self._known.unpin(key)
            if entry is not None and entry.is_over and not entry.num_pins and self._known.lookup(key) is _HIT:
                self._fade(entry)

    def clear(self) -> int:
        self._questions.clear()
        self._believed.clear()
        self._faded.clear()
        return self._known.forget_all()

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
        self._known.is_closed = True
        self.clear()
        self._courier.close()
