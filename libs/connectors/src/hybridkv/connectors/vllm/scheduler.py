"""The scheduler's half of HybridOffloadConnector: asks the planner, keeps the tier's index, follows what is in flight.

It moves no bytes. A key is offered only after every rank has committed it; a source block stays pinned in the engine's
pool until every rank has read it; a chunk stays pinned in the tier until every rank has loaded it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.admission import LoadAdmission
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.messages import Load, LoadFailure, Move, StepOutcome, StepPlan, Store
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.hashing import TokenHashes
from hybridkv.planner import (
    Hit,
    LookupResult,
    Miss,
    Pending,
    PlanError,
    State,
    Transfer,
    chunk_blocks,
    longest_hit,
    plan_load,
    plan_store,
)
from hybridkv.tiers import Refusal, Slot, TierIndex

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv.scheduler")

MAX_PENDING_POLLS = 256
"""Steps that a request waits for chunks which are being stored before it goes without them."""
MAX_GATED_POLLS = 256
"""Steps that a request waits for room beside other loads before it is computed instead."""
MAX_FAILED_LOADS = 3
"""Loads of one request that may fail before it is no longer offered any."""
NULL_BLOCK = 0


@dataclass(slots=True)
class _RequestState:
    request: Request
    hashes: TokenHashes | None
    stored_tokens: int = 0
    """Chunks that end here or before have been seen to."""
    is_storable: bool = True
    """False after a reset, until the request starts over: what it has computed may be what the reset was to forget."""
    computed_tokens: int = 0
    """What the engine said it holds when it last asked."""
    answer: Hit | Pending | Miss | None = None
    asked: tuple[int, int, int] = (-1, -1, -1)
    """(index generation, tokens, computed tokens) that `answer` is good for."""
    pending_polls: int = 0
    gated_polls: int = 0
    seen: tuple[int, int] = (0, 0)
    """Chunks that were complete when stores were last planned: without a drafter's lookahead, and with it."""
    failed_loads: int = 0
    boundary_limit: int | None = None
    """A load to this boundary failed: only shorter ones are offered."""

    def forget_progress(self) -> None:
        """The engine starts this request over."""
        self.stored_tokens = 0
        self.is_storable = True
        self.pending_polls = 0
        self.gated_polls = 0
        self.seen = (0, 0)
        self.asked = (-1, -1, -1)


@dataclass(slots=True)
class _StoreJob:
    keys: list[tuple[bytes, str]]
    """With the kind of each key's group."""
    blocks: list[KVCacheBlock]
    num_bytes: int
    ranks_left: int
    failure: str | None = None


@dataclass(slots=True)
class _LoadJob:
    keys: list[bytes]
    boundary: int
    num_tokens: int
    num_bytes: int
    failures: list[LoadFailure] = field(default_factory=list)


class OffloadScheduler:
    """Decides what is loaded and stored.

    Args:
        layout: the model's groups and keys.
        index: of the tier; this object is its only user.
        admission: which loads may hold blocks at the same time.
        recorder: counts what happens.
    """

    def __init__(self, layout: CacheLayout, index: TierIndex, admission: LoadAdmission, recorder: Recorder) -> None:
        self._layout = layout
        self._index = index
        self._admission = admission
        self._recorder = recorder
        self._pool: BlockPool | None = None
        self._requests: dict[str, _RequestState] = {}
        self._stores: dict[int, _StoreJob] = {}
        self._loads: dict[str, _LoadJob] = {}
        self._job_ids = itertools.count(1)
        self._plan = StepPlan()

    # What the engine asks before it admits a request.

    def track(self, request: Request) -> _RequestState:
        """The state of a request, made when it is first seen."""
        state = self._requests.get(request.request_id)
        if state is None or state.request is not request:
            hashes = None
            if not self._layout.reuses_hashes:
                hashes = self._layout.keys.token_hashes(partial(compat.extra_hash_bytes, request))
            state = self._requests[request.request_id] = _RequestState(request, hashes)
        return state

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded, or None to be asked again. The tier stays as it is."""
        state = self.track(request)
        state.computed_tokens = computed_tokens
        others = self._admission.held_by_others(request.request_id)
        has_failed = state.failed_loads > 0 or self._admission.has_failed(request.request_id)
        if has_failed and others:
            # The engine puts a request whose load failed before all that have loaded, and looks no further when it does
            # not fit: asked again later, it lets them pass.
            return None
        if state.failed_loads >= MAX_FAILED_LOADS:
            return 0
        num_tokens = request.num_tokens
        if state.boundary_limit is not None:
            num_tokens = min(num_tokens, state.boundary_limit)
        asked = (self._index.generation, num_tokens, computed_tokens)
        if state.asked != asked or state.answer is None:
            state.asked, state.answer = asked, self._longest_hit(state, num_tokens, computed_tokens)
        if isinstance(state.answer, Pending):
            if state.pending_polls == 0:
                self._recorder.lookup(state.answer, self._layout.spec, 0)
            state.pending_polls += 1
            if state.pending_polls <= MAX_PENDING_POLLS:
                return None
            state.answer = self._longest_hit(state, num_tokens, computed_tokens, pending_is_miss=True)
        if not isinstance(state.answer, Hit):
            return 0
        needed = self._admission.blocks(request.num_tokens)
        if self._admission.must_let_pass(request.request_id):
            return None
        if others and others + needed > self._pool_blocks():
            state.gated_polls += 1
            return None if state.gated_polls <= MAX_GATED_POLLS else 0
        if has_failed and needed + self._admission.reserved_for_failed() > self._free_blocks():
            # The engine still reserves for loads that failed, this request's too, and another must fit beside that.
            return 0
        return state.answer.num_tokens - computed_tokens

    def _longest_hit(
        self, state: _RequestState, num_tokens: int, computed_tokens: int, pending_is_miss: bool = False
    ) -> Hit | Pending | Miss:
        hashes = self._prefix_hashes(state)

        def lookup(group_index: int, end_token: int) -> LookupResult:
            result = self._index.lookup(self._layout.key(group_index, hashes, end_token))
            if pending_is_miss and result is LookupResult.PENDING:
                return LookupResult.MISS
            return result

        return longest_hit(self._layout.spec, num_tokens, computed_tokens, lookup)

    def _prefix_hashes(self, state: _RequestState) -> Sequence[bytes]:
        if state.hashes is None:
            return state.request.block_hashes
        return state.hashes.upto(state.request.all_token_ids)

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The engine has given the request blocks; plan the load of its external tokens into them."""
        state = self.track(request)
        if state.answer is not None and not isinstance(state.answer, Pending):
            self._recorder.lookup(state.answer, self._layout.spec, num_external_tokens)
            state.answer = None
        if num_external_tokens == 0:
            return
        request_id = request.request_id
        boundary = state.computed_tokens + num_external_tokens
        table = [[NULL_BLOCK if b.is_null else b.block_id for b in group] for group in blocks.blocks]
        job = _LoadJob([], boundary, num_external_tokens, 0)
        try:
            transfers = plan_load(self._layout.spec, boundary, state.computed_tokens, table, NULL_BLOCK)
            moves = self._pin(state, transfers, job)
        except PlanError as error:
            # The engine waits for this load, so it is told that it failed; nothing was written.
            for key in job.keys:
                self._index.unpin(key)
            job.keys.clear()
            logger.error("request %s cannot load %d tokens: %s", request_id, num_external_tokens, error)
            self._plan.loads.append(Load(request_id, (), str(error)))
        else:
            self._plan.loads.append(Load(request_id, moves))
        self._loads[request_id] = job
        self._admission.take(request_id, request.num_tokens)

    def _pin(self, state: _RequestState, transfers: Iterable[Transfer], job: _LoadJob) -> tuple[Move, ...]:
        moves = []
        hashes = self._prefix_hashes(state)
        for transfer in transfers:
            key = self._layout.key(transfer.group_index, hashes, transfer.end_token)
            slot = self._index.pin(key)
            if slot is None:
                raise PlanError(
                    f"the chunk of group {transfer.group_index} that ends at {transfer.end_token} is not stored"
                )
            job.keys.append(key)
            job.num_bytes += len(transfer.block_ids) * self._layout.block_bytes(transfer.group_index)
            moves.append(self._move(transfer, key, slot))
        return tuple(moves)

    def _move(self, transfer: Transfer, key: bytes, slot: Slot) -> Move:
        stored = len(chunk_blocks(self._layout.spec, transfer.group_index, transfer.end_token))
        return Move(transfer.group_index, key, slot, transfer.first_block, stored, transfer.block_ids)

    # What the engine tells once a step.

    def plan_step(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Takes the step's loads, and plans what becomes storable after its forward pass."""
        preempted = scheduler_output.preempted_req_ids or ()
        for request_id in preempted:
            if state := self._requests.get(request_id):
                state.forget_progress()
        handed_over = compat.boundary_states(scheduler_output)
        tables = compat.block_tables(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in dict.fromkeys((*scheduled, *handed_over)):
            state = self._requests.get(request_id)
            if state is None or state.request.is_finished() or not state.is_storable:
                continue
            if request_id in preempted and request_id not in scheduled:
                # Its blocks are somebody else's by now.
                continue
            states = [State(group, block, tokens) for group, block, tokens in handed_over.get(request_id, ())]
            self._plan_stores(state, scheduled.get(request_id, 0), states, tables)
        for request_id in scheduled:
            self._admission.give_back(request_id)
        for request_id in scheduler_output.finished_req_ids or ():
            state = self._requests.get(request_id)
            if state is not None and not state.request.is_finished():
                continue  # a new request has taken the id
            self._requests.pop(request_id, None)
            if request_id not in self._loads:
                self._admission.give_back(request_id)
        plan, self._plan = self._plan, StepPlan()
        return plan

    def _plan_stores(
        self, state: _RequestState, num_scheduled: int, states: list[State], tables: compat.BlockTables
    ) -> None:
        spec, request = self._layout.spec, state.request
        hashes = self._prefix_hashes(state)
        # Content is final where the token is known: drafts that may be rejected, and tokens that an asynchronous
        # scheduler has not seen yet, are not.
        hashed = len(hashes) * self._layout.keys.hash_block_tokens
        final = min(request.num_computed_tokens + num_scheduled, request.num_tokens, hashed)
        states = [s for s in states if s.group_index in spec.stored_groups and s.num_tokens <= hashed]
        complete = (final // spec.chunk_tokens, max(0, final - spec.lookahead_tokens) // spec.chunk_tokens)
        if not states and complete == state.seen:
            return
        state.seen = complete
        keys: dict[tuple[int, int], bytes] = {}

        def wanted(group_index: int, end_token: int) -> bool:
            key = keys[group_index, end_token] = self._layout.key(group_index, hashes, end_token)
            stored = self._index.lookup(key)
            if stored is LookupResult.HIT:
                self._index.touch((key,))
            if stored is not LookupResult.MISS:
                self._recorder.store(spec.groups[group_index].kind, "present")
            return stored is LookupResult.MISS

        table = tables(request.request_id)
        plan = plan_store(spec, state.stored_tokens, final, table, states, wanted, NULL_BLOCK)
        # A drafter's chunk comes later than the others, which are then looked at again.
        state.stored_tokens = max(complete[1] * spec.chunk_tokens, state.stored_tokens)
        for _ in range(plan.unaligned_states):
            self._recorder.store("recurrent", "dropped_not_aligned")
        self._reserve(plan.transfers, keys)

    def _reserve(self, transfers: Sequence[Transfer], keys: Mapping[tuple[int, int], bytes]) -> None:
        job = _StoreJob([], [], 0, self._layout.world_size)
        moves = []
        for transfer in transfers:
            key = keys[transfer.group_index, transfer.end_token]
            kind = self._layout.spec.groups[transfer.group_index].kind
            num_bytes = self._layout.chunk_bytes(transfer.group_index, transfer.end_token)
            slot = self._index.reserve(key, num_bytes)
            if isinstance(slot, Refusal):
                self._recorder.store(kind, "present" if slot is Refusal.PRESENT else "dropped_no_room")
                continue
            moves.append(self._move(transfer, key, slot))
            job.keys.append((key, kind))
            job.num_bytes += num_bytes
            job.blocks += self._pin_blocks(transfer.block_ids)
        if moves:
            job_id = next(self._job_ids)
            self._stores[job_id] = job
            self._plan.stores.append(Store(job_id, tuple(moves)))

    # The engine's blocks that are being copied out.

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool whose blocks are pinned while they are read."""
        self._pool = pool

    def _pool_blocks(self) -> int:
        return self._pool.num_gpu_blocks - 1 if self._pool is not None else 0

    def _free_blocks(self) -> int:
        return self._pool.get_num_free_blocks() if self._pool is not None else 0

    def _pin_blocks(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        if self._pool is None:
            raise RuntimeError("the engine never bound its block pool")
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        return blocks

    def holds_freed_blocks(self) -> bool:
        """Whether a store that ends will give blocks back to the engine's pool."""
        return any(block.ref_cnt == 1 for job in self._stores.values() for block in job.blocks)

    def has_work_in_flight(self) -> bool:
        """Whether the engine must keep stepping although it has no request to run."""
        return bool(self._stores or self._loads)

    # What the workers report.

    def on_output(self, output: KVConnectorOutput) -> None:
        """Commits or aborts what ended; a failed load is remembered so that its retry asks for less."""
        outcome = output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            for job_id, ended in outcome.stores.items():
                self._on_store(job_id, ended.num_ranks, ended.failure)
            for request_id, failures in outcome.load_failures.items():
                if job := self._loads.get(request_id):
                    job.failures += failures
        for request_id in output.finished_recving or ():
            self._on_load(request_id, request_id in output.failed_recving)

    def _on_store(self, job_id: int, num_ranks: int, failure: str | None) -> None:
        job = self._stores[job_id]
        job.ranks_left -= num_ranks
        job.failure = job.failure or failure
        if job.ranks_left > 0:
            return
        del self._stores[job_id]
        if job.failure is not None:
            logger.warning("%d chunks were not stored: %s", len(job.keys), job.failure)
        # The end of a prefix is worth nothing without its beginning, so it is the first to be evicted.
        for key, kind in reversed(job.keys):
            is_stored = job.failure is None and self._index.commit(key)
            if job.failure is not None:
                self._index.abort(key)
            self._recorder.store(kind, "stored" if is_stored else "failed")
        if job.failure is None:
            self._recorder.stored_bytes(job.num_bytes * self._layout.world_size)
        if self._pool is not None:
            self._pool.free_blocks(reversed(job.blocks))

    def _on_load(self, request_id: str, failed: bool) -> None:
        job = self._loads.pop(request_id, None)
        if job is None:
            return
        if request_id not in self._requests:
            self._admission.give_back(request_id)
        for failure in job.failures:
            if failure.key is not None:
                self._index.invalidate(failure.key)
        for key in reversed(job.keys):
            self._index.unpin(key)
        self._recorder.load(job.num_tokens, job.num_bytes * self._layout.world_size, failed, job.failures)
        if failed and (state := self._requests.get(request_id)):
            self._admission.fail(request_id, state.request.num_tokens)
            state.failed_loads += 1
            state.boundary_limit = job.boundary
            state.forget_progress()
            reasons = "; ".join(sorted({f"{f.reason}: {f.detail}" for f in job.failures})) or "no reason given"
            logger.warning(
                "request %s: loading %d tokens failed; kv_load_failure_policy says what becomes of it (%s)",
                request_id,
                job.num_tokens,
                reasons,
            )

    # Ends.

    def reset(self) -> bool:
        """Drops everything stored. Copies in flight end by themselves and leave nothing behind.

        Requests that have begun store nothing more: their content may be of the weights that the reset was to forget.
        """
        self._index.clear()
        for state in self._requests.values():
            state.forget_progress()
            state.is_storable = state.request.num_computed_tokens == 0
        return True

    def close(self) -> None:
        """Gives back what is still pinned in the engine's pool."""
        for job in self._stores.values():
            if self._pool is not None:
                self._pool.free_blocks(reversed(job.blocks))
        self._stores.clear()
        self._requests.clear()
