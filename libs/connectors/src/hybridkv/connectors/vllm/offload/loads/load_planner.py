"""Lookups of requests, and the loads that follow.

`LoadPlanner` answers the engine's lookups. The decisions are in `hybridkv.planner.life`; this module gathers their
facts, does the lookups and promotions in the tiers, and records metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.common.explain import Admission, Explanation, explain, log
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.lookups import PendingIsMiss, TierLookup
from hybridkv.connectors.vllm.common.messages import Load
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.connectors.vllm.common.stats import RAM, ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.connectors.vllm.offload.loads.lookup_costs import LookupCosts
from hybridkv.connectors.vllm.offload.loads.lookup_sender import LookupSender
from hybridkv.connectors.vllm.offload.loads.prefill_speed import PrefillSpeed
from hybridkv.planner import (
    Hit,
    LoadAdmission,
    Loss,
    Miss,
    Pending,
    life,
    longest_hit,
    measure_loss,
    needed_parts,
)
from hybridkv.planner.stages import (
    Action,
    Bounds,
    Compute,
    Facts,
    Holding,
    HoldState,
    Offer,
    Promote,
    Promoted,
    Release,
    Reply,
    RetryLater,
    Search,
    Searched,
    Stage,
    StartLookups,
)
from hybridkv.tiers import Refusal
from hybridkv.tiers.stack import LeaseFailure, TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

logger = logging.getLogger("vllm.hybridkv.scheduler")


# In CPython 3.11 access to an enum member is slow compared with the rest of a lookup.
_READY, _WAITING = HoldState.READY, HoldState.WAITING
_FAILED_HOLDS = {LeaseFailure.TIMEOUT: HoldState.LATE, LeaseFailure.LOST: HoldState.LOST}


MAX_POLL_S = 1.0
"""Maximum time between two polls that counts as a wait of the request, if steps ran between them. The rest is time in
the engine's queue."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Limits on the waits of a request, in seconds from its first wait.

    Args:
        lookup_s: limit for chunks that are being stored.
        load_s: limit for secondary tiers.
        clock: time in seconds.
        tokens_per_s: tokens that the engine computes in a second; None if it is measured.
    """

    lookup_s: float
    load_s: float
    clock: Callable[[], float]
    tokens_per_s: float | None = None


class LoadPlanner:
    """Finds the tokens that a request can load, and promotes their chunks.

    Args:
        layout: the model's groups.
        stack: the tiers.
        admission: limits the loads that hold blocks at the same time.
        deadlines: limits on the waits of a request.
        metrics: the connector's metrics.
        in_flight: plans and tracks the loads that start.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        admission: LoadAdmission,
        deadlines: Deadlines,
        metrics: ConnectorMetrics,
        in_flight: LoadsInFlight,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._admission = admission
        self._clock = deadlines.clock
        self._bounds = Bounds(deadlines.lookup_s, deadlines.load_s, boundary_tokens=layout.spec.boundary_tokens)
        self.prefill_speed = PrefillSpeed(deadlines.clock, deadlines.tokens_per_s)
        self.lookups = LookupSender(layout, stack, deadlines.clock)
        self._costs = LookupCosts(layout, stack, self.prefill_speed, deadlines.clock)
        self._metrics = metrics
        self._has_secondary, self._has_async_lookups = bool(stack.secondary), stack.has_async_lookups
        self._pool: BlockPool | None = None
        self._in_flight = in_flight
        self._num_steps = 0
        self.admits_loads = True
        """Whether a load waits for room beside other loads. False below a parent connector that admits loads: if this
        connector answered "later", the parent could choose a child without a hit, and the engine would compute the
        prompt."""

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the block pool; loads need free blocks in it."""
        self._pool = pool

    # Called before the engine admits a request.

    def matched_tokens(self, tracked: TrackedRequest, computed_tokens: int) -> int | None:
        """Number of tokens after `computed_tokens` that can be loaded; None if the engine must call again."""
        tracked.follow()
        tracked.computed_tokens = computed_tokens
        facts = self._facts(tracked)
        self._note_poll(tracked, facts.now_s)
        stage, step = life.resume(tracked.stage, facts, self._bounds)
        while True:
            if type(step) is Offer:
                tracked.stage, tracked.last_reply = stage, step
                return step.num_tokens
            if type(step) is RetryLater:
                tracked.stage, tracked.last_reply = stage, step
                if tracked.waiting_since_s is None:
                    tracked.waiting_since_s = facts.now_s
                return None
            if type(step) is Compute:
                tracked.stage, tracked.last_reply = stage, step
                if facts.hold is not None or type(stage) is Holding:
                    self._stack.release(tracked.request_id)
                return 0
            stage, facts, step = self._run_action(tracked, stage, facts, step)

    def _note_poll(self, tracked: TrackedRequest, now_s: float) -> None:
        """Records a poll. If the engine took steps without a poll, only `MAX_POLL_S` of the time since the last poll
        counts as a wait. A part always counts, so every wait ends."""
        last, tracked.last_lookup = tracked.last_lookup, (self._num_steps, now_s)
        if last is not None and self._num_steps > last[0] + 1 and now_s > last[1] + MAX_POLL_S:
            tracked.stage = life.paused(tracked.stage, now_s - last[1] - MAX_POLL_S)

    def _facts(self, tracked: TrackedRequest) -> Facts:
        """Current inputs of a decision."""
        num_tokens, hold = tracked.request.num_tokens, self._stack.lease(tracked.request.request_id)
        generation, held, room = 0, None, None
        if hold is None:
            generation = self._stack.generation
        elif hold.failure is not None:
            held = _FAILED_HOLDS[hold.failure]
        else:
            held = _WAITING if hold.waiting else _READY
        if self.admits_loads and not self._admission.is_idle:
            pool_blocks, free_blocks = 0, 0
            if self._pool is not None:
                pool_blocks, free_blocks = self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks()
            room = self._admission.room(tracked.request_id, num_tokens, pool_blocks, free_blocks)
        return Facts(
            num_tokens,
            tracked.computed_tokens,
            generation,
            self._clock(),
            self._has_secondary,
            held,
            room,
            self._costs.wait() if self._has_async_lookups else None,
            self._has_async_lookups and hold is None and self._is_unanswered(tracked, generation),
        )

    def _is_unanswered(self, tracked: TrackedRequest, generation: int) -> bool:
        """Whether the tiers have changed since the search, but the awaited async lookup still has no answer."""
        stage, key = tracked.stage, tracked.awaited_key
        if key is None or type(stage) is not Searched or stage.settled is None or stage.generation == generation:
            return False
        return self._stack.is_lookup_pending(key)

    def begin_step(self, num_scheduled_tokens: Mapping[str, int]) -> int:
        """Called when a step is planned. Sends expired async lookups again. Returns the number of the step if its time
        is measured, else 0."""
        self._num_steps += 1
        self.lookups.send_again()
        self._costs.begin_step()
        return self.prefill_speed.on_planned(num_scheduled_tokens)

    def _run_action(
        self, tracked: TrackedRequest, stage: Stage, facts: Facts, action: Action
    ) -> tuple[Stage, Facts, Reply | Action]:
        """Runs one action, and gives its result to `life`."""
        match action:
            case Search():
                answer = self._search(tracked, stage, action, facts.now_s)
                settled = tracked.awaited_key = None
                if self._has_async_lookups and type(answer) is Pending:
                    settled = self._search_without_unanswered(tracked, action)
                    tracked.awaited_key = self._first_unanswered(tracked, answer.num_tokens, settled)
                stage, step = life.searched(stage, facts, self._bounds, action, answer, settled)
            case StartLookups(limit_tokens):
                is_sent = self.lookups.are_in_flight(tracked, limit_tokens)
                if not is_sent:
                    self.lookups.send(tracked, limit_tokens)
                    facts = self._facts(tracked)
                stage, step = life.lookups_started(stage, facts, self._bounds, action, is_news=not is_sent)
            case Promote():
                outcome = self._promote(tracked, action)
                stage, step = life.promoted(stage, facts, self._bounds, action, outcome)
            case Release(is_timeout):
                if is_timeout:
                    self._log_timeout(tracked.request_id)
                self._stack.release(tracked.request_id)
                facts = self._facts(tracked)
                stage, step = life.resume(stage, facts, self._bounds)
        return stage, facts, step

    def _log_timeout(self, request_id: str) -> None:
        self._metrics.wait_timeout("load")
        hold = self._stack.lease(request_id)
        why = "no promotion could start in time" if hold is None else f"{hold.source} timed out"
        logger.warning("request %s loads nothing from secondary tiers: %s", printable(request_id), why)

    # Lookups and promotions.

    def _search(self, tracked: TrackedRequest, stage: Stage, action: Search, now_s: float) -> Hit | Pending | Miss:
        if action.is_last:
            self._metrics.wait_timeout("lookup")
        answer = self._longest_hit(tracked, action)
        if type(answer) is Pending and not (type(stage) is Searched and type(stage.answer) is Pending):
            lookup_deadline_s = stage.past.lookup_deadline_s
            self._metrics.pending(is_async=lookup_deadline_s is not None and now_s < lookup_deadline_s)
        return answer

    def _longest_hit(self, tracked: TrackedRequest, action: Search) -> Hit | Pending | Miss:
        only_primary = action.only_primary
        tiers = self._stack if self._has_secondary and not only_primary else self._stack.primary
        lookup = TierLookup(tracked.keys(), tiers, action.is_last or only_primary)
        return longest_hit(self._layout.spec, action.limit_tokens, tracked.computed_tokens, lookup, lookup)

    def _search_without_unanswered(self, tracked: TrackedRequest, action: Search) -> Hit | Pending | Miss:
        """Result of the search if keys with an unanswered async lookup count as misses."""
        lookup = TierLookup(tracked.keys(), PendingIsMiss(self._stack, self._stack.is_lookup_pending))
        return longest_hit(self._layout.spec, action.limit_tokens, tracked.computed_tokens, lookup, lookup)

    def _first_unanswered(
        self, tracked: TrackedRequest, num_tokens: int, settled: Hit | Pending | Miss
    ) -> bytes | None:
        """First key with an unanswered async lookup in the chunk after the settled hit; None if there is none."""
        spec, keys = self._layout.spec, tracked.keys()
        known = tracked.computed_tokens if isinstance(settled, Miss) else settled.num_tokens
        end = (known // spec.chunk_tokens + 1) * spec.chunk_tokens
        if end <= num_tokens:
            for group in (*spec.full_groups, *spec.stored_groups):
                if self._stack.is_lookup_pending(key := keys.key(group, end)):
                    return key
        return None

    def _promote(self, tracked: TrackedRequest, action: Promote) -> Promoted:
        keys = tracked.keys()
        needed = [keys.key(*part) for part in needed_parts(self._layout.spec, action.boundary, tracked.computed_tokens)]
        if all(self._stack.in_primary(key) for key in needed):
            return Promoted.IN_PRIMARY
        if not action.has_time:
            return Promoted.BUSY
        hold = self._stack.acquire(tracked.request_id, needed, action.since_s)
        if isinstance(hold, Refusal):
            return Promoted.NO_ROOM if hold in (Refusal.NO_ROOM, Refusal.TOO_LARGE) else Promoted.BUSY
        return Promoted.READY if hold.is_ready else Promoted.HELD

    # Called after the engine has allocated blocks.

    def on_allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> Load | None:
        """Plans the load of the external tokens into the allocated blocks; None without external tokens. Releases the
        request's lease, and explains the lookup."""
        request_id = tracked.request_id
        self.lookups.leave_queue(request_id)
        # A request that continues without a new lookup is not explained again, even if an old answer is known.
        answer = None if tracked.last_reply is None else life.answer_of(tracked.stage)
        explained = None
        if answer is not None and not isinstance(answer, Pending):
            explained = self._explain(tracked, answer, num_external_tokens)
        boundary = tracked.computed_tokens + num_external_tokens if num_external_tokens else None
        tracked.stage, tracked.last_reply = life.allocated(tracked.stage, boundary), None
        load = None
        if boundary is None:
            self.end_wait(tracked)
        else:
            if tracked.waiting_since_s is None:
                tracked.waiting_since_s = self._clock()
            load = self._in_flight.begin(tracked, boundary, blocks)
            if explained is not None:
                local_tokens = self._in_flight.local_tokens(request_id)
                explained = msgspec.structs.replace(explained, local_tokens=local_tokens)
        self._stack.release(request_id)
        if explained is not None:
            self._metrics.lookup(explained)
            log(explained)
        return load

    def end_load(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Called when the load of a request has ended on every rank. `num_tokens`: restored tokens."""
        if num_tokens:
            self._metrics.saved(num_tokens, num_tokens * self.prefill_speed.seconds_per_token)
        self.end_wait(tracked)

    def end_wait(self, tracked: TrackedRequest) -> None:
        """Counts the time of a request's wait, if it has waited. The request runs from now on."""
        if tracked.waiting_since_s is not None:
            self._metrics.waited(max(0.0, self._clock() - tracked.waiting_since_s))
            tracked.waiting_since_s = None

    def loss(self, tracked: TrackedRequest) -> Loss | None:
        """Tokens that the FULL groups hold beyond the hit; None before an answer. Measured once per answer."""
        answer, computed = life.answer_of(tracked.stage), tracked.computed_tokens
        if answer is None or isinstance(answer, Pending):
            return None
        known = tracked.measured
        if known is not None and known[0] is answer and known[1] == computed:
            return known[2]
        lookup = TierLookup(tracked.keys(), self._stack.primary if tracked.stage.past.only_primary else self._stack)
        resumed = max(answer.num_tokens, computed) if isinstance(answer, Hit) else computed
        limit = self._limit(tracked)
        loss = measure_loss(self._layout.spec, limit, computed, resumed, lookup, lookup)
        tracked.measured = (answer, computed, loss)
        return loss

    def loss_without_search(self, tracked: TrackedRequest) -> Loss:
        """Tokens that the FULL groups hold beyond the engine's own, for a request with keys that loads nothing. Looks
        up keys in the tiers, but does not search for a hit."""
        lookup, computed = TierLookup(tracked.keys(), self._stack), tracked.computed_tokens
        limit = max(tracked.request.num_tokens, computed)
        return measure_loss(self._layout.spec, limit, computed, computed, lookup, lookup)

    def _limit(self, tracked: TrackedRequest) -> int:
        return max(life.limit_tokens(tracked.stage, tracked.request.num_tokens), tracked.computed_tokens)

    def _explain(self, tracked: TrackedRequest, answer: Hit | Miss, num_external_tokens: int) -> Explanation:
        """Explains the number of tokens that the request loads."""
        loss = self.loss(tracked)
        assert loss is not None, "the lookup has an answer"
        hold = self._stack.lease(tracked.request_id)
        source = RAM if hold is None else hold.source
        had_async_lookup = None
        if self._stack.has_async_lookups and (
            self._stack.lookup_wait_s or tracked.stage.past.lookup_deadline_s is not None
        ):
            had_async_lookup = tracked.stage.past.lookup_deadline_s is not None
        admission = Admission(answer, self._limit(tracked), num_external_tokens, loss, source, had_async_lookup)
        return explain(self._layout.spec, tracked, admission)

    def on_request_finished(self, request_id: str) -> None:
        """Releases the request's lease and admission. A load in flight keeps its admission until it has ended."""
        self.lookups.leave_queue(request_id)
        self._stack.release(request_id)
        self._in_flight.on_request_finished(request_id)
