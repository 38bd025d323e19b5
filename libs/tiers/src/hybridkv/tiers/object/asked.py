"""What was asked and is not answered yet, many keys at a time.

A prompt is one question about thousands of keys, and the engine's thread pays for it: what is done to all of them is a
few calls on sets, and no step for each.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from hybridkv.tiers.contract import Answer, Heard, Key

_OVER_S = -math.inf
"""The deadline of what was not answered in time."""


@dataclass(slots=True, eq=False)
class _Question:
    keys: list[Key]
    deadline_s: float
    given_up_s: float
    withdrawn: set[Key] = field(default_factory=set)
    """Of its keys, those about which nobody wants to know any more."""


class Ended(NamedTuple):
    """A question that has an answer, or never will.

    Args:
        keys: about which somebody still wants to know.
        is_whole: whether that is all of them.
        is_late: whether this came after its time.
        is_told: whether that was counted when its time had passed.
    """

    keys: Sequence[Key]
    is_whole: bool
    is_late: bool
    is_told: bool


class Asked:
    """All questions of one index.

    Args:
        max_asked: keys at one time; and of what is remembered as missing.
        missing_s: for so long nobody is asked again for what was found missing.
        given_up_s: what was not answered so long after its deadline is waited for no more.
    """

    def __init__(self, max_asked: int, missing_s: float, given_up_s: float) -> None:
        self._max_asked = max_asked
        self._missing_s = missing_s
        self._given_up_s = given_up_s
        self._number_of: dict[Key, int] = {}
        """The question about each key."""
        self._questions: dict[int, _Question] = {}
        self.due_s = math.inf
        """Nothing is over before."""
        self.changes = 0
        """How often the answer of a lookup may have changed."""
        self.heard = Heard()
        self._missing: dict[Key, float] = {}
        """Until when a key is lacking. The oldest first."""
        self._answers: dict[Answer, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._number_of

    def is_pending(self, key: Key) -> bool:
        """Whether an answer may still come in time."""
        number = self._number_of.get(key)
        return number is not None and self._questions[number].deadline_s != _OVER_S

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked."""
        return not self._number_of

    # Asking.

    def unknown(self, keys: Sequence[Key], deadline_s: float, now_s: float) -> list[Key]:
        """Those of these that are to be asked now: neither asked already, for which the later deadline holds, nor found
        missing a moment ago, and no more than may be asked."""
        known = self._number_of
        if known and not known.keys().isdisjoint(keys):
            for number in {known[key] for key in keys if key in known}:
                self._put_off(self._questions[number], deadline_s)
            keys = [key for key in keys if key not in known]
        missing = self._missing
        if missing and not missing.keys().isdisjoint(keys):
            keys = [key for key in keys if missing.get(key, _OVER_S) <= now_s]
        keys = list(dict.fromkeys(keys))
        room = max(0, self._max_asked - len(known))
        if len(keys) > room:
            self._count(Answer.LATE, len(keys) - room)
            del keys[room:]
        return keys

    def _put_off(self, question: _Question, deadline_s: float) -> None:
        if deadline_s > question.deadline_s:
            self.changes += 1
            question.deadline_s = deadline_s
            question.given_up_s = max(question.given_up_s, deadline_s + self._given_up_s)
            self.due_s = min(self.due_s, deadline_s)

    def begin(self, number: int, keys: list[Key], deadline_s: float) -> None:
        """These are being found out."""
        self._questions[number] = _Question(keys, deadline_s, self.given_up_s(deadline_s))
        self._number_of.update(dict.fromkeys(keys, number))
        self.changes += 1
        self.due_s = min(self.due_s, deadline_s)

    def given_up_s(self, deadline_s: float) -> float:
        """Until when an answer is of any use."""
        return deadline_s + self._given_up_s

    def unasked(self, number: int) -> None:
        """Nobody could be asked about so many keys: nobody waits, and nobody is to blame or to be praised."""
        self._count(Answer.LATE, number)

    # Ends.

    def end(self, number: int, heard_s: float) -> Ended | None:
        """A question has an answer. None where nobody asked it, or wants to know any more."""
        question = self._questions.pop(number, None)
        if question is None:
            return None
        withdrawn, keys = question.withdrawn, question.keys
        if withdrawn:
            keys = [key for key in keys if key not in withdrawn]
        self._forget(keys)
        is_told = question.deadline_s == _OVER_S
        return Ended(keys, not withdrawn, is_told or heard_s > question.deadline_s, is_told)

    def tell(self, ended: Ended, num_held: int | None) -> None:
        """Count how a question ended, once: for so many of its keys well, or, with None, without an answer."""
        if ended.is_told:
            return
        number = len(ended.keys)
        if ended.is_late or num_held is None:
            self._tell(Answer.LATE, number)
        else:
            self._tell(Answer.HELD, num_held)
            self._tell(Answer.MISSING, number - num_held)

    def withdraw(self, key: Key) -> None:
        """It is not to be found out any more, if it was."""
        number = self._number_of.pop(key, None)
        if number is not None:
            self._questions[number].withdrawn.add(key)
            self.changes += 1

    def pass_time(self, now_s: float) -> None:
        """What was not answered in time is so now."""
        if now_s < self.due_s:
            return
        self.due_s = math.inf
        for number, question in list(self._questions.items()):
            if question.deadline_s != _OVER_S and now_s >= question.deadline_s:
                self._tell(Answer.LATE, len(question.keys) - len(question.withdrawn))
                question.deadline_s = _OVER_S
                self.changes += 1
            if now_s >= question.given_up_s:
                del self._questions[number]
                self._forget([key for key in question.keys if key not in question.withdrawn])
                continue
            due_s = question.given_up_s if question.deadline_s == _OVER_S else question.deadline_s
            self.due_s = min(self.due_s, due_s)

    def clear(self) -> None:
        """Forget all of it, and what is missing."""
        self.changes += len(self._questions)
        self._questions.clear()
        self._number_of, self._missing = {}, {}

    def give_up(self) -> None:
        """Nothing that was asked will be answered."""
        for number in list(self._questions):
            if (ended := self.end(number, math.inf)) is not None:
                self.tell(ended, None)

    def _forget(self, keys: Iterable[Key]) -> None:
        self.changes += 1
        deque(map(self._number_of.pop, keys), maxlen=0)

    # What is missing, and counts.

    def miss(self, keys: Iterable[Key], heard_s: float) -> None:
        """These were found missing."""
        self._missing.update(dict.fromkeys(keys, heard_s + self._missing_s))
        if (surplus := len(self._missing) - self._max_asked) > 0:
            for key in list(islice(self._missing, surplus)):
                del self._missing[key]

    def take_answers(self) -> dict[Answer, int]:
        """How they ended since the last call."""
        answers, self._answers = self._answers, {}
        return answers

    def _count(self, answer: Answer, number: int) -> None:
        if number:
            self._answers[answer] = self._answers.get(answer, 0) + number

    def _tell(self, answer: Answer, number: int) -> None:
        self._count(answer, number)
        is_late = answer is Answer.LATE
        in_time, not_in_time = self.heard
        self.heard = Heard(in_time + (0 if is_late else number), not_in_time + (number if is_late else 0))
