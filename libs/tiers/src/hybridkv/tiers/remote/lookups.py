"""Lookup tracker: open lookups with their deadlines, and recently missing keys. Sends nothing.

A prompt is one lookup of thousands of keys on the engine's thread, so most calls take many keys and use bulk
operations. The caller passes all times, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from hybridkv.tiers.contract import Key, LookupAnswer, LookupCounts

_LONG_AGO_S = -math.inf
"""Earliest time. Also the deadline of a lookup that has timed out."""
FIRST_ANSWER_S = 0.02
"""Expected seconds to an answer, before the first answer."""
_NEW_SHARE = 0.25
"""Share of the newest answer in the moving average."""


@dataclass(slots=True, eq=False)
class _TrackedLookup:
    open_keys: dict[Key, None]
    """Keys that have no answer and were not withdrawn."""
    sent_s: float
    deadline_s: float
    forget_at_s: float
    timeout_s: float = 0.0
    """Seconds from the send to the first deadline."""
    is_measured: bool = False
    """True after the first answer or the timeout of the lookup was added to the average."""
    is_urgent: bool = True
    """True if a request waits for the lookup. Only such lookups change `answer_s` and `lookup_counts`."""


class LookupTracker:
    """Lookups of one index, by number.

    Args:
        max_open_keys: limit of open keys, and of remembered missing keys.
        missing_s: seconds in which a missing key is not looked up again.
        forget_after_s: seconds from the deadline of a lookup until it is forgotten.
    """

    def __init__(self, max_open_keys: int, missing_s: float, forget_after_s: float) -> None:
        self.max_open_keys = max_open_keys
        self._missing_s = missing_s
        self._forget_after_s = forget_after_s
        self._number_of: dict[Key, int] = {}
        """Lookup number of each open key."""
        self._lookups: dict[int, _TrackedLookup] = {}
        self.due_s = math.inf
        """Next time at which `pass_time` has work."""
        self.changes = 0
        """Number of changes to the open lookups. Part of the index's `generation`."""
        self.lookup_counts = LookupCounts()
        self.answer_s = FIRST_ANSWER_S
        """Moving average of the seconds from a lookup to its first answer. A timeout counts as twice the time limit."""
        self._missing: dict[Key, float] = {}
        """Time until which a key counts as missing. The oldest first."""
        self._answers: dict[LookupAnswer, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._number_of

    @property
    def num_open_keys(self) -> int:
        return len(self._number_of)

    def has_any(self, keys: Iterable[Key]) -> bool:
        """True if one of these keys is open."""
        return not self._number_of.keys().isdisjoint(keys)

    def is_pending(self, key: Key) -> bool:
        """True if a key is open and its deadline has not passed."""
        number = self._number_of.get(key)
        return number is not None and self._lookups[number].deadline_s != _LONG_AGO_S

    def is_missing(self, key: Key, since_s: float) -> bool:
        """True if a lookup found at `since_s` or later that a key is missing."""
        return self._missing.get(key, _LONG_AGO_S) >= since_s + self._missing_s

    def forget_missing(self, keys: Iterable[Key], before_s: float = math.inf) -> None:
        """Forget that these keys were found missing before `before_s`. So they may be looked up again at once."""
        missing, until_s = self._missing, before_s + self._missing_s
        for key in keys:
            if missing.get(key, math.inf) < until_s:
                del missing[key]

    def open_keys(self, number: int) -> Mapping[Key, None]:
        """Open keys of a lookup, in order. Empty for an unknown number."""
        lookup = self._lookups.get(number)
        return {} if lookup is None else lookup.open_keys

    # Sending.

    def keys_to_send(
        self, keys: Sequence[Key], deadline_s: float, now_s: float, *, is_urgent: bool = True
    ) -> list[Key]:
        """Select the keys to look up now: not open, not recently missing, and within `max_open_keys`. Counts the keys
        above this limit as timed out.

        The open lookup of a key gets the later of both deadlines, for all its keys. An urgent lookup takes its keys
        from open lookups that are not urgent, and sends them again. A lookup that is not urgent takes keys only from
        urgent lookups that have timed out; it does not change the deadlines of other urgent lookups.
        """
        known = self._number_of
        if known and not known.keys().isdisjoint(keys):
            for key in keys:
                if key in known and self._is_taken_over(self._lookups[known[key]], is_urgent):
                    self.withdraw(key)
            for number in {known[key] for key in keys if key in known}:
                if self._lookups[number].is_urgent == is_urgent:
                    self._postpone(self._lookups[number], deadline_s)
            keys = [key for key in keys if key not in known]
        missing = self._missing
        if missing and not missing.keys().isdisjoint(keys):
            keys = [key for key in keys if missing.get(key, _LONG_AGO_S) <= now_s]
        keys = list(dict.fromkeys(keys))
        room = max(0, self.max_open_keys - len(known))
        if len(keys) > room:
            self._count(LookupAnswer.TIMED_OUT, len(keys) - room)
            del keys[room:]
        return keys

    def _is_taken_over(self, lookup: _TrackedLookup, is_urgent: bool) -> bool:
        return lookup.is_urgent != is_urgent and (is_urgent or lookup.deadline_s == _LONG_AGO_S)

    def _postpone(self, lookup: _TrackedLookup, deadline_s: float) -> None:
        if deadline_s > lookup.deadline_s:
            self.changes += 1
            lookup.deadline_s = deadline_s
            lookup.forget_at_s = max(lookup.forget_at_s, self.forget_at_s(deadline_s))
            self.due_s = min(self.due_s, deadline_s)

    def forget_at_s(self, deadline_s: float) -> float:
        """Time at which a lookup with this deadline is forgotten."""
        return deadline_s + self._forget_after_s

    def begin(
        self, number: int, keys: Iterable[Key], sent_s: float, deadline_s: float, *, is_urgent: bool = True
    ) -> None:
        """Record a lookup that was sent. `is_urgent`: a request waits for it."""
        open_keys = dict.fromkeys(keys)
        self._lookups[number] = _TrackedLookup(
            open_keys, sent_s, deadline_s, self.forget_at_s(deadline_s), deadline_s - sent_s, is_urgent=is_urgent
        )
        self._number_of.update(dict.fromkeys(open_keys, number))
        self.changes += 1
        self.due_s = min(self.due_s, deadline_s)

    def resent(self, number: int, sent_s: float) -> None:
        """Record that a lookup was sent to other receivers. The seconds to its first answer count from `sent_s`."""
        if number in self._lookups:
            self._lookups[number].sent_s = sent_s

    def not_sent(self, num_keys: int) -> None:
        """Count keys that could not be sent as timed out. Does not affect the breaker."""
        self._count(LookupAnswer.TIMED_OUT, num_keys)

    # Ends.

    def found(self, number: int, keys: Collection[Key], answered_s: float) -> None:
        """Record open keys as found."""
        if keys:
            lookup = self._lookups[number]
            deque(map(lookup.open_keys.pop, keys), maxlen=0)
            self._forget(keys)
            self._record(lookup, LookupAnswer.FOUND, len(keys), answered_s)

    def end(self, number: int, answer: LookupAnswer, answered_s: float) -> list[Key]:
        """End a lookup. All its open keys get this answer, MISSING or TIMED_OUT. Returns these keys."""
        lookup = self._lookups.pop(number, None)
        if lookup is None or not lookup.open_keys:
            return []
        keys = list(lookup.open_keys)
        self._forget(keys)
        self._record(lookup, answer, len(keys), answered_s)
        if answer is LookupAnswer.MISSING:
            self._missing.update(dict.fromkeys(keys, answered_s + self._missing_s))
            if (surplus := len(self._missing) - self.max_open_keys) > 0:
                for key in list(islice(self._missing, surplus)):
                    del self._missing[key]
        return keys

    def end_all(self) -> None:
        """End all lookups as timed out."""
        for number in list(self._lookups):
            self.end(number, LookupAnswer.TIMED_OUT, math.inf)

    def withdraw(self, key: Key) -> None:
        """Drop an open key, because its answer is not needed any more."""
        number = self._number_of.pop(key, None)
        if number is not None:
            del self._lookups[number].open_keys[key]
            self.changes += 1

    def pass_time(self, now_s: float) -> None:
        """Time out lookups at their deadline, and forget them at `forget_at_s`."""
        self.due_s = math.inf
        for number, lookup in list(self._lookups.items()):
            if lookup.deadline_s != _LONG_AGO_S and now_s >= lookup.deadline_s:
                self._record(lookup, LookupAnswer.TIMED_OUT, len(lookup.open_keys), now_s)
                lookup.deadline_s = _LONG_AGO_S
                self.changes += bool(lookup.open_keys)
            if now_s >= lookup.forget_at_s:
                del self._lookups[number]
                self._forget(lookup.open_keys)
                continue
            due_s = lookup.forget_at_s if lookup.deadline_s == _LONG_AGO_S else lookup.deadline_s
            self.due_s = min(self.due_s, due_s)

    def clear(self) -> None:
        """Forget all lookups and missing keys."""
        self.changes += len(self._lookups)
        self._lookups.clear()
        self._number_of, self._missing = {}, {}

    def _forget(self, keys: Iterable[Key]) -> None:
        self.changes += 1
        deque(map(self._number_of.pop, keys), maxlen=0)

    # Counts.

    def take_answers(self) -> dict[LookupAnswer, int]:
        """Number of keys by answer since the last call."""
        answers, self._answers = self._answers, {}
        return answers

    def _count(self, answer: LookupAnswer, num_keys: int) -> None:
        if num_keys:
            self._answers[answer] = self._answers.get(answer, 0) + num_keys

    def _record(self, lookup: _TrackedLookup, answer: LookupAnswer, num_keys: int, answered_s: float) -> None:
        """Count answers, and add the first one of a lookup to the moving average. Does nothing for a lookup that has
        timed out: the timeout counted its keys."""
        if lookup.deadline_s == _LONG_AGO_S:
            return
        if answered_s > lookup.deadline_s:
            answer = LookupAnswer.TIMED_OUT
        if not lookup.is_urgent:
            self._count(answer, num_keys)
            return
        if num_keys and not lookup.is_measured:
            lookup.is_measured = True
            took_s = 2 * lookup.timeout_s if answer is LookupAnswer.TIMED_OUT else answered_s - lookup.sent_s
            self.answer_s += (max(took_s, 0.0) - self.answer_s) * _NEW_SHARE
        self._count(answer, num_keys)
        is_timed_out = answer is LookupAnswer.TIMED_OUT
        num_answered, num_timed_out = self.lookup_counts
        self.lookup_counts = LookupCounts(
            num_answered + (0 if is_timed_out else num_keys), num_timed_out + (num_keys if is_timed_out else 0)
        )
