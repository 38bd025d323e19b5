"""View of all tiers of a stack as one index: lookups, async lookups. Moves no chunk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, TierIndex
from hybridkv.tiers.stack.secondary import SecondaryTierState, StackContext

# Every call uses these members. An attribute lookup on an enum takes more time than a module variable.
_MISS, _PENDING, _HIT = LookupResult.MISS, LookupResult.PENDING, LookupResult.HIT


class StackView:
    """The primary tier and the usable secondary tiers as one index. `lookup`, `leading`, `last_held`, `any_pending` and
    `start_lookup` check the deadlines; the others do not.

    Args:
        context: primary tier, clock and moves of the stack. Keys of timed-out promotions are a MISS.
        tiers: secondary tiers, the nearest first.
        check: applies due timeouts.
    """

    def __init__(self, context: StackContext, tiers: Sequence[SecondaryTierState], check: Callable[[], None]) -> None:
        self._primary, self._clock = context.primary, context.clock
        self._tiers = tiers
        self._timed_out_keys = context.moves.timed_out_keys
        self._check_deadlines = check

    @property
    def generation(self) -> int:
        """Number that changes whenever the answer of any lookup may have changed."""
        generation = self._primary.generation
        for tier in self._tiers:
            generation += tier.index.generation + tier.num_timeout_events + tier.health.revision
        return generation

    def lookup(self, key: Key) -> LookupResult:
        """HIT if the primary tier or a usable secondary tier holds the key, else PENDING or MISS. Always MISS while a
        timed-out promotion of the key is in flight."""
        self._check_deadlines()
        return self._lookup(key)

    def _lookup(self, key: Key) -> LookupResult:
        if key in self._timed_out_keys:
            return _MISS
        answer = self._primary.lookup(key)
        if answer is _MISS:
            for tier in self._tiers:
                if tier.is_usable():
                    found = tier.index.lookup(key)
                    if found is _HIT:
                        return found
                    if found is _PENDING:
                        answer = found
        return answer

    def leading(self, keys: Sequence[Key]) -> int:
        """Number of leading keys that are HIT or PENDING."""
        self._check_deadlines()
        timed_out_keys = self._timed_out_keys
        if timed_out_keys:
            keys = list(itertools.takewhile(lambda key: key not in timed_out_keys, keys))
        num_keys, num_held = len(keys), self._primary.leading(keys)
        if num_held == num_keys:
            return num_held
        indexes = self._usable()
        if not indexes:
            return num_held
        indexes.append(self._primary)
        num_indexes = len(indexes)
        turn = idle = 0
        while num_held < num_keys and idle < num_indexes:
            more = indexes[turn].leading(keys[num_held:])
            idle = 0 if more else idle + 1
            num_held, turn = num_held + more, turn + 1
            if turn == num_indexes:
                turn = 0
        return num_held

    def last_held(self, keys: Sequence[Key]) -> int | None:
        """Position of the last key that is HIT or PENDING, None if there is none."""
        self._check_deadlines()
        position = self._last_held(keys)
        timed_out_keys = self._timed_out_keys
        if timed_out_keys:
            while position is not None and keys[position] in timed_out_keys:
                position = self._last_held(keys[:position])
        return position

    def _last_held(self, keys: Sequence[Key]) -> int | None:
        position = self._primary.last_held(keys)
        if position == len(keys) - 1:
            return position
        for index in self._usable():
            first = 0 if position is None else position + 1
            further = index.last_held(keys[first:])
            if further is not None:
                position = first + further
        return position

    def _usable(self) -> list[TierIndex]:
        """Indexes of the usable secondary tiers."""
        usable = []
        for tier in self._tiers:
            if tier.is_usable():
                usable.append(tier.index)
        return usable

    def any_pending(self, keys: Iterable[Key]) -> bool:
        """True if one of these keys is PENDING."""
        self._check_deadlines()
        return any(self._lookup(key) is _PENDING for key in keys)

    @property
    def lookup_wait_s(self) -> float:
        """Longest time, in seconds, from `start_lookup` until every key is answered or counts as missing. 0 if no tier
        accepts an async lookup now."""
        timeouts = (tier.async_lookup_timeout_s for tier in self._tiers if tier.accepts_lookup())
        return max(timeouts, default=0.0)

    def expected_lookup_times(self) -> tuple[float, float]:
        """Two measured times of the tier that should answer next: seconds from an async lookup to its answer, and
        seconds to promote one byte of one rank. Considers the tiers that accept a lookup: those with open lookups, or
        all if none has one. Both are 0 if no tier accepts a lookup."""
        tiers = [tier for tier in self._tiers if tier.accepts_lookup()]
        tiers = [tier for tier in tiers if tier.has_open_lookups()] or tiers
        return min(((tier.index.answer_s, tier.read_s_per_byte) for tier in tiers), default=(0.0, 0.0))

    def start_lookup(self, keys: Sequence[Key], hinted: Sequence[tuple[str, int]] = ()) -> None:
        """Start an async lookup in each tier that accepts one. Leaves out keys that a tier holds or is storing, and
        keys of timed-out promotions. Each tier has its own deadline: a key without an answer counts as missing after
        it. `hinted`: addresses for `HintedLookups`."""
        self._check_deadlines()
        now_s = self._clock()
        tiers = [tier for tier in self._tiers if tier.accepts_lookup()]
        if not tiers:
            return
        timed_out_keys = self._timed_out_keys
        if not timed_out_keys and self._last_held(keys) is None:  # usual for a new prompt, and faster than key by key
            for tier in tiers:
                tier.start_lookup(keys, now_s, hinted)
            return
        # Computed before the first lookup is sent, because a lookup makes its keys PENDING. Includes keys in an open
        # lookup of one tier: the other tiers may not have looked them up.
        unknown = [
            key
            for key in keys
            if key not in timed_out_keys and (self._lookup(key) is _MISS or self.is_lookup_pending(key))
        ]
        for tier in tiers:
            tier.start_lookup([key for key in unknown if tier.index.lookup(key) is _MISS], now_s, hinted)

    def is_lookup_pending(self, key: Key) -> bool:
        """True if a key is PENDING only because of async lookups."""
        if self._lookup(key) is not _PENDING or self._primary.lookup(key) is _PENDING:
            return False
        return all(
            tier.index.lacks(key) for tier in self._tiers if tier.is_usable() and tier.index.lookup(key) is _PENDING
        )
