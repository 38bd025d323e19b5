"""Lookups of stored chunks in a tier, and `Scan` for a tier that answers one key at a time."""

import enum
from collections.abc import Callable
from typing import Protocol, TypeAlias

from hybridkv.planner.groups import CacheSpec, GroupKind


class LookupResult(enum.Enum):
    """Answer of a tier to the lookup of one chunk."""

    HIT = "hit"
    """Stored and readable now."""
    PENDING = "pending"
    """In flight into the tier, or still being looked up: not readable yet."""
    MISS = "miss"
    """Not stored."""


Lookup: TypeAlias = Callable[[int, int], LookupResult]
"""`lookup(group_index, end_token)`: looks up this group's part of the chunk (or tail) that ends there.

A result that is not a `LookupResult` counts as MISS.
"""


def is_held(answer: LookupResult) -> bool:
    """True for HIT and PENDING."""
    return answer is LookupResult.HIT or answer is LookupResult.PENDING


class RangeLookup(Protocol):
    """Lookup of many chunks of one group at once, for tiers that can do better than one key at a time.

    A chunk is held if its answer is not MISS. Ranges include both ends, which are ends of chunks.
    """

    def num_leading_held(self, group_index: int, first_end: int, last_end: int) -> int:
        """Number of consecutive held chunks, from the one that ends at `first_end` up to `last_end`."""
        ...

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        """Last end in the range that is held, 0 if there is none.

        If the cache stores tails, ends of tails count too: every multiple of `CacheSpec.boundary_tokens`.
        """
        ...

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        """True if one of these chunks is not readable yet. All these chunks are held; none is a tail."""
        ...


# In CPython 3.11, access to an enum member takes longer than a comparison with it.
_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS


class Scan:
    """`RangeLookup` over single lookups, for one search. It looks up no key twice, and no key before it is needed.

    Remembers no misses: after a miss, a search continues with earlier chunks and does not look up the missing chunk
    again. A walk over a FULL group (`_walk`) remembers only the pending chunks. An answer that is not a `LookupResult`
    counts as a miss.

    Args:
        spec: the model's groups.
        lookup: called at most once for each key in one search.
    """

    __slots__ = ("_answers", "_chunk", "_lookup", "_pending", "_step", "_walks")

    def __init__(self, spec: CacheSpec, lookup: Lookup) -> None:
        self._lookup = lookup
        self._chunk, self._step = spec.chunk_tokens, spec.boundary_tokens
        self._answers: list[dict[int, LookupResult]] = [{} for _ in spec.groups]
        self._pending: list[list[int]] = [[] for _ in spec.groups]
        # With tails, a search looks up the same key again at a lower boundary, so held answers are remembered.
        self._walks = [group.kind is GroupKind.FULL and spec.tail_tokens is None for group in spec.groups]

    def answer(self, group_index: int, end_token: int) -> LookupResult:
        """Answer for one key."""
        answers = self._answers[group_index]
        answer = answers.get(end_token)
        if answer is None:
            answer = self._lookup(group_index, end_token)
            if answer is _PENDING:
                self._pending[group_index].append(end_token)
            elif answer is not _HIT:
                return _MISS
            answers[end_token] = answer
        return answer

    def num_leading_held(self, group_index: int, first_end: int, last_end: int) -> int:
        answers = self._answers[group_index]
        if self._walks[group_index] and not answers:
            return self._walk(group_index, first_end, last_end)
        for end_token in range(first_end, last_end + 1, self._chunk):
            if (answers.get(end_token) or self.answer(group_index, end_token)) is _MISS:
                return (end_token - first_end) // self._chunk
        return max(0, (last_end - first_end) // self._chunk + 1)

    def _walk(self, group_index: int, first_end: int, last_end: int) -> int:
        """`num_leading_held` for a FULL group. A search walks the group once and in order, so only pending ends are
        remembered."""
        lookup, hit = self._lookup, _HIT
        for end_token in range(first_end, last_end + 1, self._chunk):
            answer = lookup(group_index, end_token)
            if answer is hit:
                continue
            if answer is not _PENDING:
                return (end_token - first_end) // self._chunk
            self._pending[group_index].append(end_token)
        return max(0, (last_end - first_end) // self._chunk + 1)

    def last_held(self, group_index: int, first_end: int, last_end: int) -> int:
        answers, lookup, miss = self._answers[group_index], self._lookup, _MISS
        for end_token in range(last_end, first_end - 1, -self._step):
            if end_token in answers:
                return end_token
            answer = lookup(group_index, end_token)
            if answer is miss:
                continue
            if answer is _PENDING:
                self._pending[group_index].append(end_token)
            elif answer is not _HIT:
                continue
            answers[end_token] = answer
            return end_token
        return 0

    def any_pending(self, group_index: int, first_end: int, last_end: int) -> bool:
        chunk = self._chunk
        return any(first_end <= end <= last_end and end % chunk == 0 for end in self._pending[group_index])


def find_missing(is_held: Callable[[int], bool], first_end: int, last_end: int, step: int) -> int | None:
    """Finds an end in the range that is not held, with O(log) lookups.

    If chunks are stored in the order of the prompt (the usual case), this is the first missing end. None if the range
    is empty, or if its first and last end are held.
    """
    if last_end < first_end:
        return None
    if not is_held(first_end):
        return first_end
    if last_end == first_end or is_held(last_end):
        return None
    low, high, reach = first_end, last_end, step
    while low + reach < high:
        if not is_held(low + reach):
            high = low + reach
            break
        low, reach = low + reach, 2 * reach
    while high - low > step:
        middle = low + (high - low) // step // 2 * step
        if is_held(middle):
            low = middle
        else:
            high = middle
    return high
