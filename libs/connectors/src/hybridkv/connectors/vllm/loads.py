"""What a request can load, and when: the planner's answers, carried out.

`hybridkv.planner.life` decides. Here the facts are gathered that it asks for, its errands run in the tiers, its answers
told and counted. What becomes of a load that has begun is not seen here: see `loads_in_flight.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hybridkv.connectors.vllm.explain import Admission, Explanation, explain, log
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.loads_in_flight import LoadsInFlight
from hybridkv.connectors.vllm.lookups import TierLookup, Unasked
from hybridkv.connectors.vllm.messages import Load
from hybridkv.connectors.vllm.requests import TrackedRequest
from hybridkv.connectors.vllm.stats import RAM, Recorder
from hybridkv.planner import (
    Hit,
    LoadAdmission,
    Loss,
    Miss,
    Pending,
    last_boundary,
    life,
    longest_hit,
    measure_loss,
    needed_parts,
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
from hybridkv.tiers import Refusal
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


class LoadPlanner:
    """Answers what can be loaded.

    Args:
        layout: the model's groups.
        stack: the tiers.
        admission: which loads may hold blocks at the same time.
        deadlines: how long a request waits.
        recorder: counts what happens.
        in_flight: takes what begins to be loaded.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        admission: LoadAdmission,
        deadlines: Deadlines,
        recorder: Recorder,
        in_flight: LoadsInFlight,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._admission = admission
        self._clock = deadlines.clock
        self._bounds = Bounds(deadlines.lookup_s, deadlines.load_s, tokens_per_s=deadlines.tokens_per_s)
        self._recorder = recorder
        self._has_slower, self._has_late = bool(stack.slower), stack.has_late
        self._pool: BlockPool | None = None
        self._in_flight = in_flight

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
                self.ask(tracked, limit_tokens)
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

    def ask(self, tracked: TrackedRequest, limit_tokens: int) -> None:
        """Every chunk beyond what the engine holds: the first of all groups, then the second of all groups, and so on.

        As much is asked as may be: where that ends, what was asked is a beginning at which all groups may resume. Of
        windows and states too, though a resume reads only their last ones: at which boundary is to be found out.
        Of tails, whose keys are many, only those behind the last chunk: where the request was stored itself.
        """
        spec, keys = self._layout.spec, tracked.keys()
        last = last_boundary(spec, limit_tokens)
        first, stop = tracked.computed_tokens // spec.chunk_tokens, last // spec.chunk_tokens
        asked: list[bytes] = []
        if first < stop:
            by_group = [keys.between(group, first, stop) for group in spec.stored_groups]
            asked = [key for chunk in zip(*by_group, strict=True) for key in chunk]
        if stop * spec.chunk_tokens < last:
            behind = max(stop * spec.chunk_tokens, tracked.computed_tokens)
            ends = range(last, behind, -spec.boundary_tokens)
            asked += [keys.key(group, end) for end in ends for group in spec.stored_groups]
        if asked:
            self._stack.ask(asked)

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

    # What the engine makes of the answer.

    def on_allocated(self, tracked: TrackedRequest, blocks: KVCacheBlocks, num_external_tokens: int) -> Load | None:
        """The engine has given the request blocks; the load of its external tokens into them."""
        request_id = tracked.request_id
        # A request that goes on where it is was not looked up again, whatever is known of it.
        answer = None if tracked.told is None else life.answer_of(tracked.stage)
        explained = None
        if answer is not None and not isinstance(answer, Pending):
            explained = self._explain(tracked, answer, num_external_tokens)
        boundary = tracked.computed_tokens + num_external_tokens if num_external_tokens else None
        tracked.stage, tracked.told = life.allocated(tracked.stage, boundary), None
        load = None
        if boundary is not None:
            load = self._in_flight.begin(tracked, boundary, blocks)
            if explained is not None:
                local_tokens = self._in_flight.local_tokens(request_id)
                explained = msgspec.structs.replace(explained, local_tokens=local_tokens)
        self._stack.release(request_id)
        if explained is not None:
            self._recorder.lookup(explained)
            log(explained)
        return load

    def loss(self, tracked: TrackedRequest) -> Loss | None:
        """What the request's hit could have been, if it is known where it resumes. Measured once for each answer."""
        answer, computed = life.answer_of(tracked.stage), tracked.computed_tokens
        if answer is None or isinstance(answer, Pending):
            return None
        known = tracked.measured
        if known is not None and known[0] is answer and known[1] == computed:
            return known[2]
        lookup = TierLookup(tracked.keys(), self._stack.only_near if tracked.stage.past.near_only else self._stack)
        resumed = max(answer.num_tokens, computed) if isinstance(answer, Hit) else computed
        limit = self._limit(tracked)
        loss = measure_loss(self._layout.spec, limit, computed, resumed, lookup, lookup)
        tracked.measured = (answer, computed, loss)
        return loss

    def _limit(self, tracked: TrackedRequest) -> int:
        return max(life.limit_tokens(tracked.stage, tracked.request.num_tokens), tracked.computed_tokens)

    def _explain(self, tracked: TrackedRequest, answer: Hit | Miss, num_external_tokens: int) -> Explanation:
        """Why the request loads so much and no more."""
        loss = self.loss(tracked)
        assert loss is not None, "there is an answer"
        hold = self._stack.hold(tracked.request_id)
        source = RAM if hold is None else hold.source
        asked = None
        if self._stack.has_late and (self._stack.ask_s or tracked.stage.past.asked_until_s is not None):
            asked = tracked.stage.past.asked_until_s is not None
        admission = Admission(answer, self._limit(tracked), num_external_tokens, loss, source, asked)
        return explain(self._layout.spec, tracked, admission)

    def on_gone(self, request_id: str) -> None:
        """The request has ended."""
        self._stack.release(request_id)
        self._in_flight.on_gone(request_id)
