"""What comes into the fast tier though nobody waits for it: prefixes, one chunk after the other, as room allows.

Nothing of it is pinned, and no release is needed. What has come and was not used yet takes up a bounded part of the
fast tier: the newest takes the place of the oldest, which leaves it. What somebody waits for goes
first (`Level.why_not_prefetch`).
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Key, Refusal, TierIndex
from hybridkv.tiers.stack.moves import PrefetchBytes, PrefetchResult
from hybridkv.tiers.stack.promotions import Promotions
from hybridkv.tiers.stack.secondary import Level

MAX_PREFIXES: Final = 256
"""That may be on their way at one time. What comes when there are so many is dropped."""
PATIENCE_S: Final = 1.0
"""Nobody stays awake longer for what waits while nothing is sent and nothing comes, and nothing gives way longer to a
hold that does not come back."""
_HIT, _PENDING, _MISS = LookupResult.HIT, LookupResult.PENDING, LookupResult.MISS


@dataclass(slots=True, eq=False)
class _Prefix:
    keys: Sequence[Key]
    most_bytes: int
    since_s: float
    place: int = 0
    """All before it are in the fast tier, or on their way."""
    next_bytes: int = 0
    """Of the chunk at that place; known when it was first tried."""
    num_moving: int = 0
    has_sent: bool = False
    of_others: list[Key] = field(default_factory=list)
    """What somebody else was bringing or storing when its turn came."""
    failure: PrefetchResult | None = None
    """Why no more of it is sent."""

    @property
    def has_more(self) -> bool:
        return self.failure is None and self.place < len(self.keys)


@dataclass(slots=True)
class _Round:
    """What one `pump` has found out."""

    now_s: float
    busy: set[Level] = field(default_factory=set)
    is_full: bool = False
    """The fast tier had no room."""


class Prefetches:
    """All prefixes that are on their way, and what has come of them.

    Args:
        near: index of the fast tier.
        promotions: the way up.
        timeout_s: how long one prefix may take.
        put_in_order: makes keys the most recently used in every tier, the last one most.
    """

    def __init__(
        self,
        near: TierIndex,
        promotions: Promotions,
        timeout_s: float,
        put_in_order: Callable[[list[Key]], None],
    ) -> None:
        self._near = near
        self._promotions = promotions
        self._timeout_s = timeout_s
        self._put_in_order = put_in_order
        self._prefixes: list[_Prefix] = []
        self._moving: dict[Key, tuple[_Prefix, int]] = {}
        """Whose they are, and their bytes."""
        self._unused: OrderedDict[Key, tuple[_Prefix, int]] = OrderedDict()
        """The same of all that was sent and that nobody has used, the oldest first."""
        self._unused_cost = 0
        self._displaced: set[Key] = set()
        """Of what moves, what leaves the fast tier as soon as it has come."""
        self._used_early: set[Key] = set()
        """Of what moves, what somebody waits for by now."""
        self._holds: dict[str, float] = {}
        """Owners that are to ask again for room, and how long it is left to them."""
        self.most_bytes: float = math.inf
        """No prefix may take up more from now on, whatever it was given."""
        self._went_on_s = 0.0
        """When something was sent or came last."""
        self._results: Counter[PrefetchResult] = Counter()
        self._bytes: Counter[PrefetchBytes] = Counter()

    def add(self, keys: Sequence[Key], most_bytes: int, now_s: float) -> None:
        """A prefix that is to come; sent by `pump`."""
        if len(self._prefixes) >= MAX_PREFIXES:
            self.pass_time(now_s)
        if len(self._prefixes) >= MAX_PREFIXES:
            self._results[PrefetchResult.CROWDED] += 1
            return
        if not self._prefixes:
            self._went_on_s = now_s
        prefix = _Prefix(keys, most_bytes, now_s)
        self._prefixes.append(prefix)
        # What is there already must not make room for the rest.
        self._near.touch(reversed(keys))
        self._displaced.difference_update(keys)
        # Its end is to go before its beginning, as where it ends; if nothing of it is sent, this is all that is done.
        for key in reversed(keys) if self._unused else ():
            if self._near.lookup(key) is _MISS:
                self._drop(key)
            elif key in self._unused:
                self._unused[key] = (prefix, self._unused[key][1])
                self._unused.move_to_end(key)

    def pass_time(self, now_s: float) -> None:
        """Give up what takes too long."""
        for prefix in [each for each in self._prefixes if now_s - each.since_s >= self._timeout_s]:
            self._end(prefix, PrefetchResult.LATE)

    def pump(self, now_s: float) -> None:
        """Send what may go now."""
        self.pass_time(now_s)
        if self._holds:
            self._holds = {owner: until_s for owner, until_s in self._holds.items() if now_s < until_s}
        this = _Round(now_s, is_full=bool(self._holds))
        for prefix in list(self._prefixes):
            while prefix.has_more and self._send_next(prefix, this):
                prefix.place += 1
                prefix.next_bytes = 0
            self._end_if_over(prefix)

    def _send_next(self, prefix: _Prefix, this: _Round) -> bool:
        """Whether the next chunk needs nothing more."""
        key = prefix.keys[prefix.place]
        there = self._near.lookup(key)
        if there is not _MISS:
            if there is _PENDING:
                prefix.of_others.append(key)
            return True
        if this.is_full:
            return False
        sent = self._promotions.bring(key, partial(self._why_not, prefix, this))
        if isinstance(sent, Refusal):
            if sent is Refusal.TOO_LARGE:
                prefix.failure = PrefetchResult.NO_ROOM
            elif sent is Refusal.NO_ROOM:
                this.is_full = True
            elif sent is not Refusal.BUSY:
                prefix.failure = PrefetchResult.LOST
            return False
        self._drop(key)
        self._moving[key] = self._unused[key] = (prefix, sent)
        self._unused_cost += self._near.cost(sent)
        prefix.num_moving += 1
        prefix.has_sent = True
        self._went_on_s = this.now_s
        return True

    def _why_not(self, prefix: _Prefix, this: _Round, level: Level, num_bytes: int | None) -> Refusal | None:
        if level in this.busy:
            return Refusal.BUSY
        if num_bytes is not None:
            prefix.next_bytes = num_bytes
        refusal = level.why_not_prefetch(prefix.next_bytes)
        if refusal is Refusal.BUSY:
            this.busy.add(level)
        elif refusal is None and num_bytes is not None and not self._make_room(prefix, num_bytes):
            refusal = Refusal.TOO_LARGE
        return refusal

    def _make_room(self, prefix: _Prefix, num_bytes: int) -> bool:
        """Whether there is as much within what this may take up, in the place of what came before it."""
        cost, most_bytes = self._near.cost(num_bytes), min(prefix.most_bytes, self.most_bytes)
        if cost > most_bytes:
            return False
        while self._unused_cost + cost > most_bytes:
            key, (owner, num_bytes) = next(iter(self._unused.items()))
            is_there = self._near.lookup(key) is not _MISS
            if owner is prefix and is_there:
                return False
            self._drop(key)
            if is_there:
                self._bytes[PrefetchBytes.DISPLACED] += num_bytes
            if key in self._moving:
                self._displaced.add(key)
            else:
                self._near.invalidate(key)
        return True

    def on_ended(self, key: Key, has_come: bool, now_s: float) -> None:
        """A promotion has ended."""
        self._went_on_s = now_s
        moved = self._moving.pop(key, None)
        if moved is None:
            return
        prefix, num_bytes = moved
        prefix.num_moving -= 1
        if has_come:
            self._bytes[PrefetchBytes.BROUGHT] += num_bytes
            self._bytes[PrefetchBytes.USED] += num_bytes if key in self._used_early else 0
        else:
            self._drop(key)
            prefix.failure = prefix.failure or PrefetchResult.LOST
        self._used_early.discard(key)
        if key in self._displaced:
            self._displaced.remove(key)
            self._near.invalidate(key)
        self._end_if_over(prefix)

    def on_asked(self, owner: str) -> None:
        """Somebody asks for a hold, perhaps again."""
        self._holds.pop(owner, None)

    def gives_way(self, owner: str, now_s: float) -> bool:
        """Whether a hold that had no room may have it when what moves has come. Nothing is sent until it is asked for
        again, for a while."""
        if not self._promotions.is_prefetching:
            return False
        self._holds[owner] = now_s + PATIENCE_S
        return True

    def on_used(self, keys: Sequence[Key]) -> None:
        """Somebody uses these: they are as any other from now on."""
        self._displaced.difference_update(keys)
        for key in keys if self._unused else ():
            num_bytes = self._drop(key)
            if num_bytes and key in self._moving:
                self._used_early.add(key)
            elif num_bytes and self._near.lookup(key) is _HIT:
                self._bytes[PrefetchBytes.USED] += num_bytes

    def forget(self, keys: Sequence[Key]) -> None:
        """Nobody has read these, but they are there for another reason from now on: met, kept, or stored anew."""
        self._displaced.difference_update(keys)
        for key in keys if self._unused else ():
            self._drop(key)

    def _drop(self, key: Key) -> int:
        """No more of what nobody has used. Its bytes; 0 where it was none of that."""
        dropped = self._unused.pop(key, None)
        if dropped is None:
            return 0
        self._unused_cost -= self._near.cost(dropped[1])
        return dropped[1]

    def _end_if_over(self, prefix: _Prefix) -> None:
        if prefix.num_moving or prefix.has_more or prefix not in self._prefixes:
            return
        while prefix.of_others and prefix.failure is None:
            there = self._near.lookup(prefix.of_others[-1])
            if there is _PENDING:
                return
            if there is _MISS:
                prefix.failure = PrefetchResult.LOST
            prefix.of_others.pop()
        done = PrefetchResult.BROUGHT if prefix.has_sent else PrefetchResult.NOTHING
        self._end(prefix, prefix.failure or done)

    def _end(self, prefix: _Prefix, result: PrefetchResult) -> None:
        self._prefixes.remove(prefix)
        self._results[result] += 1
        if prefix.has_sent:
            # Its end is to go before its beginning, whichever came first.
            in_order = list(reversed(prefix.keys[: prefix.place]))
            self._put_in_order(in_order)
            for key in in_order:
                if key in self._unused:
                    self._unused.move_to_end(key)
        # What has come of it and was not used still says whose it was.
        prefix.keys, prefix.of_others = (), []

    def drop_waiting(self) -> None:
        """Send nothing more of what was to come."""
        for prefix in list(self._prefixes):
            self._end(prefix, PrefetchResult.LOST)

    def clear(self) -> None:
        """Nothing is what it was."""
        self.drop_waiting()
        self._unused.clear()
        self._unused_cost = 0

    def keeps_awake(self, now_s: float) -> bool:
        """Whether to come again soon for what waits, though nothing moves."""
        return now_s - self._went_on_s < PATIENCE_S and any(prefix.has_more for prefix in self._prefixes)

    def take_counts(self) -> tuple[dict[PrefetchResult, int], dict[PrefetchBytes, int]]:
        """What happened since the last call."""
        counts = dict(self._results), dict(+self._bytes)
        self._results, self._bytes = Counter(), Counter()
        return counts
