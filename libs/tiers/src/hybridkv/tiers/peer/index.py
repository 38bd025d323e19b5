"""What peers were asked, what they said, and for how long that is believed: a `TierIndex` that holds nothing itself.

Each question is one message to each peer that can be asked, whatever the number of its keys. The first that holds a key
is the one it is read from. Nothing is stored at a peer: a reservation is refused. Starts no thread and opens no
connection; a `Courier` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hybridkv.tiers.asking import AskedIndex, Question, Questions
from hybridkv.tiers.contract import UNSPECIFIED, Answer, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import KeyLedger, LeastRecentlyUsed
from hybridkv.tiers.peer.courier import Answered, Courier, Lost
from hybridkv.tiers.peer.known import Known, Whereabouts
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import at_peer


@dataclass(slots=True)
class _Asked(Question):
    waiting: set[int] = field(default_factory=set)
    """Peers that have not answered."""
    is_denied: bool = False
    """A peer has said that it lacks it."""


class PeerIndex(AskedIndex[_Asked, Known]):
    """The scheduler's half of who asks.

    Args:
        courier: carries questions. The index closes it.
        options: bounds.
        clock: seconds; answers are dated by the same.
    """

    def __init__(self, courier: Courier, options: PeerOptions, clock: Callable[[], float]) -> None:
        self._where = Whereabouts()
        known: KeyLedger[Known] = KeyLedger(
            self._where, LeastRecentlyUsed(), options.known_bytes, max_keys=options.max_known
        )
        super().__init__(known, Questions(options.max_asked, options.missing_s, options.given_up_s), clock)
        self._courier = courier
        self._options = options
        self._news = courier.news
        self._requests: dict[int, tuple[int, tuple[Key, ...]]] = {}
        """Questions without an answer: whom, and what."""
        self._next_request = 1
        self._num_invalidated = 0

    # What is not known yet.

    def _question(self, deadline_s: float, now_s: float) -> _Asked:
        return _Asked(deadline_s, now_s, self._next_request)

    def _put(self, keys: Sequence[Key], deadline_s: float) -> None:
        """One question to each peer."""
        questions, asked_peers = self._questions, set()
        for peer in self._courier.ready():
            request, self._next_request = self._next_request, self._next_request + 1
            if self._courier.ask(peer, request, keys):
                self._requests[request] = (peer, tuple(keys))
                asked_peers.add(peer)
        given_up_s = questions.given_up_s(deadline_s)
        for key in keys:
            if not asked_peers:
                questions.unasked(key)
                continue
            asked = questions.by_key[key]
            asked.waiting, asked.given_up_s = set(asked_peers), given_up_s
            questions.wait(key)

    # What is heard.

    def _take_news(self) -> None:
        news = self._news
        while news:
            event = news.popleft()
            if isinstance(event, Answered):
                self._hear_answer(event)
            else:
                self._hear_loss(event)

    def _hear_answer(self, answer: Answered) -> None:
        peer, keys = self._requests.pop(answer.request, (-1, ()))
        if peer != answer.peer:
            return
        unwanted = []
        for key, slot in zip(keys, answer.slots, strict=False):
            asked = self._questions.by_key.get(key)
            if asked is None or answer.request < asked.since:
                unwanted += [key] if slot is not None else []
            elif slot is None:
                self._deny(key, asked, peer, answer.heard_s)
            elif self._learn(key, slot, answer):
                self._questions.end(key, Answer.HELD, answer.heard_s)
            else:
                unwanted.append(key)
                self._deny(key, asked, peer, answer.heard_s)
        if unwanted:
            self._courier.give_up(peer, unwanted)

    def _deny(self, key: Key, asked: _Asked, peer: int, heard_s: float) -> None:
        """This peer cannot give it."""
        asked.waiting.discard(peer)
        asked.is_denied = True
        if not asked.waiting:
            self._questions.miss(key, heard_s)
            self._questions.end(key, Answer.MISSING, heard_s)

    def _learn(self, key: Key, slot: Slot, answer: Answered) -> bool:
        """Offer what a peer holds. False where it is known from elsewhere, or there is no room to know of it."""
        known, num_bytes = self._known, slot.num_bytes
        if known.is_closed or num_bytes <= 0 or known.why_not(key, num_bytes) is not None:
            return False
        while known.evictable_bytes and (
            known.used_bytes + num_bytes > known.capacity_bytes or len(known.by_key) >= self._options.max_known
        ):
            evicted = known.evict_next()
            self._release({evicted.peer: [evicted.key]})
        # The second half of the lease is for loading it.
        until_s = answer.heard_s + answer.lease_s / 2
        self._where.next = (at_peer(answer.peer, slot), answer.peer, until_s)
        known.take(key, num_bytes, num_bytes)
        known.commit(key)
        self._due_s = min(self._due_s, until_s)
        return True

    def _hear_loss(self, loss: Lost) -> None:
        for request in [request for request, (peer, _) in self._requests.items() if peer == loss.peer]:
            del self._requests[request]
        for entry in [entry for entry in self._known.by_key.values() if entry.peer == loss.peer]:
            entry.is_leased = False
            self._known.withdraw(entry.key)
        for key, asked in list(self._questions.by_key.items()):
            if loss.peer in asked.waiting:
                asked.waiting.discard(loss.peer)
                if not asked.waiting:
                    self._questions.end(key, Answer.MISSING if asked.is_denied else Answer.LATE, loss.heard_s)

    def _doubt(self, now_s: float) -> None:
        self._due_s = math.inf
        self._forget_requests()
        ended: dict[int, list[Key]] = {}
        for entry in [entry for entry in self._known.by_key.values() if not entry.num_pins]:
            if now_s >= entry.until_s:
                self._known.withdraw(entry.key)
                if entry.is_leased:
                    ended.setdefault(entry.peer, []).append(entry.key)
            else:
                self._due_s = min(self._due_s, entry.until_s)
        self._release(ended)

    def _forget_requests(self) -> None:
        """Of which nothing is waited for."""
        for request, (_, keys) in list(self._requests.items()):
            if not any((asked := self._questions.by_key.get(key)) and asked.since <= request for key in keys):
                del self._requests[request]

    # Nothing is stored at a peer.

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """Refused: CLOSED, PRESENT, or else TOO_LARGE, since asking again is pointless."""
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        self._hear()
        return self._known.tally.refuse(self._known.why_not(key, num_bytes) or Refusal.TOO_LARGE)

    def commit(self, key: Key) -> bool:
        return self._known.commit(key)

    # What is read, and what is not believed any more.

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        self._questions.withdraw(key)
        entry = self._known.withdraw(key)
        if entry is None:
            return False
        self._num_invalidated += 1
        if not entry.num_pins:
            self._release({entry.peer: [key]} if entry.is_leased else {})
        return True

    def unpin_all(self, keys: Iterable[Key]) -> None:
        """The last one gives the peer its chunk back: it was read, or is not going to be."""
        ended: dict[int, list[Key]] = {}
        for key in keys:
            entry = self._known.by_key.get(key)
            self._known.unpin(key)
            if entry is not None and not entry.num_pins and entry.is_leased:
                entry.is_leased = False
                ended.setdefault(entry.peer, []).append(key)
                self._due_s = min(self._due_s, entry.until_s)
        self._release(ended)

    def clear(self) -> int:
        self._questions.clear()
        ended: dict[int, list[Key]] = {}
        for key, entry in self._known.by_key.items():
            if not entry.num_pins and entry.is_leased:
                ended.setdefault(entry.peer, []).append(key)
        num_withdrawn = self._known.forget_all()
        self._num_invalidated += num_withdrawn
        self._release(ended)
        return num_withdrawn

    def _release(self, ended: dict[int, list[Key]]) -> None:
        for peer, keys in ended.items():
            self._courier.give_up(peer, keys)

    def take_counts(self) -> TierCounts:
        """What was heard of is no store: only what happened to it then is counted."""
        self._hear()
        counts = self._known.tally.take()
        invalidations, self._num_invalidated = self._num_invalidated, 0
        return TierCounts(
            invalidations=invalidations,
            evictions=counts.evictions,
            evicted_bytes=counts.evicted_bytes,
            refusals=counts.refusals,
            answers=self._questions.take_answers(),
        )

    def close(self) -> None:
        self._known.is_closed = True
        self.clear()
        self._courier.close()
