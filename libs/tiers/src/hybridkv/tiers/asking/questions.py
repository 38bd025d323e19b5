"""What an index asked elsewhere: until when each answer is waited for, how it ended, and what was found missing.

Knows nobody who could be asked. Time is told to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from hybridkv.tiers.contract import Answer, Heard, Key

_OVER_S = -math.inf
"""The deadline of what was not answered in time."""


@dataclass(slots=True)
class Question:
    """One key that was asked for."""

    deadline_s: float
    given_up_s: float
    since: int
    """Answers to older requests are not about this one."""


Q = TypeVar("Q", bound=Question)


class Questions(Generic[Q]):
    """All keys that one index waits for.

    Args:
        max_asked: of them at one time; and what is remembered as missing.
        missing_s: for so long nobody is asked again for what was found missing.
        given_up_s: what was not answered so long after its deadline is waited for no more.
    """

    def __init__(self, max_asked: int, missing_s: float, given_up_s: float) -> None:
        self._max_asked = max_asked
        self._missing_s = missing_s
        self._given_up_s = given_up_s
        self.by_key: dict[Key, Q] = {}
        self.due_s = math.inf
        """Nothing is over before."""
        self.changes = 0
        """How often the answer of a lookup may have changed."""
        self.heard = Heard()
        self._missing: dict[Key, float] = {}
        """Until when a key is lacking."""
        self._answers: dict[Answer, int] = {}

    # Asking.

    @property
    def is_full(self) -> bool:
        """Whether as much is asked as may be."""
        return len(self.by_key) >= self._max_asked

    def given_up_s(self, deadline_s: float) -> float:
        """Until when an answer is of any use."""
        return deadline_s + self._given_up_s

    def begin(self, key: Key, question: Q) -> None:
        """It is being found out. Not PENDING before `wait`."""
        self.by_key[key] = question

    def wait(self, key: Key) -> None:
        """Somebody was asked about it."""
        self.changes += 1
        self.due_s = min(self.due_s, self.by_key[key].deadline_s)

    def unasked(self, key: Key, answer: Answer = Answer.LATE) -> None:
        """Nobody is asked: nobody waits, and nobody is to blame or to be praised."""
        self.by_key.pop(key, None)
        self.count(answer)

    def put_off(self, question: Q, deadline_s: float) -> None:
        """It was asked for again: the later deadline holds."""
        if deadline_s > question.deadline_s:
            self.changes += 1
            question.deadline_s = deadline_s
            question.given_up_s = max(question.given_up_s, self.given_up_s(deadline_s))
            self.due_s = min(self.due_s, deadline_s)

    def is_pending(self, key: Key) -> bool:
        """Whether an answer may still come in time."""
        question = self.by_key.get(key)
        return question is not None and question.deadline_s != _OVER_S

    # Ends.

    def end(self, key: Key, answer: Answer, heard_s: float) -> None:
        """It is found out."""
        question = self.by_key.pop(key)
        self.changes += 1
        if question.deadline_s != _OVER_S:
            self._tell(answer if heard_s <= question.deadline_s else Answer.LATE)

    def withdraw(self, key: Key) -> None:
        """It is not to be found out any more, if it was."""
        if self.by_key.pop(key, None) is not None:
            self.changes += 1

    def pass_time(self, now_s: float) -> None:
        """What was not answered in time is so now."""
        if now_s < self.due_s:
            return
        self.due_s = math.inf
        for key, question in list(self.by_key.items()):
            if question.deadline_s != _OVER_S and now_s >= question.deadline_s:
                self._tell(Answer.LATE)
                question.deadline_s = _OVER_S
                self.changes += 1
            if now_s >= question.given_up_s:
                del self.by_key[key]
                continue
            due_s = question.given_up_s if question.deadline_s == _OVER_S else question.deadline_s
            self.due_s = min(self.due_s, due_s)

    def clear(self) -> None:
        """Forget all of it, and what is missing."""
        self.changes += len(self.by_key)
        self.by_key.clear()
        self._missing.clear()

    # What is missing.

    def is_missing(self, key: Key, now_s: float) -> bool:
        """Whether it was found missing a moment ago."""
        return now_s < self._missing.get(key, _OVER_S)

    def miss(self, key: Key, heard_s: float) -> None:
        """It was found missing."""
        self._missing.pop(key, None)
        if len(self._missing) >= self._max_asked:
            del self._missing[next(iter(self._missing))]
        self._missing[key] = heard_s + self._missing_s

    # Counts.

    def count(self, answer: Answer) -> None:
        """One that nobody is to be praised or blamed for."""
        self._answers[answer] = self._answers.get(answer, 0) + 1

    def take_answers(self) -> dict[Answer, int]:
        """How they ended since the last call."""
        answers, self._answers = self._answers, {}
        return answers

    def _tell(self, answer: Answer) -> None:
        self.count(answer)
        is_late = answer is Answer.LATE
        self.heard = Heard(self.heard.in_time + (not is_late), self.heard.not_in_time + is_late)
