"""Lookups without an answer yet: their deadlines, their ends, and the keys that were not found.

A prompt is one lookup of thousands of keys, and the engine's thread pays for it. So most calls take many keys, and work
on whole tables. Knows no client. Times come from the caller, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from hybridkv.tiers.contract import Answer, Heard, Key

_OVER_S = -math.inf
"""The deadline of a lookup that timed out."""


@dataclass(slots=True, eq=False)
class _Lookup:
    open_keys: dict[Key, None]
    """Keys without an answer, that are still wanted."""
    deadline_s: float
    given_up_s: float


class LookupTracker:
    """All lookups of one index. A lookup has a number, which its answers name.

    Args:
        max_asked: keys without an answer at one time; also bounds the keys remembered as missing.
        missing_s: a key that was not found is not looked up again for so long.
        given_up_s: a lookup is forgotten so long after its deadline.
    """

    def __init__(self, max_asked: int, missing_s: float, given_up_s: float) -> None:
        self._max_asked = max_asked
        self._missing_s = missing_s
        self._given_up_s = given_up_s
        self._number_of: dict[Key, int] = {}
        """The lookup of each key."""
        self._lookups: dict[int, _Lookup] = {}
        self.due_s = math.inf
        """`pass_time` has nothing to do before."""
        self.changes = 0
        """How often the answer of an index's `lookup` may have changed."""
        self.heard = Heard()
        self._missing: dict[Key, float] = {}
        """Until when a key counts as missing. The oldest first."""
        self._answers: dict[Answer, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._number_of

    @property
    def is_empty(self) -> bool:
        """Whether no key waits for an answer."""
        return not self._number_of

    def is_pending(self, key: Key) -> bool:
        """Whether an answer may still come in time."""
        number = self._number_of.get(key)
        return number is not None and self._lookups[number].deadline_s != _OVER_S

    def open_keys(self, number: int) -> Mapping[Key, None]:
        """Keys of a lookup without an answer, in their order. Empty for a number that is not known."""
        lookup = self._lookups.get(number)
        return {} if lookup is None else lookup.open_keys

    # Sending.

    def keys_to_send(self, keys: Sequence[Key], deadline_s: float, now_s: float) -> list[Key]:
        """Which of these to look up now: no key that was looked up already, whose later deadline holds, no key that was
        missing a moment ago, and no more keys than may be open."""
        known = self._number_of
        if known and not known.keys().isdisjoint(keys):
            for number in {known[key] for key in keys if key in known}:
                self._postpone(self._lookups[number], deadline_s)
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

    def _postpone(self, lookup: _Lookup, deadline_s: float) -> None:
        if deadline_s > lookup.deadline_s:
            self.changes += 1
            lookup.deadline_s = deadline_s
            lookup.given_up_s = max(lookup.given_up_s, self.given_up_s(deadline_s))
            self.due_s = min(self.due_s, deadline_s)

    def given_up_s(self, deadline_s: float) -> float:
        """When a lookup with this deadline is forgotten."""
        return deadline_s + self._given_up_s

    def begin(self, number: int, keys: Iterable[Key], deadline_s: float) -> None:
        """A lookup of these keys was sent."""
        open_keys = dict.fromkeys(keys)
        self._lookups[number] = _Lookup(open_keys, deadline_s, self.given_up_s(deadline_s))
        self._number_of.update(dict.fromkeys(open_keys, number))
        self.changes += 1
        self.due_s = min(self.due_s, deadline_s)

    def not_sent(self, num_keys: int) -> None:
        """A lookup of so many keys could not be sent. Counted as timed out; does not affect the breaker."""
        self._count(Answer.LATE, num_keys)

    # Ends.

    def found(self, number: int, keys: Collection[Key], heard_s: float) -> None:
        """These open keys of a lookup were found."""
        if keys:
            lookup = self._lookups[number]
            deque(map(lookup.open_keys.pop, keys), maxlen=0)
            self._forget(keys)
            self._tell(lookup, Answer.HELD, len(keys), heard_s)

    def end(self, number: int, answer: Answer, heard_s: float) -> list[Key]:
        """A lookup is over. Its open keys, which all have this answer: MISSING, or LATE where there will be none."""
        lookup = self._lookups.pop(number, None)
        if lookup is None or not lookup.open_keys:
            return []
        keys = list(lookup.open_keys)
        self._forget(keys)
        self._tell(lookup, answer, len(keys), heard_s)
        if answer is Answer.MISSING:
            self._missing.update(dict.fromkeys(keys, heard_s + self._missing_s))
            if (surplus := len(self._missing) - self._max_asked) > 0:
                for key in list(islice(self._missing, surplus)):
                    del self._missing[key]
        return keys

    def end_all(self) -> None:
        """No lookup will have an answer."""
        for number in list(self._lookups):
            self.end(number, Answer.LATE, math.inf)

    def withdraw(self, key: Key) -> None:
        """An answer about this key is not wanted any more."""
        number = self._number_of.pop(key, None)
        if number is not None:
            del self._lookups[number].open_keys[key]
            self.changes += 1

    def pass_time(self, now_s: float) -> None:
        """Time out the lookups whose deadline is over, and forget those given up."""
        self.due_s = math.inf
        for number, lookup in list(self._lookups.items()):
            if lookup.deadline_s != _OVER_S and now_s >= lookup.deadline_s:
                self._tell(lookup, Answer.LATE, len(lookup.open_keys), now_s)
                lookup.deadline_s = _OVER_S
                self.changes += bool(lookup.open_keys)
            if now_s >= lookup.given_up_s:
                del self._lookups[number]
                self._forget(lookup.open_keys)
                continue
            due_s = lookup.given_up_s if lookup.deadline_s == _OVER_S else lookup.deadline_s
            self.due_s = min(self.due_s, due_s)

    def clear(self) -> None:
        """Forget all lookups, and the missing keys."""
        self.changes += len(self._lookups)
        self._lookups.clear()
        self._number_of, self._missing = {}, {}

    def _forget(self, keys: Iterable[Key]) -> None:
        self.changes += 1
        deque(map(self._number_of.pop, keys), maxlen=0)

    # Counts.

    def take_answers(self) -> dict[Answer, int]:
        """How keys were answered since the last call."""
        answers, self._answers = self._answers, {}
        return answers

    def _count(self, answer: Answer, num_keys: int) -> None:
        if num_keys:
            self._answers[answer] = self._answers.get(answer, 0) + num_keys

    def _tell(self, lookup: _Lookup, answer: Answer, num_keys: int, heard_s: float) -> None:
        """Counts each key once: a lookup that timed out was counted then."""
        if lookup.deadline_s == _OVER_S:
            return
        if heard_s > lookup.deadline_s:
            answer = Answer.LATE
        self._count(answer, num_keys)
        is_late = answer is Answer.LATE
        in_time, not_in_time = self.heard
        self.heard = Heard(in_time + (0 if is_late else num_keys), not_in_time + (num_keys if is_late else 0))
