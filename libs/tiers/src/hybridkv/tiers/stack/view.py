"""What the tiers of a stack hold together, as they are asked now. Passes no time, and moves and reserves nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, TierIndex
from hybridkv.tiers.stack.in_flight import Planned
from hybridkv.tiers.stack.secondary import Level

# An enum's members are looked up by name each time; these are asked for in every call.
_MISS, _PENDING, _HIT = LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT


class Reading:
    """A fast tier and those under it, asked as one.

    Args:
        near: index of the fast tier.
        levels: the others, the nearest first.
        planned: says what late promotions bring: nobody is told of that.
    """

    def __init__(self, near: TierIndex, levels: Sequence[Level], planned: Planned) -> None:
        self.near = near
        self._levels = levels
        self._late_keys = planned.late_keys

    @property
    def generation(self) -> int:
        """Changes whenever the answer of any lookup may have changed."""
        generation = self.near.generation
        for level in self._levels:
            generation += level.index.generation + level.late_changes + level.ways.revision
        return generation

    def lookup(self, key: Key) -> LookupResult:
        """HIT when a tier holds it and may be asked for it; MISS while its promotion is late."""
        if key in self._late_keys:
            return _MISS
        answer = self.near.lookup(key)
        if answer is _MISS:
            for level in self._levels:
                if level.is_asked():
                    found = level.index.lookup(key)
                    if found is _HIT:
                        return found
                    if found is _PENDING:
                        answer = found
        return answer

    def leading(self, keys: Sequence[Key]) -> int:
        """How many keys in a row, from the first, are HIT or PENDING."""
        late_keys = self._late_keys
        if late_keys:
            keys = list(itertools.takewhile(lambda key: key not in late_keys, keys))
        num_keys, held = len(keys), self.near.leading(keys)
        if held == num_keys:
            return held
        indexes = self._asked()
        if not indexes:
            return held
        indexes.append(self.near)
        num_indexes = len(indexes)
        turn = idle = 0
        while held < num_keys and idle < num_indexes:
            more = indexes[turn].leading(keys[held:])
            idle = 0 if more else idle + 1
            held, turn = held + more, turn + 1
            if turn == num_indexes:
                turn = 0
        return held

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """Position of the last key that is HIT or PENDING, None if there is none."""
        place = self._last_held(keys)
        late_keys = self._late_keys
        if late_keys:
            while place is not None and keys[place] in late_keys:
                place = self._last_held(keys[:place])
        return place

    def _last_held(self, keys: Sequence[Key]) -> int | None:
        place = self.near.last_held(keys)
        if place == len(keys) - 1:
            return place
        for index in self._asked():
            first = 0 if place is None else place + 1
            further = index.last_held(keys[first:])
            if further is not None:
                place = first + further
        return place

    def _asked(self) -> list[TierIndex]:
        """The slower tiers that may be asked for anything now."""
        asked = []
        for level in self._levels:
            if level.is_asked():
                asked.append(level.index)
        return asked

    def any_pending(self, keys: Iterable[Key]) -> bool:
        """Whether one of these keys is PENDING."""
        return any(self.lookup(key) is _PENDING for key in keys)

    @property
    def ask_s(self) -> float:
        """How long `ask` may take until everything is answered or counts as missing; 0 where there is nothing to be
        found out, or nobody to be asked."""
        late = (level.ask_timeout_s for level in self._levels if level.may_ask())
        return max(late, default=0.0)

    def ask(self, keys: Sequence[Key], now_s: float) -> None:
        """Let tiers that answer late find out about what no other holds. Each has its own time for that, after which
        what it did not answer counts as missing."""
        asked = [level for level in self._levels if level.may_ask()]
        if not asked:
            return
        late_keys = self._late_keys
        # Found out for all of them before the first is asked, since what one is asked is pending then. What it was
        # asked before, another need not have been.
        unknown = [
            key for key in keys if key not in late_keys and (self.lookup(key) is _MISS or self.is_only_asked(key))
        ]
        for level in asked:
            level.ask([key for key in unknown if level.index.lookup(key) is _MISS], now_s)

    def is_only_asked(self, key: Key) -> bool:
        """Whether a key is PENDING for no other reason than that tiers were asked about it."""
        if self.lookup(key) is not _PENDING or self.near.lookup(key) is _PENDING:
            return False
        return all(
            level.index.lacks(key) for level in self._levels if level.is_asked() and level.index.lookup(key) is _PENDING
        )
