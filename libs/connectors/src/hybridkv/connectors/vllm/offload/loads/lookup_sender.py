"""Async lookups of requests: sent when a request arrives, and again if the answers expire while it is queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.planner import GroupKind, LookupResult, last_boundary, life
from hybridkv.tiers import Key
from hybridkv.tiers.stack import TierStack

LOOKUP_AGAIN_S = 30.5
"""Seconds after which lookups of a queued request are sent again, if their answers have expired. Peers lease found
chunks for a minute or more, and the chunks are offered for the first half of it."""
CHECK_AGAIN_S = 1.0
"""Seconds from a check that finds no expired answer to the next check of the same request."""
MAX_CHECKED = 64
"""Maximum number of chunks of a window or recurrent group that a check examines: the last ones."""


class LookupSender:
    """Sends async lookups to the tiers, and keeps the answers of queued requests fresh.

    Args:
        layout: the model's groups.
        stack: the tiers.
        clock: time in seconds.
    """

    def __init__(self, layout: CacheLayout, stack: TierStack, clock: Callable[[], float]) -> None:
        self._layout = layout
        self._stack = stack
        self._clock = clock
        self._queued: dict[str, tuple[TrackedRequest, float]] = {}
        """Requests in the engine's queue, and when their async lookups are checked again. `send_again` takes the first
        request and puts it last."""

    def send(self, tracked: TrackedRequest, limit_tokens: int) -> None:
        """Sends async lookups for every chunk after `tracked.computed_tokens`, interleaved over the groups: the first
        chunk of each group, then the second of each, and so on. The peers in the hints of the request are looked up
        first.

        A tier may accept only the first keys; these still cover a prefix at which all groups can resume. Windows and
        states are looked up at every chunk, because the boundary of the resume is not known yet. Tails have many keys,
        so only tails after the last chunk are looked up, where the same request may have been stored before.
        """
        spec, keys = self._layout.spec, tracked.keys()
        last = last_boundary(spec, limit_tokens)
        first, stop = tracked.computed_tokens // spec.chunk_tokens, last // spec.chunk_tokens
        wanted: list[bytes] = []
        if first < stop:
            by_group = [keys.between(group, first, stop) for group in spec.stored_groups]
            wanted = [key for chunk in zip(*by_group, strict=True) for key in chunk]
        if stop * spec.chunk_tokens < last:
            after = max(stop * spec.chunk_tokens, tracked.computed_tokens)
            ends = range(last, after, -spec.boundary_tokens)
            wanted += [keys.key(group, end) for end in ends for group in spec.stored_groups]
        if wanted:
            self._stack.start_lookup(wanted, tracked.hints.peers)

    def are_in_flight(self, tracked: TrackedRequest, limit_tokens: int) -> bool:
        """Whether the async lookups of the request are in flight. Checks the last chunk: a tier that accepts only some
        of the keys leaves out the last chunk first. Always False for a model with tails."""
        spec = self._layout.spec
        last = last_boundary(spec, limit_tokens)
        if spec.tail_tokens is not None or last <= tracked.computed_tokens:
            return False
        return self._stack.is_lookup_pending(tracked.keys().key(spec.stored_groups[-1], last))

    def enqueue(self, tracked: TrackedRequest) -> None:
        """Sends async lookups for a request that enters the engine's queue. `send_again` renews expired answers, until
        the request gets blocks or ends."""
        self._queued[tracked.request_id] = tracked, self._clock() + LOOKUP_AGAIN_S
        self.send(tracked, tracked.request.num_tokens)

    def send_again(self) -> None:
        """Sends the lookups of one queued request again, if its answers have expired. Checks one request a step."""
        if not self._queued:
            return
        request_id, (tracked, due_s) = next(iter(self._queued.items()))
        now_s = self._clock()
        timeout_s = self._stack.lookup_wait_s
        if now_s >= due_s:
            due_s = now_s + CHECK_AGAIN_S
            if timeout_s and tracked.request_keys is not None and self._has_expired(tracked):
                due_s = now_s + LOOKUP_AGAIN_S
                self.send(tracked, tracked.request.num_tokens)
                tracked.stage = life.lookups_sent_again(tracked.stage, now_s, timeout_s)
        del self._queued[request_id]
        self._queued[request_id] = tracked, due_s

    def _has_expired(self, tracked: TrackedRequest) -> bool:
        """Whether an answer has expired for a chunk that a hit may need. Checks the first chunk of each FULL group that
        no tier offers, and the last chunks before it of the other groups."""
        spec = self._layout.spec
        first = tracked.computed_tokens // spec.chunk_tokens
        stop = last_boundary(spec, tracked.request.num_tokens) // spec.chunk_tokens
        if first >= stop:
            return False
        indexes = [index for index in self._stack.secondary.values() if index.has_async_lookups]
        num_held = stop - first
        others: list[Sequence[Key]] = []
        suspects: list[Key] = []
        for group in spec.stored_groups:
            keys = tracked.keys().between(group, first, stop)
            if spec.groups[group].kind is GroupKind.FULL:
                num_leading = self._stack.leading(keys)
                num_held = min(num_held, num_leading)
                suspects += keys[num_leading : num_leading + 1]
            else:
                others.append(keys)
        for keys in others:
            suspects += keys[max(0, num_held - MAX_CHECKED) : num_held]
        return any(
            self._stack.lookup(key) is LookupResult.MISS and any(not index.lacks(key) for index in indexes)
            for key in suspects
        )

    def leave_queue(self, request_id: str) -> None:
        """Removes a request that got blocks or has ended."""
        self._queued.pop(request_id, None)
