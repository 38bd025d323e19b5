"""Prefetches: prefixes promoted to the primary tier before a request waits for them.

The chunks of a prefix are sent in order, not all or none. Prefetched chunks are not pinned and need no release. The
bytes of unused prefetched chunks are limited: at the limit, a new chunk replaces the oldest unused chunk of an earlier
prefix, which is invalidated in the primary tier. Promotions with waiting requests go first
(`SecondaryTierState.prefetch_refusal`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Refusal, TierIndex
from hybridkv.tiers.stack.moves import PrefetchBytes, PrefetchResult
from hybridkv.tiers.stack.promotions import Promotions
from hybridkv.tiers.stack.secondary import SecondaryTierState

MAX_PREFIXES: Final = 256
"""Limit of prefixes in progress. Further prefixes are dropped."""
STEP_AGAIN_S: Final = 1.0
"""Seconds after the last progress in which prefetches request further engine steps. Also the longest time for which
prefetches stop after a lease was refused for lack of room."""
_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS


@dataclass(slots=True, eq=False)
class _PrefixPrefetch:
    keys: Sequence[Key]
    most_bytes: int
    since_s: float
    next_index: int = 0
    """Position of the next chunk. All chunks before it were in the primary tier, PENDING or sent."""
    next_bytes: int = 0
    """Size of the next chunk; known after the first attempt, else 0."""
    num_moving: int = 0
    has_sent: bool = False
    pending: list[Key] = field(default_factory=list)
    """Chunks that were PENDING in the primary tier, because of another promotion or a store."""
    failure: PrefetchResult | None = None
    """If set, no further chunk is sent."""

    @property
    def has_more(self) -> bool:
        return self.failure is None and self.next_index < len(self.keys)


@dataclass(slots=True)
class _PumpState:
    """State of one `pump` call."""

    now_s: float
    busy: set[SecondaryTierState] = field(default_factory=set)
    is_full: bool = False
    """The primary tier has no room."""


class Prefetches:
    """All prefixes in progress, and the unused prefetched chunks.

    Args:
        primary: index of the primary tier.
        promotions: starts promotions.
        timeout_s: time limit of one prefix.
        touch: makes keys the most recently used in every tier, the last one most.
    """

    def __init__(
        self,
        primary: TierIndex,
        promotions: Promotions,
        timeout_s: float,
        touch: Callable[[list[Key]], None],
    ) -> None:
        self._primary = primary
        self._promotions = promotions
        self._timeout_s = timeout_s
        self._touch = touch
        self._prefixes: list[_PrefixPrefetch] = []
        self._moving: dict[Key, tuple[_PrefixPrefetch, int]] = {}
        """Prefix and bytes of each prefetch in flight."""
        self._unused: OrderedDict[Key, tuple[_PrefixPrefetch, int]] = OrderedDict()
        """Prefix and bytes of each unused chunk, in flight or arrived, the oldest first."""
        self._unused_cost = 0
        self._displaced: set[Key] = set()
        """Chunks in flight that are invalidated in the primary tier when they arrive."""
        self._used_early: set[Key] = set()
        """Chunks in flight that a request waits for now."""
        self._refused_leases: dict[str, float] = {}
        """Owners of leases that were refused for lack of room, and a time for each. No prefetch is sent before the last
        of these times."""
        self.most_bytes: float = math.inf
        """Second limit of unused prefetched bytes, for every prefix. The smaller limit applies."""
        self._progress_s = 0.0
        """Time of the last progress: a send, the end of a promotion, or a prefix added when there was none."""
        self._results: Counter[PrefetchResult] = Counter()
        self._bytes: Counter[PrefetchBytes] = Counter()

    def add(self, keys: Sequence[Key], most_bytes: int, now_s: float) -> None:
        """Add a prefix; `pump` sends its chunks. Drops and counts the prefix if too many are in progress. Makes the
        chunks that are in the primary tier the most recently used."""
        if len(self._prefixes) >= MAX_PREFIXES:
            self.pass_time(now_s)
        if len(self._prefixes) >= MAX_PREFIXES:
            self._results[PrefetchResult.CROWDED] += 1
            return
        if not self._prefixes:
            self._progress_s = now_s
        prefix = _PrefixPrefetch(keys, most_bytes, now_s)
        self._prefixes.append(prefix)
        # The missing chunks must not evict the chunks that are in the primary tier already.
        self._primary.touch(reversed(keys))
        # Unused chunks of this prefix become the newest, its first chunk last. So its last chunk is replaced first.
        for key in reversed(keys) if self._unused else ():
            if self._primary.lookup(key) is _MISS:
                self._remove_unused(key)
            elif key in self._unused:
                self._unused[key] = (prefix, self._unused[key][1])
                self._unused.move_to_end(key)
        if self._displaced:
            self._keep_displaced(prefix)

    def _keep_displaced(self, prefix: _PrefixPrefetch) -> None:
        """Count the displaced chunks of a new prefix as unused again, as far as the limits permit."""
        for key in prefix.keys:
            if key not in self._displaced or self._primary.lookup(key) is _MISS:
                continue
            num_bytes = self._moving[key][1]
            if not self._make_room(prefix, num_bytes):
                break
            self._displaced.remove(key)
            self._unused[key] = (prefix, num_bytes)
            self._unused_cost += self._primary.cost(num_bytes)
        self._make_newest(reversed(prefix.keys))

    def _make_newest(self, keys: Iterable[Key]) -> None:
        """Make unused chunks the newest, the last of the keys newest."""
        for key in keys:
            if key in self._unused:
                self._unused.move_to_end(key)

    def pass_time(self, now_s: float) -> None:
        """End the prefixes that take too long."""
        for prefix in [each for each in self._prefixes if now_s - each.since_s >= self._timeout_s]:
            self._end(prefix, PrefetchResult.LATE)

    def pump(self, now_s: float) -> None:
        """Send the chunks that may be sent now. Ends the prefixes that are done, have failed, or take too long."""
        if not self._prefixes and not self._refused_leases:
            return
        self.pass_time(now_s)
        if self._refused_leases:
            self._refused_leases = {
                owner: until_s for owner, until_s in self._refused_leases.items() if now_s < until_s
            }
        state = _PumpState(now_s, is_full=bool(self._refused_leases))
        for prefix in list(self._prefixes):
            while prefix.has_more and self._send_next(prefix, state):
                prefix.next_index += 1
                prefix.next_bytes = 0
            self._end_if_over(prefix)

    def _send_next(self, prefix: _PrefixPrefetch, state: _PumpState) -> bool:
        """Send the next chunk if the primary tier lacks it. True if the prefix may continue with the chunk after it."""
        key = prefix.keys[prefix.next_index]
        answer = self._primary.lookup(key)
        if answer is not _MISS:
            if key in self._displaced:  # `_keep_displaced` found no room
                prefix.failure = PrefetchResult.NO_ROOM
                return False
            if answer is _PENDING:
                prefix.pending.append(key)
            return True
        if state.is_full:
            return False
        sent = self._promotions.prefetch(key, partial(self._prefetch_refusal, prefix, state))
        if isinstance(sent, Refusal):
            if sent is Refusal.TOO_LARGE:
                prefix.failure = PrefetchResult.NO_ROOM
            elif sent is Refusal.NO_ROOM:
                state.is_full = True
            elif sent is not Refusal.BUSY:
                prefix.failure = PrefetchResult.LOST
            return False
        self._remove_unused(key)
        self._moving[key] = self._unused[key] = (prefix, sent)
        self._unused_cost += self._primary.cost(sent)
        prefix.num_moving += 1
        prefix.has_sent = True
        self._progress_s = state.now_s
        return True

    def _prefetch_refusal(
        self, prefix: _PrefixPrefetch, state: _PumpState, tier: SecondaryTierState, num_bytes: int | None
    ) -> Refusal | None:
        if tier in state.busy:
            return Refusal.BUSY
        if num_bytes is not None:
            prefix.next_bytes = num_bytes
        refusal = tier.prefetch_refusal(prefix.next_bytes)
        if refusal is Refusal.BUSY:
            state.busy.add(tier)
        elif refusal is None and num_bytes is not None and not self._make_room(prefix, num_bytes):
            refusal = Refusal.TOO_LARGE
        return refusal

    def _make_room(self, prefix: _PrefixPrefetch, num_bytes: int) -> bool:
        """Drop unused chunks of other prefixes, the oldest first, until a chunk of this size is within the limits.
        False if it does not fit, even if some chunks were dropped."""
        cost, most_bytes = self._primary.cost(num_bytes), min(prefix.most_bytes, self.most_bytes)
        if cost > most_bytes:
            return False
        while self._unused_cost + cost > most_bytes:
            key, (owner, num_bytes) = next(iter(self._unused.items()))
            is_present = self._primary.lookup(key) is not _MISS
            if owner is prefix and is_present:
                return False
            self._remove_unused(key)
            if key in self._moving:
                self._displaced.add(key)
            else:
                self._bytes[PrefetchBytes.DISPLACED] += num_bytes if is_present else 0
                self._primary.invalidate(key)
        return True

    def on_ended(self, key: Key, is_present: bool, now_s: float) -> None:
        """Record the end of a promotion, also of one that is not a prefetch."""
        self._progress_s = now_s
        moved = self._moving.pop(key, None)
        if moved is None:
            return
        prefix, num_bytes = moved
        prefix.num_moving -= 1
        if is_present:
            self._bytes[PrefetchBytes.PROMOTED] += num_bytes
            self._bytes[PrefetchBytes.USED] += num_bytes if key in self._used_early else 0
        else:
            self._remove_unused(key)
            prefix.failure = prefix.failure or PrefetchResult.LOST
        self._used_early.discard(key)
        if key in self._displaced:
            self._displaced.remove(key)
            self._bytes[PrefetchBytes.DISPLACED] += num_bytes if is_present else 0
            self._primary.invalidate(key)
        self._end_if_over(prefix)

    def on_acquire(self, owner: str) -> None:
        """Record that a lease is requested. Prefetches do not stop for this owner any more."""
        self._refused_leases.pop(owner, None)

    def yield_to(self, owner: str, now_s: float) -> bool:
        """True if a lease that was refused for lack of room may succeed after the prefetches in flight. Then no further
        prefetch is sent until the lease is requested again, for at most `STEP_AGAIN_S`."""
        if not self._promotions.is_prefetching:
            return False
        self._refused_leases[owner] = now_s + STEP_AGAIN_S
        return True

    def on_used(self, keys: Sequence[Key]) -> None:
        """Record that a request uses these chunks. They are no longer unused."""
        self._displaced.difference_update(keys)
        for key in keys if self._unused else ():
            num_bytes = self._remove_unused(key)
            if num_bytes and key in self._moving:
                self._used_early.add(key)
            elif num_bytes and self._primary.lookup(key) is _HIT:
                self._bytes[PrefetchBytes.USED] += num_bytes

    def on_kept(self, keys: Sequence[Key]) -> None:
        """Remove chunks from the unused chunks without counting a use: they were found, kept or stored again."""
        self._displaced.difference_update(keys)
        for key in keys if self._unused else ():
            self._remove_unused(key)

    def _remove_unused(self, key: Key) -> int:
        """Remove a chunk from the unused chunks. Returns its number of bytes; 0 if it was not unused."""
        dropped = self._unused.pop(key, None)
        if dropped is None:
            return 0
        self._unused_cost -= self._primary.cost(dropped[1])
        return dropped[1]

    def _end_if_over(self, prefix: _PrefixPrefetch) -> None:
        if prefix.num_moving or prefix.has_more or prefix not in self._prefixes:
            return
        while prefix.pending and prefix.failure is None:
            answer = self._primary.lookup(prefix.pending[-1])
            if answer is _PENDING:
                return
            if answer is _MISS:
                prefix.failure = PrefetchResult.LOST
            prefix.pending.pop()
        done = PrefetchResult.PROMOTED if prefix.has_sent else PrefetchResult.NOTHING
        self._end(prefix, prefix.failure or done)

    def _end(self, prefix: _PrefixPrefetch, result: PrefetchResult) -> None:
        self._prefixes.remove(prefix)
        self._results[result] += 1
        if prefix.has_sent:
            # The last chunk of the prefix must be evicted first, for any order of arrival.
            keys_from_end = list(reversed(prefix.keys[: prefix.next_index]))
            self._touch(keys_from_end)
            self._make_newest(keys_from_end)
        # Free the lists: unused chunks still refer to the prefix.
        prefix.keys, prefix.pending = (), []

    def drop_waiting(self) -> None:
        """End all prefixes; chunks in flight still arrive."""
        for prefix in list(self._prefixes):
            self._end(prefix, PrefetchResult.LOST)

    def clear(self) -> None:
        """End all prefixes and forget the unused chunks."""
        self.drop_waiting()
        self._unused.clear()
        self._unused_cost = 0

    def needs_step(self, now_s: float) -> bool:
        """True if the caller should step again soon, even if no move is in flight."""
        return now_s - self._progress_s < STEP_AGAIN_S and any(prefix.has_more for prefix in self._prefixes)

    def take_counts(self) -> tuple[dict[PrefetchResult, int], dict[PrefetchBytes, int]]:
        """Counts since the last call."""
        counts = dict(self._results), dict(+self._bytes)
        self._results, self._bytes = Counter(), Counter()
        return counts
