"""Prefixes with the hint `prefetch`: promoted to host memory as soon as the request arrives.

A prefetch continues if its request is aborted. `planner.hints` decides which chunks to promote, and the stack promotes
them. A prefetch first waits for async lookups, and for the identity of the request's adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import LookupIndex, PendingIsMiss, TierLookup
from hybridkv.connectors.vllm.common.requests import Requests, TrackedRequest
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.planner.hints import Prefetch, plan_prefetch
from hybridkv.tiers.stack import PrefetchResult, TierStack

if TYPE_CHECKING:
    from vllm.v1.request import Request

MAX_WAITING: Final = 256
"""Maximum number of waiting prefetches. Further ones are refused and counted."""
MAX_TRIED: Final = 8
"""Maximum number of waiting prefetches that one step tries."""
AWAKE_S: Final = 1.0
"""Longest time for which an engine without requests keeps stepping for an adapter that is not identified."""


@dataclass(slots=True, eq=False)
class _Waiting:
    tracked: TrackedRequest
    since_s: float
    lookup_deadline_s: float | None = None
    """Deadline of the async lookups; None before the first search, and while the adapter is not identified."""
    generation: int | None = None
    """Generation of the stack at the last search; None while the adapter is not identified."""


class Prefetcher:
    """Prefetches of one connector.

    Args:
        layout: the model's groups.
        requests: gives the keys of a request.
        stack: the tiers.
        start_lookup: sends async lookups for the given number of tokens of a request.
        clock: time in seconds.
        metrics: counts the results.
    """

    def __init__(
        self,
        layout: CacheLayout,
        requests: Requests,
        stack: TierStack,
        start_lookup: Callable[[TrackedRequest, int], None],
        clock: Callable[[], float],
        metrics: ConnectorMetrics,
    ) -> None:
        self._spec = layout.spec
        self._requests = requests
        self._stack = stack
        self._start_lookup = start_lookup
        self._clock = clock
        self._metrics = metrics
        self._waiting: list[_Waiting] = []

    def begin(self, request: Request, most_bytes: int) -> None:
        """Begins the prefetch of a new request. `most_bytes`: see `TierStack.prefetch`."""
        if not self._stack.secondary:
            self._metrics.prefetch(PrefetchResult.NOTHING)
        elif len(self._waiting) >= MAX_WAITING:
            self._metrics.prefetch(PrefetchResult.CROWDED)
        else:
            waiting = _Waiting(self._requests.untracked_copy(request), self._clock())
            if not self._try(waiting, most_bytes):
                self._waiting.append(waiting)

    def advance(self, most_bytes: int) -> None:
        """Tries a few waiting prefetches, in turn. Called once in each step, before the moves are taken."""
        self._stack.limit_prefetches(most_bytes)
        if not self._waiting:
            return
        now_s, generation = self._clock(), self._stack.generation
        due = [each for each in self._waiting if self._is_due(each, now_s, generation)][:MAX_TRIED]
        in_turn = set(due)
        others = [each for each in self._waiting if each not in in_turn]
        self._waiting = others + [each for each in due if not self._try(each, most_bytes)]

    def _is_due(self, waiting: _Waiting, now_s: float, generation: int) -> bool:
        """Whether a search may find more than the last one, or the deadline has passed."""
        is_over = waiting.lookup_deadline_s is not None and now_s >= waiting.lookup_deadline_s
        return is_over or waiting.generation != generation

    def _try(self, waiting: _Waiting, most_bytes: int) -> bool:
        """Tries one prefetch. False if it must wait."""
        now_s, tracked = self._clock(), waiting.tracked
        if not self._requests.identify(tracked):
            waiting.generation = waiting.lookup_deadline_s = None
            if now_s - waiting.since_s < self._stack.load_timeout_s:
                return False
            self._metrics.prefetch(PrefetchResult.LATE)
            return True
        waiting.generation = self._stack.generation
        stack = self._stack
        answered = PendingIsMiss(stack, stack.is_lookup_pending) if stack.has_async_lookups else stack
        found = self._find(tracked, answered)
        if not found.is_whole and self._may_find_more(waiting, found, now_s):
            return False
        if found.parts:
            keys = tracked.keys()
            self._stack.prefetch([keys.key(*part) for part in found.parts], most_bytes)
        else:
            self._metrics.prefetch(PrefetchResult.NOTHING)
        return True

    def _may_find_more(self, waiting: _Waiting, found: Prefetch, now_s: float) -> bool:
        """Whether answers of async lookups may still make the prefix longer. The first call sends the lookups."""
        if waiting.lookup_deadline_s is None:
            waiting.lookup_deadline_s = now_s + self._stack.lookup_wait_s
            if waiting.lookup_deadline_s > now_s:
                self._start_lookup(waiting.tracked, waiting.tracked.request.num_tokens)
        is_over = now_s >= waiting.lookup_deadline_s
        return not is_over and self._find(waiting.tracked, self._stack).num_tokens > found.num_tokens

    def _find(self, tracked: TrackedRequest, tiers: LookupIndex) -> Prefetch:
        lookup = TierLookup(tracked.keys(), tiers)
        return plan_prefetch(self._spec, tracked.request.num_tokens, lookup, lookup)

    def has_work(self) -> bool:
        """Whether the engine must keep stepping for a waiting prefetch."""
        now_s = self._clock()
        return any(each.lookup_deadline_s is not None or now_s < each.since_s + AWAKE_S for each in self._waiting)

    def end(self) -> None:
        """Ends all prefetches. Counts waiting ones as lost."""
        for _ in self._waiting:
            self._metrics.prefetch(PrefetchResult.LOST)
        self._waiting.clear()
        self._stack.end_prefetches()
