"""What a request can load, when, and what becomes of it: the planner's answers, carried out.

`hybridkv.planner.life` decides. Here the facts are gathered that it asks for, its errands run in the tiers, its answers
told and counted, and loads followed that are on their way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.chunk_copies import copy_bytes, copy_of
from hybridkv.connectors.vllm.explain import Admission, explain, log
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.lookups import TierLookup, Unasked
from hybridkv.connectors.vllm.messages import ChunkCopy, Load, LoadFailure
from hybridkv.connectors.vllm.requests import NULL_BLOCK, TrackedRequest
from hybridkv.connectors.vllm.stats import RAM, Recorder
from hybridkv.planner import (
    Hit,
    LoadAdmission,
    LookupResult,
    Miss,
    Pending,
    PlanError,
    Transfer,
    last_boundary,
    life,
    longest_hit,
    measure_loss,
    needed_parts,
    plan_load,
)
from hybridkv.planner.stages import (
    Ask,
    AskAgain,
    Bounds,
    Bring,
    Brought,
    Compute,
    Errand,
    Facts,
    Holding,
    HoldState,
    Offer,
    Release,
    Reply,
    Search,
    Searched,
    Stage,
)
from hybridkv.tiers import FailureReason, Refusal, Slot
from hybridkv.tiers.stack import HoldFailure, TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

logger = logging.getLogger("vllm.hybridkv.scheduler")

# CPython 3.11 takes longer to look a member up than for most else of a question.
_READY, _WAITING = HoldState.READY, HoldState.WAITING
_FAILED_HOLDS = {HoldFailure.TIMEOUT: HoldState.LATE, HoldFailure.LOST: HoldState.LOST}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a request waits, in seconds from its first wait.

    Args:
        lookup_s: for chunks that are being stored.
        load_s: for slower tiers.
        clock: what time it is.
        tokens_per_s: what the engine computes meanwhile.
    """

    lookup_s: float
    load_s: float
    clock: Callable[[], float]
    tokens_per_s: float = 10_000.0


@dataclass(slots=True)
class _LoadInFlight:
    keys: list[bytes]
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
        self._clock = deadlines.clock
        self._bounds = Bounds(deadlines.lookup_s, deadlines.load_s, tokens_per_s=deadlines.tokens_per_s)
        self._recorder = recorder
        self._has_slower, self._has_late = bool(stack.slower), stack.has_late
        self._pool: BlockPool | None = None
        self._loads: dict[str, _LoadInFlight] = {}

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The pool that loads take their blocks from."""
        self._pool = pool

    # What the engine asks before it admits a request.

    def matched_tokens(self, tracked: TrackedRequest, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded, or None to be asked again."""
        tracked.follow()
        tracked.computed_tokens = computed_tokens
        facts = self._facts(tracked)
        stage, step = life.resume(tracked.stage, facts, self._bounds)
        while True:
            if type(step) is Offer:
                tracked.stage, tracked.told = stage, step
                return step.num_tokens
            if type(step) is AskAgain:
                tracked.stage, tracked.told = stage, step
                return None
            if type(step) is Compute:
                tracked.stage, tracked.told = stage, step
                if facts.hold is not None or type(stage) is Holding:
                    self._stack.release(tracked.request_id)
                return 0
            stage, facts, step = self._run(tracked, stage, facts, step)

    def _facts(self, tracked: TrackedRequest) -> Facts:
        """What is so now."""
        num_tokens, hold = tracked.request.num_tokens, self._stack.hold(tracked.request.request_id)
        generation, held, room = 0, None, None
        if hold is None:
            generation = self._stack.generation
        elif hold.failure is not None:
            held = _FAILED_HOLDS[hold.failure]
        else:
            held = _WAITING if hold.waiting else _READY
        if not self._admission.is_idle:
            pool_blocks, free_blocks = 0, 0
            if self._pool is not None:
                pool_blocks, free_blocks = self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks()
            room = self._admission.room(tracked.request_id, num_tokens, pool_blocks, free_blocks)
        ask_s = self._stack.ask_s if self._has_late else 0.0
        return Facts(
            num_tokens, tracked.computed_tokens, generation, self._clock(), self._has_slower, held, room, ask_s
        )

    def _run(
        self, tracked: TrackedRequest, stage: Stage, facts: Facts, errand: Errand
    ) -> tuple[Stage, Facts, Reply | Errand]:
        """Does what must be done first, and tells of it."""
        match errand:
            case Search():
                answer = self._search(tracked, stage, errand, facts.now_s)
                settled = self._settled(tracked, errand) if self._has_late and type(answer) is Pending else None
                stage, step = life.searched(stage, facts, self._bounds, errand, answer, settled)
            case Ask(limit_tokens):
                self._ask(tracked, limit_tokens)
                facts = self._facts(tracked)
                stage, step = life.asked(stage, facts, self._bounds, errand)
            case Bring():
                outcome = self._bring(tracked, errand)
                stage, step = life.brought(stage, facts, self._bounds, errand, outcome)
            case Release(is_late):
                if is_late:
                    self._tell_late(tracked.request_id)
                self._stack.release(tracked.request_id)
                facts = self._facts(tracked)
                stage, step = life.resume(stage, facts, self._bounds)
        return stage, facts, step

    def _tell_late(self, request_id: str) -> None:
        self._recorder.wait_timeout("load")
        hold = self._stack.hold(request_id)
        why = "they had no time for it" if hold is None else f"{hold.source} did not answer in time"
        logger.warning("request %s goes without slower tiers: %s", request_id, why)

    # Where it can resume.

    def _search(self, tracked: TrackedRequest, stage: Stage, errand: Search, now_s: float) -> Hit | Pending | Miss:
        if errand.is_last:
            self._recorder.wait_timeout("lookup")
        answer = self._longest_hit(tracked, errand)
        if type(answer) is Pending and not (type(stage) is Searched and type(stage.answer) is Pending):
            asked_until_s = stage.past.asked_until_s
            self._recorder.pending(is_asked=asked_until_s is not None and now_s < asked_until_s)
        return answer

    def _longest_hit(self, tracked: TrackedRequest, errand: Search) -> Hit | Pending | Miss:
        near_only = errand.near_only
        tiers = self._stack if self._has_slower and not near_only else self._stack.only_near
        lookup = TierLookup(tracked.keys(), tiers, errand.is_last or near_only)
        return longest_hit(self._layout.spec, errand.limit_tokens, tracked.computed_tokens, lookup, lookup)

    def _settled(self, tracked: TrackedRequest, errand: Search) -> Hit | Pending | Miss:
        """What is found where nothing counts of which a tier was only asked."""
        lookup = TierLookup(tracked.keys(), Unasked(self._stack))
        return longest_hit(self._layout.spec, errand.limit_tokens, tracked.computed_tokens, lookup, lookup)

    def _ask(self, tracked: TrackedRequest, limit_tokens: int) -> None:
        """Every chunk beyond what the engine holds: the first of all groups, then the second of all groups, and so on.

        As much is asked as may be: where that ends, what was asked is a beginning at which all groups may resume. Of
        windows and states too, though a resume reads only their last ones: at which boundary is to be found out.
        """
        spec, keys = self._layout.spec, tracked.keys()
        first, stop = (
            tracked.computed_tokens // spec.chunk_tokens,
            last_boundary(spec, limit_tokens) // spec.chunk_tokens,
        )
        if first < stop:
            by_group = [keys.between(group, first, stop) for group in spec.stored_groups]
            self._stack.ask([key for chunk in zip(*by_group, strict=True) for key in chunk])

    def _bring(self, tracked: TrackedRequest, errand: Bring) -> Brought:
        keys = tracked.keys()
        needed = [keys.key(*part) for part in needed_parts(self._layout.spec, errand.boundary, tracked.computed_tokens)]
        if all(self._stack.in_near(key) for key in needed):
            return Brought.NEAR
        if not errand.has_time:
            return Brought.BUSY
        hold = self._stack.acquire(tracked.request_id, needed, errand.since_s)
        if isinstance(hold, Refusal):
            return Brought.NO_ROOM if hold in (Refusal.NO_ROOM, Refusal.TOO_LARGE) else Brought.BUSY
        return Brought.READY if hold.is_ready else Brought.HELD

    # Loads.

    def on_allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> Load | None:
        """The engine has given the request blocks; the load of its external tokens into them."""
        request_id = tracked.request_id
        # A request that goes on where it is was not looked up again, whatever is known of it.
        answer = None if tracked.told is None else life.answer_of(tracked.stage)
        if answer is not None and not isinstance(answer, Pending):
            self._explain(tracked, answer, num_external_tokens)
        boundary = tracked.computed_tokens + num_external_tokens if num_external_tokens else None
        tracked.stage, tracked.told = life.allocated(tracked.stage, boundary), None
        if boundary is None:
            self._stack.release(request_id)
            return None
        table = [[NULL_BLOCK if b.is_null else b.block_id for b in group] for group in blocks.blocks]
        in_flight = _LoadInFlight([], num_external_tokens, 0)
        try:
            transfers = plan_load(self._layout.spec, boundary, tracked.computed_tokens, table, NULL_BLOCK)
            load = Load(request_id, self._pin(tracked, transfers, in_flight))
        except PlanError as error:
            # The engine waits for this load, so it is told that it failed; nothing was written.
            self._stack.unpin_all(in_flight.keys)
            in_flight.keys.clear()
            logger.error("request %s cannot load %d tokens: %s", request_id, num_external_tokens, error)
            load = Load(request_id, (), str(error))
        self._stack.release(request_id)
        self._loads[request_id] = in_flight
        self._admission.take(request_id, tracked.request.num_tokens)
        return load

    def _explain(self, tracked: TrackedRequest, answer: Hit | Miss, num_external_tokens: int) -> None:
        """Counts and logs why the request loads so much and no more."""
        computed = tracked.computed_tokens
        lookup = TierLookup(tracked.keys(), self._stack.only_near if tracked.stage.past.near_only else self._stack)
        limit = max(life.limit_tokens(tracked.stage, tracked.request.num_tokens), computed)
        resumed = answer.num_tokens if isinstance(answer, Hit) else computed
        loss = measure_loss(
            self._layout.spec,
            limit,
            computed,
            resumed,
            lookup,
            lookup,
        )
        hold = self._stack.hold(tracked.request_id)
        source = RAM if hold is None else hold.source
        asked = None
        if self._stack.has_late and (self._stack.ask_s or tracked.stage.past.asked_until_s is not None):
            asked = tracked.stage.past.asked_until_s is not None
        admission = Admission(answer, limit, num_external_tokens, loss, source, asked)
        explanation = explain(self._layout.spec, tracked, admission)
        self._recorder.lookup(explanation)
        log(explanation)

    def _pin(
        self, tracked: TrackedRequest, transfers: Sequence[Transfer], in_flight: _LoadInFlight
    ) -> tuple[ChunkCopy, ...]:
        copies = []
        keys = tracked.keys()
        wanted = [keys.key(transfer.group_index, transfer.end_token) for transfer in transfers]
        slots = self._stack.pin_all(wanted)
        if slots is None:
            raise PlanError(self._what_is_missing(transfers, wanted))
        if self._stack.has_late:
            self._require_sizes(transfers, wanted, slots)
        in_flight.keys += wanted
        for transfer, key, slot in zip(transfers, wanted, slots, strict=True):
            copies.append(copy_of(self._layout.spec, transfer, key, slot))
            in_flight.num_bytes += copy_bytes(self._layout, copies[-1])
        return tuple(copies)

    def _require_sizes(self, transfers: Sequence[Transfer], keys: Sequence[bytes], slots: Sequence[Slot]) -> None:
        """Refuses, and withdraws everywhere, chunks of another length than theirs: a tier elsewhere was believed what
        it said of them, and the next request would meet them again.

        Raises:
            PlanError: there is one. None of the chunks is pinned any more.
        """
        size = self._layout.chunk_bytes
        bad = [
            (key, slot.num_bytes)
            for part, key, slot in zip(transfers, keys, slots, strict=True)
            if slot.num_bytes != size(part.group_index, part.end_token)
        ]
        if bad:
            self._stack.unpin_all(keys)
            for key, _ in bad:
                self._stack.invalidate(key, FailureReason.WRONG_KEY)
            raise PlanError(
                f"{len(bad)} of its chunks have another length, as {bad[0][0].hex()} with {bad[0][1]} bytes"
            )

    def _what_is_missing(self, transfers: Sequence[Transfer], keys: Sequence[bytes]) -> str:
        lookup = self._stack.lookup_near
        for part, key in zip(transfers, keys, strict=True):
            if lookup(key) is not LookupResult.HIT:
                return f"the chunk of group {part.group_index} that ends at {part.end_token} is not stored"
        return "the fast tier pins none of its chunks"

    def is_loading(self, request_id: str) -> bool:
        return request_id in self._loads

    def has_work(self) -> bool:
        return bool(self._loads)

    # What the workers report.

    def on_failures(self, request_id: str, failures: Iterable[LoadFailure]) -> None:
        """Why a load failed on some rank; that it ended comes by `on_ended`."""
        if in_flight := self._loads.get(request_id):
            in_flight.failures += failures

    def on_ended(self, request_id: str, tracked: TrackedRequest | None, failed: bool) -> None:
        """A load has ended on every rank. After a failure the request's retry asks for less."""
        in_flight = self._loads.pop(request_id, None)
        if in_flight is None:
            return
        if tracked is None:
            self._admission.give_back(request_id)
        culprits = {failure.key for failure in in_flight.failures if failure.key is not None}
        for key in culprits:
            self._stack.withdraw(key)
        self._stack.unpin_all(reversed(in_flight.keys))
        self._recorder.load(
            in_flight.num_tokens, in_flight.num_bytes * self._layout.world_size, failed, in_flight.failures
        )
        if tracked is not None:
            tracked.load_ended(failed=failed, is_explained=bool(culprits))
        if failed and tracked is not None:
            self._admission.fail(request_id, tracked.request.num_tokens)
            reasons = "; ".join(sorted({f"{f.reason}: {f.detail}" for f in in_flight.failures})) or "no reason given"
            logger.warning(
                "request %s: loading %d tokens failed; kv_load_failure_policy says what becomes of it (%s)",
                request_id,
                in_flight.num_tokens,
                reasons,
            )

    def on_gone(self, request_id: str) -> None:
        """The request has ended."""
        self._stack.release(request_id)
        if request_id not in self._loads:
            self._admission.give_back(request_id)
