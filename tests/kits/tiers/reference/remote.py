"""Executable specification of a tier with async lookups: a remote store, which may be slow, wrong and lose chunks.

Also an example of a tier that is neither memory nor a disk: one store, an index for each engine that uses it, and a
medium for each rank. `RemoteStore` is shared; a test sets what goes wrong there. No call waits: time is the clock's,
and results arrive when the clock says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import (
    UNSPECIFIED,
    Completion,
    Extends,
    Failure,
    FailureReason,
    Key,
    LookupAnswer,
    LookupCounts,
    NewChunk,
    Refusal,
    Slot,
    Ticket,
    TierCounts,
)
from kits.tiers.reference.index import ReferenceIndex
from kits.tiers.reference.medium import ReferenceMedium

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NEVER_S = math.inf
_LONG_AGO_S = -math.inf
"""Deadline of a lookup that has timed out."""
MAX_ASKED = 4096
"""Keys that an index may have in lookup at one time."""


@dataclass(slots=True)
class RemoteStore:
    """The remote store and its behaviour.

    Args:
        num_ranks: each has its part of every chunk.
        clock: seconds.
        answer_s: time until an answer.
        move_s: time of a store or a load.
        is_silent: nothing is answered, and nothing that begins now ends.
    """

    num_ranks: int
    clock: Callable[[], float]
    answer_s: float = 0.0
    move_s: float = 0.0
    is_silent: bool = False
    directory: dict[Key, Slot] = field(default_factory=dict)
    """Chunks that it claims to hold."""
    media: list[ReferenceMedium] = field(init=False)
    """Chunks that it does hold, for each rank."""
    num_lookups: int = 0
    """Total number of keys."""
    _next_place: int = 0

    def __post_init__(self) -> None:
        self.media = [ReferenceMedium() for _ in range(self.num_ranks)]

    def allocate(self, num_bytes: int) -> Slot:
        """Allocates a place that is never reused."""
        place, self._next_place = self._next_place, self._next_place + num_bytes
        return Slot(((place, num_bytes),))

    def lie(self, key: Key, num_bytes: int) -> None:
        """Claims from now on to hold a chunk that is missing."""
        self.directory[key] = self.allocate(num_bytes)

    def confuse(self, key: Key, other: Key) -> None:
        """Claims from now on that a chunk is at the place of another, with that one's bytes and length."""
        self.directory[key] = self.directory[other]

    def vanish(self, key: Key) -> None:
        """Loses a chunk. Engines that found it before will still load it."""
        slot = self.directory.pop(key, None)
        if slot is not None:
            for medium in self.media:
                medium.forget(slot)


@dataclass(frozen=True, slots=True)
class _Asked:
    lookups_sent_s: float
    answers_s: float
    deadline_s: float


class RemoteIndex:
    """`TierIndex` over a `RemoteStore`: the chunks that this engine stored there, and those that it found.

    Args:
        store: the remote store.
        capacity_bytes: bytes that this engine may use there, or know of. Evicted keys are forgotten here, and can still
            be found by a lookup.
        granule_bytes: as `ReferenceIndex`.
    """

    def __init__(self, store: RemoteStore, capacity_bytes: int, granule_bytes: int = 1) -> None:
        self._store = store
        self._known = ReferenceIndex(capacity_bytes, granule_bytes)
        self._slots: dict[Key, Slot] = {}
        self._asked: dict[Key, _Asked] = {}
        self._changes = 0
        self._answers: dict[LookupAnswer, int] = {}
        self._lookup_counts = LookupCounts()
        self._answer_s: float | None = None

    # Lookups.

    @property
    def has_async_lookups(self) -> bool:
        return True

    def start_lookup(self, keys: Iterable[Key], deadline_s: float) -> None:
        self._receive()
        now_s = self._store.clock()
        for key in keys:
            asked = self._asked.get(key)
            if asked is not None:
                # Already in lookup: a second one would delay the answer.
                later_s = max(asked.deadline_s, deadline_s)
                self._changes += later_s != asked.deadline_s
                self._asked[key] = _Asked(asked.lookups_sent_s, asked.answers_s, later_s)
            elif self._known.lacks(key) and not self._known.is_doomed(key):
                if len(self._asked) >= MAX_ASKED:
                    self._count(LookupAnswer.TIMED_OUT)
                    continue
                self._store.num_lookups += 1
                self._changes += 1
                answers_s = _NEVER_S if self._store.is_silent else now_s + self._store.answer_s
                self._asked[key] = _Asked(now_s, answers_s, deadline_s)
        self._receive()

    def _receive(self) -> None:
        """Applies answers that have arrived, and ends lookups that have timed out."""
        now_s = self._store.clock()
        for key, asked in list(self._asked.items()):
            if now_s >= asked.answers_s:
                slot = self._store.directory.get(key)
                is_known = slot is not None and isinstance(self._known.reserve(key, slot.num_bytes), Slot)
                if slot is not None and is_known:
                    self._known.commit(key)
                    self._slots[key] = slot
                    self._forget_slots()
                if asked.deadline_s != _LONG_AGO_S:
                    num_answered = LookupAnswer.FOUND if is_known else LookupAnswer.MISSING
                    self._end(asked, num_answered if asked.answers_s <= asked.deadline_s else LookupAnswer.TIMED_OUT)
            elif now_s < asked.deadline_s or asked.deadline_s == _LONG_AGO_S:
                continue
            else:
                self._end(asked, LookupAnswer.TIMED_OUT)
            if now_s < asked.answers_s < _NEVER_S:
                # An answer may still come. Until then the key is a MISS.
                self._asked[key] = _Asked(asked.lookups_sent_s, asked.answers_s, _LONG_AGO_S)
                self._changes += 1
                continue
            del self._asked[key]
            self._changes += 1

    def _end(self, asked: _Asked, answer: LookupAnswer) -> None:
        self._count(answer)
        is_late = answer is LookupAnswer.TIMED_OUT
        took_s = 2 * (asked.deadline_s - asked.lookups_sent_s) if is_late else asked.answers_s - asked.lookups_sent_s
        self._answer_s = took_s if self._answer_s is None else (3 * self._answer_s + took_s) / 4
        self._lookup_counts = LookupCounts(
            self._lookup_counts.num_answered + (not is_late), self._lookup_counts.num_timed_out + is_late
        )

    def _count(self, answer: LookupAnswer) -> None:
        self._answers[answer] = self._answers.get(answer, 0) + 1

    @property
    def lookup_counts(self) -> LookupCounts:
        self._receive()
        return self._lookup_counts

    @property
    def answer_s(self) -> float:
        self._receive()
        return self._answer_s or 0.0

    def lacks(self, key: Key) -> bool:
        self._receive()
        return self._known.lacks(key)

    # Known keys.

    @property
    def capacity_bytes(self) -> int:
        return self._known.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._known.used_bytes

    def cost(self, num_bytes: int) -> int:
        return self._known.cost(num_bytes)

    @property
    def num_keys(self) -> int:
        return self._known.num_keys

    @property
    def generation(self) -> int:
        self._receive()
        return self._known.generation + self._changes

    def lookup(self, key: Key) -> LookupResult:
        self._receive()
        answer = self._known.lookup(key)
        if answer is LookupResult.MISS and (asked := self._asked.get(key)) and asked.deadline_s != _LONG_AGO_S:
            return LookupResult.PENDING
        return answer

    def leading(self, keys: Iterable[Key]) -> int:
        held = 0
        for key in keys:
            if self.lookup(key) is LookupResult.MISS:
                break
            held += 1
        return held

    def last_held(self, keys: Sequence[Key]) -> int | None:
        held = (place for place, key in enumerate(keys) if self.lookup(key) is not LookupResult.MISS)
        return max(held, default=None)

    def any_pending(self, keys: Iterable[Key]) -> bool:
        return any(self.lookup(key) is LookupResult.PENDING for key in keys)

    def touch(self, keys: Iterable[Key], extends: Sequence[Extends] = ()) -> None:
        self._known.touch(keys, extends)

    def reserve(self, key: Key, num_bytes: int, extends: Extends = ()) -> Slot | Refusal:
        self._receive()
        answer = self._known.reserve(key, num_bytes, extends)
        if isinstance(answer, Refusal):
            return answer
        if self._asked.pop(key, None) is not None:
            self._changes += 1
        self._slots[key] = self._store.allocate(num_bytes)
        self._forget_slots()
        return self._slots[key]

    def reserve_all(self, chunks: Sequence[NewChunk]) -> list[Slot | Refusal]:
        return [self.reserve(*chunk) for chunk in chunks]

    def commit(self, key: Key) -> bool:
        is_committed = self._known.commit(key)
        if is_committed:
            self._store.directory[key] = self._slots[key]
        return is_committed

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        self._known.abort(key)

    def invalidate(self, key: Key, reason: str = UNSPECIFIED) -> bool:
        if self._asked.pop(key, None) is not None:
            self._changes += 1
        is_withdrawn = self._known.invalidate(key, reason)
        if is_withdrawn:
            self._store.directory.pop(key, None)
        return is_withdrawn

    def pin(self, key: Key) -> Slot | None:
        self._receive()
        return None if self._known.pin(key) is None else self._slots[key]

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self._receive()
        return None if self._known.pin_all(keys) is None else [self._slots[key] for key in keys]

    def unpin(self, key: Key) -> None:
        self._known.unpin(key)

    def unpin_all(self, keys: Iterable[Key]) -> None:
        self._known.unpin_all(keys)

    def clear(self) -> int:
        for key in self._slots:
            self._store.directory.pop(key, None)
        self._changes += len(self._asked)
        self._asked.clear()
        return self._known.clear()

    def take_counts(self) -> TierCounts:
        self._receive()
        answers, self._answers = self._answers, {}
        return self._known.take_counts().merge(TierCounts(answers=answers))

    def close(self) -> None:
        """Stored chunks stay in the store."""
        self._asked.clear()
        self._known.close()

    def _forget_slots(self) -> None:
        """Forgets the slots of evicted keys once they are as many as the others."""
        if len(self._slots) <= 2 * self._known.num_keys + MAX_ASKED:
            return
        for key in [key for key in self._slots if self._known.lacks(key) and not self._known.is_doomed(key)]:
            del self._slots[key]


class RemoteMedium:
    """One rank's `TierMedium` of a `RemoteStore`. Operations end when the clock says so."""

    def __init__(self, store: RemoteStore, rank: int) -> None:
        self._store = store
        self._medium = store.media[rank]
        self._moving: list[tuple[float, Callable[[], Completion]]] = []
        self._is_closed = False

    def store(self, ticket: Ticket, key: Key, slot: Slot, source: Sequence[Buffer]) -> None:
        self._begin(ticket, lambda: self._medium.store(ticket, key, slot, source))

    def load(self, ticket: Ticket, key: Key, slot: Slot, destination: Sequence[Buffer]) -> None:
        self._begin(ticket, lambda: self._medium.load(ticket, key, slot, destination))

    def _begin(self, ticket: Ticket, carry_out: Callable[[], None]) -> None:
        store = self._store
        if self._is_closed:
            closed = Completion(ticket, Failure(FailureReason.CLOSED, "the medium was closed"))
            self._moving.append((-math.inf, lambda: closed))
            return
        ends_s = _NEVER_S if store.is_silent else store.clock() + store.move_s
        self._moving.append((ends_s, lambda: self._end(carry_out)))

    def _end(self, carry_out: Callable[[], None]) -> Completion:
        carry_out()
        [completion] = self._medium.poll()
        return completion

    def poll(self) -> list[Completion]:
        return self._end_before(self._store.clock())

    def _end_before(self, now_s: float) -> list[Completion]:
        ended = [end for ends_s, end in self._moving if ends_s <= now_s]
        self._moving = [(ends_s, end) for ends_s, end in self._moving if ends_s > now_s]
        return [end() for end in ended]

    def drain(self, timeout_s: float) -> bool:
        """As if that time had passed."""
        ready_s = self._store.clock()
        limit_s = ready_s + timeout_s
        self._moving = [(min(ends_s, ready_s) if ends_s <= limit_s else ends_s, end) for ends_s, end in self._moving]
        return all(ends_s <= limit_s for ends_s, _ in self._moving)

    def close(self) -> None:
        """The store remains open."""
        self._is_closed = True

    def views(self, slot: Slot) -> list[memoryview]:
        return self._medium.views(slot)
