"""What peers were asked, what they said, and for how long that is believed: a `TierIndex` that holds nothing itself.

Each question is one message to each peer that can be asked, whatever the number of its keys. The first that holds a key
is the one it is read from. Nothing is stored at a peer: a reservation is refused. Starts no thread and opens no
connection; a `Courier` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import UNSPECIFIED, Answer, Heard, Key, Refusal, Slot, TierCounts
from hybridkv.tiers.errors import TierProtocolError
from hybridkv.tiers.ledger import KeyLedger, LeastRecentlyUsed
from hybridkv.tiers.peer.courier import Answered, Courier, Lost
from hybridkv.tiers.peer.known import Known, Whereabouts
from hybridkv.tiers.peer.options import PeerOptions
from hybridkv.tiers.peer.places import at_peer

_OVER_S = -math.inf
"""The deadline of what was not answered in time."""
_MISS, _PENDING = LookupResult.MISS, LookupResult.PENDING


@dataclass(slots=True)
class _Asked:
    """One key that was asked for."""

    deadline_s: float
    given_up_s: float
    since: int
    """Answers to older questions are not about this one."""
    waiting: set[int]
    """Peers that have not answered."""
    is_denied: bool = False
    """A peer has said that it lacks it."""


class PeerIndex:
    """The scheduler's half of who asks.

    Args:
        courier: carries questions. The index closes it.
        options: bounds.
        clock: seconds; answers are dated by the same.
    """

    def __init__(self, courier: Courier, options: PeerOptions, clock: Callable[[], float]) -> None:
        self._courier = courier
        self._options = options
        self._clock = clock
        self._news = courier.news
        self._where = Whereabouts()
        self._known: KeyLedger[Known] = KeyLedger(
            self._where, LeastRecentlyUsed(), options.known_bytes, max_keys=options.max_known
        )
        self._asked: dict[Key, _Asked] = {}
        self._requests: dict[int, tuple[int, tuple[Key, ...]]] = {}
        """Questions without an answer: whom, and what."""
        self._next_request = 1
        self._missing: dict[Key, float] = {}
        """Until when a key is lacking everywhere."""
        self._due_s = math.inf
        """Nothing changes before, unless there is news."""
        self._changes = 0
        self._answers: dict[Answer, int] = {}
        self._heard = Heard()
        self._num_invalidated = 0

    # What is not known yet.

    @property
    def answers_late(self) -> bool:
        return True

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        self._hear()
        if self._known.is_closed:
            return
        now_s, wanted = self._clock(), []
        for key in keys:
            asked = self._asked.get(key)
            if asked is not None:
                self._put_off(asked, deadline_s)
            elif key not in self._known.by_key and not self._is_missing(key, now_s):
                if len(self._asked) >= self._options.max_asked:
                    self._count(Answer.LATE)
                    continue
                self._asked[key] = _Asked(deadline_s, now_s, self._next_request, set())
                wanted.append(key)
        if wanted:
            self._put(wanted, deadline_s)
        self._hear()

    def _put_off(self, asked: _Asked, deadline_s: float) -> None:
        if deadline_s > asked.deadline_s:
            self._changes += 1
            asked.deadline_s = deadline_s
            asked.given_up_s = max(asked.given_up_s, deadline_s + self._options.given_up_s)

    def _put(self, keys: Sequence[Key], deadline_s: float) -> None:
        """One question to each peer. Where there is none nobody waits, and nobody is to blame."""
        asked_peers = set()
        for peer in self._courier.ready():
            request, self._next_request = self._next_request, self._next_request + 1
            if self._courier.ask(peer, request, keys):
                self._requests[request] = (peer, tuple(keys))
                asked_peers.add(peer)
        given_up_s = deadline_s + self._options.given_up_s
        for key in keys:
            if not asked_peers:
                del self._asked[key]
                self._count(Answer.LATE)
                continue
            asked = self._asked[key]
            asked.waiting, asked.given_up_s = set(asked_peers), given_up_s
            self._changes += 1
        self._due_s = min(self._due_s, deadline_s)

    def _is_missing(self, key: Key, now_s: float) -> bool:
        return now_s < self._missing.get(key, _OVER_S)

    # What is heard.

    def _hear(self) -> None:
        """What was answered by now, and what was not in time."""
        news = self._news
        while news:
            event = news.popleft()
            if isinstance(event, Answered):
                self._hear_answer(event)
            else:
                self._hear_loss(event)
        now_s = self._clock()
        if now_s >= self._due_s:
            self._pass_time(now_s)

    def _hear_answer(self, answer: Answered) -> None:
        peer, keys = self._requests.pop(answer.request, (-1, ()))
        if peer != answer.peer:
            return
        unwanted = []
        for key, slot in zip(keys, answer.slots, strict=False):
            asked = self._asked.get(key)
            if asked is None or answer.request < asked.since:
                unwanted += [key] if slot is not None else []
            elif slot is None:
                self._deny(key, asked, peer, answer.heard_s)
            elif self._learn(key, slot, answer):
                self._end(key, asked, Answer.HELD, answer.heard_s)
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
            self._remember_missing(key, heard_s)
            self._end(key, asked, Answer.MISSING, heard_s)

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
        for key, asked in list(self._asked.items()):
            if loss.peer in asked.waiting:
                asked.waiting.discard(loss.peer)
                if not asked.waiting:
                    self._end(key, asked, Answer.MISSING if asked.is_denied else Answer.LATE, loss.heard_s)

    def _pass_time(self, now_s: float) -> None:
        self._due_s = math.inf
        for key, asked in list(self._asked.items()):
            if asked.deadline_s != _OVER_S and now_s >= asked.deadline_s:
                self._tell(Answer.LATE)
                asked.deadline_s = _OVER_S
                self._changes += 1
            if now_s >= asked.given_up_s:
                del self._asked[key]
                continue
            due_s = asked.given_up_s if asked.deadline_s == _OVER_S else asked.deadline_s
            self._due_s = min(self._due_s, due_s)
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
            if not any((asked := self._asked.get(key)) and asked.since <= request for key in keys):
                del self._requests[request]

    def _end(self, key: Key, asked: _Asked, answer: Answer, heard_s: float) -> None:
        """It is found out."""
        del self._asked[key]
        self._changes += 1
        if asked.deadline_s != _OVER_S:
            self._tell(answer if heard_s <= asked.deadline_s else Answer.LATE)

    def _tell(self, answer: Answer) -> None:
        self._count(answer)
        is_late = answer is Answer.LATE
        self._heard = Heard(self._heard.in_time + (not is_late), self._heard.not_in_time + is_late)

    def _count(self, answer: Answer) -> None:
        self._answers[answer] = self._answers.get(answer, 0) + 1

    def _remember_missing(self, key: Key, heard_s: float) -> None:
        self._missing.pop(key, None)
        if len(self._missing) >= self._options.max_asked:
            del self._missing[next(iter(self._missing))]
        self._missing[key] = heard_s + self._options.missing_s

    @property
    def heard(self) -> Heard:
        self._hear()
        return self._heard

    def lacks(self, key: Key) -> bool:
        self._hear()
        return self._known.lacks(key)

    # What is known.

    @property
    def capacity_bytes(self) -> int:
        return self._known.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What peers hold for this side, as far as it knows."""
        return self._known.used_bytes

    def cost(self, num_bytes: int) -> int:
        return num_bytes

    @property
    def num_keys(self) -> int:
        return self._known.num_keys

    @property
    def generation(self) -> int:
        self._hear()
        return self._known.generation + self._changes

    def lookup(self, key: Key) -> LookupResult:
        self._hear()
        return self._answer(key)

    def _answer(self, key: Key) -> LookupResult:
        answer = self._known.lookup(key)
        if answer is _MISS and (asked := self._asked.get(key)) and asked.deadline_s != _OVER_S:
            return _PENDING
        return answer

    def leading(self, keys: Iterable[Key]) -> int:
        self._hear()
        held = 0
        for key in keys:
            if self._answer(key) is _MISS:
                break
            held += 1
        return held

    def last_held(self, keys: Sequence[Key]) -> int | None:
        self._hear()
        if not self._asked and not self._known.num_keys:
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

    # Nothing is stored at a peer.

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        """Refused: CLOSED, PRESENT, or else TOO_LARGE, since asking again is pointless."""
        if num_bytes <= 0:
            raise TierProtocolError(f"reserve: expected num_bytes > 0, got {num_bytes}")
        self._hear()
        return self._known.tally.refuse(self._known.why_not(key, num_bytes) or Refusal.TOO_LARGE)

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        return [self.reserve(key, num_bytes) for key, num_bytes in chunks]

    def commit(self, key: Key) -> bool:
        return self._known.commit(key)

    def abort(self, key: Key) -> None:
        self._known.abort(key)

    # What is read, and what is not believed any more.

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        if self._asked.pop(key, None) is not None:
            self._changes += 1
        entry = self._known.withdraw(key)
        if entry is None:
            return False
        self._num_invalidated += 1
        if not entry.num_pins:
            self._release({entry.peer: [key]} if entry.is_leased else {})
        return True

    def pin(self, key: Key) -> Slot | None:
        self._hear()
        return self._known.pin(key)

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self._hear()
        return self._known.pin_all(keys)

    def unpin(self, key: Key) -> None:
        self.unpin_all((key,))

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
        self._changes += len(self._asked)
        self._asked.clear()
        self._missing.clear()
        ended: dict[int, list[Key]] = {}
        for key, entry in self._known.by_key.items():
            if not entry.num_pins and entry.is_leased:
                ended.setdefault(entry.peer, []).append(key)
        num_withdrawn = self._known.forget_all().num_withdrawn
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
        answers, self._answers = self._answers, {}
        invalidations, self._num_invalidated = self._num_invalidated, 0
        return TierCounts(
            invalidations=invalidations,
            evictions=counts.evictions,
            evicted_bytes=counts.evicted_bytes,
            refusals=counts.refusals,
            answers=answers,
        )

    def close(self) -> None:
        self._known.is_closed = True
        self.clear()
        self._courier.close()
