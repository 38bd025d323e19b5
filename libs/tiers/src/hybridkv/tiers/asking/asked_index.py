"""The half of a `TierIndex` that follows from two tables: what was asked elsewhere, and a ledger of what was heard.

Whoever derives from it says how keys are asked for and what becomes of answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

from hybridkv.planner import LookupResult
from hybridkv.tiers.asking.questions import Q, Questions
from hybridkv.tiers.contract import Answer, Heard, Key, Refusal, Slot
from hybridkv.tiers.ledger import KeyLedger
from hybridkv.tiers.ledger.states import E

_MISS, _PENDING = LookupResult.MISS, LookupResult.PENDING


class AskedIndex(Generic[Q, E]):
    """Base of indexes over others' chunks.

    Args:
        known: what was heard of, and what is stored there if anything is.
        questions: what was asked.
        clock: seconds; answers are dated by the same.
    """

    def __init__(self, known: KeyLedger[E], questions: Questions[Q], clock: Callable[[], float]) -> None:
        self._known = known
        self._questions = questions
        self._clock = clock
        self._due_s = math.inf
        """What is known is believed until then."""

    # For whoever derives from it.

    def _question(self, deadline_s: float, now_s: float) -> Q:
        """About one key that nobody was asked for yet."""
        raise NotImplementedError

    def _put(self, keys: Sequence[Key], deadline_s: float) -> None:
        """Ask somebody. Each key has its question: it is to be waited for, or `unasked`."""
        raise NotImplementedError

    def _take_news(self) -> None:
        """What arrived by now."""
        raise NotImplementedError

    def _doubt(self, now_s: float) -> None:
        """What was believed for long enough. Sets `_due_s`."""
        raise NotImplementedError

    # What is not known yet.

    @property
    def answers_late(self) -> bool:
        return True

    def ask(self, keys: Iterable[Key], deadline_s: float) -> None:
        self._hear()
        if self._known.is_closed:
            return
        questions, now_s, wanted = self._questions, self._clock(), []
        for key in keys:
            question = questions.by_key.get(key)
            if question is not None:
                questions.put_off(question, deadline_s)
            elif key not in self._known.by_key and not questions.is_missing(key, now_s):
                if questions.is_full:
                    questions.count(Answer.LATE)
                    continue
                questions.begin(key, self._question(deadline_s, now_s))
                wanted.append(key)
        if wanted:
            self._put(wanted, deadline_s)
        self._hear()

    def _hear(self) -> None:
        """What was answered by now, and what was not in time."""
        self._take_news()
        now_s = self._clock()
        if now_s >= self._questions.due_s or now_s >= self._due_s:
            self._questions.pass_time(now_s)
            self._doubt(now_s)

    @property
    def heard(self) -> Heard:
        self._hear()
        return self._questions.heard

    def lacks(self, key: Key) -> bool:
        self._hear()
        return self._known.lacks(key)

    # What is known.

    @property
    def capacity_bytes(self) -> int:
        return self._known.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """What others hold for this side, as far as it knows."""
        return self._known.used_bytes

    def cost(self, num_bytes: int) -> int:
        return num_bytes

    @property
    def num_keys(self) -> int:
        return self._known.num_keys

    @property
    def generation(self) -> int:
        self._hear()
        return self._known.generation + self._questions.changes

    def lookup(self, key: Key) -> LookupResult:
        self._hear()
        return self._answer(key)

    def _answer(self, key: Key) -> LookupResult:
        answer = self._known.lookup(key)
        return _PENDING if answer is _MISS and self._questions.is_pending(key) else answer

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
        if not self._questions.by_key and not self._known.num_keys:
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
        """What is known of these goes first. What others hold is theirs to give up: they hear nothing."""
        self._known.demote(keys)

    def reserve(self, key: Key, num_bytes: int) -> Slot | Refusal:
        raise NotImplementedError

    def reserve_all(self, chunks: Sequence[tuple[Key, int]]) -> list[Slot | Refusal]:
        return [self.reserve(key, num_bytes) for key, num_bytes in chunks]

    def commit(self, key: Key) -> bool:
        raise NotImplementedError

    def commit_all(self, keys: Sequence[Key]) -> list[bool]:
        return [self.commit(key) for key in keys]

    def abort(self, key: Key) -> None:
        self._known.abort(key)

    def pin(self, key: Key) -> Slot | None:
        self._hear()
        return self._known.pin(key)

    def pin_all(self, keys: Sequence[Key]) -> list[Slot] | None:
        self._hear()
        return self._known.pin_all(keys)

    def unpin(self, key: Key) -> None:
        self.unpin_all((key,))

    def unpin_all(self, keys: Iterable[Key]) -> None:
        raise NotImplementedError
