"""What a request can load, when, and what becomes of it.

A boundary is settled first, at which every group can resume; then what only the slow tier has of it is promoted, and
nothing else. The engine is told to ask again meanwhile, and holds no block for it. Every such wait has a deadline,
after which the request goes without the slow tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.admission import LoadAdmission, Verdict
from hybridkv.connectors.vllm.explain import Admission, explain, log
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.lookups import TierLookup
from hybridkv.connectors.vllm.messages import Load, LoadFailure, Move
from hybridkv.connectors.vllm.requests import NULL_BLOCK, RequestState
from hybridkv.connectors.vllm.stats import RAM, Recorder
from hybridkv.planner import (
    GroupKind,
    Hit,
    LookupResult,
    Miss,
    Pending,
    PlanError,
    Transfer,
    chunk_blocks,
    longest_hit,
    measure_loss,
    needed_ends,
    plan_load,
)
from hybridkv.tiers import Refusal
from hybridkv.tiers.stack import HoldFailure, TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

logger = logging.getLogger("vllm.hybridkv.scheduler")

MAX_GATED_POLLS = 256
"""Steps that a request waits for room beside other loads before it is computed instead."""
MAX_GATE_S = 60.0
"""But no longer than this, however long a step takes."""
MAX_FAILED_LOADS = 3
"""Loads of one request that may fail before it is no longer offered any."""
MAX_SHRINKS = 8
"""Times that a boundary is brought down by a quarter because the fast tier cannot take what it needs."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a request waits, in seconds from its first wait.

    Args:
        lookup_s: for chunks that are being stored.
        load_s: for the slow tier.
        clock: what time it is.
    """

    lookup_s: float
    load_s: float
    clock: Callable[[], float]


@dataclass(slots=True)
class _LoadJob:
    keys: list[bytes]
    boundary: int
    num_tokens: int
    num_bytes: int
    failures: list[LoadFailure] = field(default_factory=list)


class LoadPlanner:
    """Answers what can be loaded, and follows the loads that are on their way.

    Args:
        layout: the model's groups.
        stack: the tiers.
        admission: which loads may hold blocks at the same time.
        deadlines: how long a request waits.
        recorder: counts what happens.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        admission: LoadAdmission,
        deadlines: Deadlines,
        recorder: Recorder,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._admission = admission
        self._deadlines = deadlines
        self._recorder = recorder
        self._pool: BlockPool | None = None
        self._loads: dict[str, _LoadJob] = {}

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool that loads take their blocks from."""
        self._pool = pool

    # What the engine asks before it admits a request.

    def matched_tokens(self, state: RequestState, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded, or None to be asked again."""
        state.follow()
        offered = self._offered_tokens(state, computed_tokens)
        state.offered_tokens = offered or 0
        return offered

    def _offered_tokens(self, state: RequestState, computed_tokens: int) -> int | None:
        state.computed_tokens = computed_tokens
        has_failed = state.failed_loads or self._admission.has_failed(state.request_id)
        if has_failed and self._admission.held_by_others(state.request_id):
            # The engine puts a request whose load failed before all that have loaded, and looks no further when it does
            # not fit: asked again later, it lets them pass.
            return None
        if state.failed_loads >= MAX_FAILED_LOADS:
            state.answer = Miss(None, f"{state.failed_loads} loads of this request failed")
            return 0
        boundary = self._boundary(state, computed_tokens)
        if boundary is None:
            return None
        state.waiting_since_s = state.loading_since_s = None
        if boundary <= computed_tokens:
            return 0
        verdict = self._verdict(state)
        if verdict is Verdict.ADMIT:
            return boundary - computed_tokens
        if verdict is Verdict.WAIT and self._may_wait_for_room(state):
            return None
        self._stack.release(state.request_id)
        return 0

    def _verdict(self, state: RequestState) -> Verdict:
        """Whether a request that has a hit may be given blocks for it now."""
        return self._admission.verdict(
            state.request_id, state.request.num_tokens, self._pool_blocks(), self._free_blocks()
        )

    def _may_wait_for_room(self, state: RequestState) -> bool:
        """Others whose loads failed are certain to be scheduled; room beside loads may never come."""
        now_s = self._deadlines.clock()
        if self._admission.must_let_pass(state.request_id):
            state.gated_since_s = None
            return state.gated_polls <= MAX_GATED_POLLS
        if state.gated_since_s is None:
            state.gated_since_s = now_s
        state.gated_polls += 1
        return state.gated_polls <= MAX_GATED_POLLS and now_s - state.gated_since_s < MAX_GATE_S

    def _pool_blocks(self) -> int:
        return self._pool.num_gpu_blocks - 1 if self._pool is not None else 0

    def _free_blocks(self) -> int:
        return self._pool.get_num_free_blocks() if self._pool is not None else 0

    # Where it can resume.

    def _boundary(self, state: RequestState, computed_tokens: int) -> int | None:
        """The boundary whose chunks the fast tier holds now, `computed_tokens` if none, None to be asked again."""
        hold = self._stack.hold(state.request_id)
        if hold is not None:
            if hold.failure is None and state.claim is not None and state.claim[1] == computed_tokens:
                return state.claim[0] if hold.is_ready else None
            if hold.failure is HoldFailure.TIMEOUT:
                self._go_without(state)
            self._stack.release(state.request_id)
        for _ in range(MAX_SHRINKS):
            answer = self._search(state, computed_tokens)
            if isinstance(answer, Pending):
                if self._may_wait_for_stores(state):
                    return None
                self._recorder.wait_timeout("lookup")
                state.waited_in_vain = True
                answer = state.answer = self._longest_hit(state, computed_tokens, pending_is_miss=True)
            if not isinstance(answer, Hit):
                return computed_tokens
            refusal = self._bring_near(state, answer.num_tokens, computed_tokens)
            if refusal is None:
                hold = self._stack.hold(state.request_id)
                return answer.num_tokens if hold is None or hold.is_ready else None
            if refusal not in (Refusal.NO_ROOM, Refusal.TOO_LARGE):
                break
            state.room_limit = computed_tokens + (answer.num_tokens - computed_tokens) * 3 // 4
        if self._has_waited_for_loads(state):
            self._go_without(state)
        return None

    def _search(self, state: RequestState, computed_tokens: int) -> Hit | Pending | Miss:
        asked = (self._stack.generation, self._limit(state), computed_tokens)
        if state.asked != asked or state.answer is None:
            was_pending = isinstance(state.answer, Pending)
            state.asked, state.answer = asked, self._longest_hit(state, computed_tokens)
            if isinstance(state.answer, Pending) and not was_pending:
                self._recorder.pending()
        return state.answer

    def _limit(self, state: RequestState) -> int:
        limit = state.request.num_tokens
        if state.boundary_limit is not None:
            limit = min(limit, state.boundary_limit)
        if state.room_limit is not None and not state.near_only:
            limit = min(limit, state.room_limit)
        return limit

    def _longest_hit(
        self, state: RequestState, computed_tokens: int, pending_is_miss: bool = False
    ) -> Hit | Pending | Miss:
        tiers = self._stack.only_near if state.near_only else self._stack
        lookup = TierLookup(state.keys(), tiers, pending_is_miss or state.near_only)
        return longest_hit(self._layout.spec, self._limit(state), computed_tokens, lookup, lookup)

    def _bring_near(self, state: RequestState, boundary: int, computed_tokens: int) -> Refusal | None:
        """None when the fast tier holds everything for the boundary, or a hold now waits for it."""
        wanted = (boundary, computed_tokens)
        if not self._stack.slower or state.near_only or state.found_near == (self._stack.generation, *wanted):
            return None
        keys = self._needed_keys(state, boundary, computed_tokens)
        if all(self._stack.in_near(key) for key in keys):
            state.found_near = (self._stack.generation, *wanted)
            return None
        if self._has_waited_for_loads(state):
            return Refusal.BUSY
        acquired = self._stack.acquire(state.request_id, keys, state.loading_since_s)
        if isinstance(acquired, Refusal):
            return acquired
        state.claim = wanted
        return None

    def _needed_keys(self, state: RequestState, boundary: int, computed_tokens: int) -> list[bytes]:
        """What a load to the boundary reads: full prefixes first, each from its beginning."""
        spec, keys = self._layout.spec, state.keys()
        groups = sorted(spec.stored_groups, key=lambda group: spec.groups[group].kind is not GroupKind.FULL)
        return [keys.key(group, end) for group in groups for end in needed_ends(spec, group, boundary, computed_tokens)]

    def _may_wait_for_stores(self, state: RequestState) -> bool:
        """Whether a request may be told to ask again; its time begins when it is told so first."""
        now_s = self._deadlines.clock()
        if state.waiting_since_s is None:
            state.waiting_since_s = now_s
        return now_s - state.waiting_since_s < self._deadlines.lookup_s

    def _has_waited_for_loads(self, state: RequestState) -> bool:
        """Whether the time is over that a request may wait for the slow tier; it begins when this is asked first."""
        now_s = self._deadlines.clock()
        if state.loading_since_s is None:
            state.loading_since_s = now_s
        return now_s - state.loading_since_s >= self._deadlines.load_s

    def _go_without(self, state: RequestState) -> None:
        """The slow tier took too long: this request looks only at the fast one from now on."""
        self._recorder.wait_timeout("load")
        logger.warning("request %s goes without the slow tier, which did not answer in time", state.request_id)
        self._stack.release(state.request_id)
        state.near_only = True
        state.forget_answer()

    # Loads.

    def on_allocated(self, state: RequestState, blocks: KVCacheBlocks, num_external_tokens: int) -> Load | None:
        """The engine has given the request blocks; the load of its external tokens into them."""
        request_id = state.request_id
        if state.answer is not None and not isinstance(state.answer, Pending):
            self._explain(state, state.answer, num_external_tokens)
        state.forget_answer()
        if num_external_tokens == 0:
            self._stack.release(request_id)
            return None
        boundary = state.computed_tokens + num_external_tokens
        table = [[NULL_BLOCK if b.is_null else b.block_id for b in group] for group in blocks.blocks]
        job = _LoadJob([], boundary, num_external_tokens, 0)
        try:
            transfers = plan_load(self._layout.spec, boundary, state.computed_tokens, table, NULL_BLOCK)
            load = Load(request_id, self._pin(state, transfers, job))
        except PlanError as error:
            # The engine waits for this load, so it is told that it failed; nothing was written.
            self._stack.unpin_all(job.keys)
            job.keys.clear()
            logger.error("request %s cannot load %d tokens: %s", request_id, num_external_tokens, error)
            load = Load(request_id, (), str(error))
        self._stack.release(request_id)
        self._loads[request_id] = job
        self._admission.take(request_id, state.request.num_tokens)
        return load

    def _explain(self, state: RequestState, answer: Hit | Miss, num_external_tokens: int) -> None:
        """Counts and logs why the request loads so much and no more."""
        computed = state.computed_tokens
        lookup = TierLookup(state.keys(), self._stack.only_near if state.near_only else self._stack)
        limit = max(self._limit(state), computed)
        resumed = answer.num_tokens if isinstance(answer, Hit) else computed
        loss = measure_loss(
            self._layout.spec,
            limit,
            computed,
            resumed,
            lookup,
            lookup,
        )
        hold = self._stack.hold(state.request_id)
        source = RAM if hold is None else hold.source
        explanation = explain(self._layout.spec, state, Admission(answer, limit, num_external_tokens, loss, source))
        self._recorder.lookup(explanation)
        log(explanation)

    def _pin(self, state: RequestState, transfers: Sequence[Transfer], job: _LoadJob) -> tuple[Move, ...]:
        moves = []
        keys = state.keys()
        wanted = [keys.key(transfer.group_index, transfer.end_token) for transfer in transfers]
        slots = self._stack.pin_all(wanted)
        if slots is None:
            raise PlanError(self._what_is_missing(transfers, wanted))
        job.keys += wanted
        for transfer, key, slot in zip(transfers, wanted, slots, strict=True):
            stored = len(chunk_blocks(self._layout.spec, transfer.group_index, transfer.end_token))
            job.num_bytes += len(transfer.block_ids) * self._layout.block_bytes(transfer.group_index)
            moves.append(Move(transfer.group_index, key, slot, transfer.first_block, stored, transfer.block_ids))
        return tuple(moves)

    def _what_is_missing(self, transfers: Sequence[Transfer], keys: Sequence[bytes]) -> str:
        lookup = self._stack.lookup_near
        part = next(part for part, key in zip(transfers, keys, strict=True) if lookup(key) is not LookupResult.HIT)
        return f"the chunk of group {part.group_index} that ends at {part.end_token} is not stored"

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._loads

    def has_work(self) -> bool:
        return bool(self._loads)

    # What the workers report.

    def on_failures(self, request_id: str, failures: Iterable[LoadFailure]) -> None:
        """Why a load failed on some rank; that it ended comes by `on_ended`."""
        if job := self._loads.get(request_id):
            job.failures += failures

    def on_ended(self, request_id: str, state: RequestState | None, failed: bool) -> None:
        """A load has ended on every rank. After a failure the request's retry asks for less."""
        job = self._loads.pop(request_id, None)
        if job is None:
            return
        if state is None:
            self._admission.give_back(request_id)
        culprits = {failure.key for failure in job.failures if failure.key is not None}
        for key in culprits:
            self._stack.withdraw(key)
        self._stack.unpin_all(reversed(job.keys))
        self._recorder.load(job.num_tokens, job.num_bytes * self._layout.world_size, failed, job.failures)
        if failed and state is not None:
            self._admission.fail(request_id, state.request.num_tokens)
            state.failed_loads += 1
            if not culprits:
                state.boundary_limit = job.boundary
            state.forget_progress()
            reasons = "; ".join(sorted({f"{f.reason}: {f.detail}" for f in job.failures})) or "no reason given"
            logger.warning(
                "request %s: loading %d tokens failed; kv_load_failure_policy says what becomes of it (%s)",
                request_id,
                job.num_tokens,
                reasons,
            )

    def on_gone(self, request_id: str) -> None:
        """The request has ended."""
        self._stack.release(request_id)
        if request_id not in self._loads:
            self._admission.give_back(request_id)
