"""Scheduler half of HybridMultiConnector: looks up each child, applies the planner's choice, and counts the results.

It decides nothing: `hybridkv.planner.choose` chooses the child. The gates of `hybridkv.planner.admission` decide when
there is room for the load, as for a single connector. A lookup that raises counts as an error, with one warning per
child, and gives no hit. Children that only store, and children that failed to load the request before, are not looked
up and not counted. They only plan the prefill stops of the request, because they may store it. So do children that have
no answer when the request stops waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hybridkv.connectors.errors import printable
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.layout import group_specs, no_stored_group
from hybridkv.connectors.vllm.common.prefill_stops import PrefillStops
from hybridkv.connectors.vllm.common.stats import GAUGE_RESEND_INTERVAL
from hybridkv.connectors.vllm.multi.children import Child
from hybridkv.connectors.vllm.multi.loads import ChildLoad, ChildLoads
from hybridkv.metrics import ChildSelection, SelectionStats, TokenClamp
from hybridkv.planner import (
    AUTO,
    UNKNOWN_RATE,
    UNKNOWN_RATES,
    Answer,
    CacheSpec,
    GroupKind,
    LoadAdmission,
    Rates,
    Room,
    RoomBounds,
    RoomWait,
    Take,
    Unusable,
    Verdict,
    Wait,
    choose,
    chunk_unit,
    gate_load,
    gate_lookup,
    observe,
    seconds_per_token,
)
from hybridkv.planner.admission import MAX_GATE_S, NOT_WAITED

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

MIN_PREFILL_TOKENS: Final = 32
"""Minimum prefill tokens of a step that counts as a sample. In smaller steps the overhead dominates."""
MAX_OPEN_STEPS: Final = 64
"""Maximum number of steps without a reported end. Older ones are dropped."""


class RateEstimator:
    """Estimates seconds per token, for the loads of each child and for prefill.

    Args:
        num_children: number of children.
        clock: monotonic seconds.
    """

    def __init__(self, num_children: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads = [UNKNOWN_RATE] * num_children
        self._prefill = UNKNOWN_RATE
        self._open_steps: dict[int, tuple[float, int]] = {}
        """Time of the plan, and number of tokens, by step. 0 tokens if the step is not a sample."""
        self._ended_at_s = 0.0

    def rates(self) -> Rates:
        """Current estimates."""
        now_s = self._clock()
        loads = tuple(seconds_per_token(rate, now_s) for rate in self._loads)
        return Rates(loads, seconds_per_token(self._prefill, now_s))

    def loaded(self, child: int, num_tokens: int, seconds: float) -> None:
        """Adds a sample of a child's load."""
        self._loads[child] = observe(self._loads[child], num_tokens, seconds, self._clock())

    def step_planned(self, step: int, scheduler_output: SchedulerOutput, has_sync_loads: bool) -> None:
        """Handles the plan of a step. The step is a sample if it has no synchronous loads, and if prefill tokens are at
        least half of its tokens, and at least `MIN_PREFILL_TOKENS`."""
        total = scheduler_output.total_num_scheduled_tokens
        prefill = _prefill_tokens(scheduler_output)
        is_sample = not has_sync_loads and prefill >= MIN_PREFILL_TOKENS and 2 * prefill >= total
        self._open_steps[step] = (self._clock(), total if is_sample else 0)
        while len(self._open_steps) > MAX_OPEN_STEPS:
            del self._open_steps[next(iter(self._open_steps))]

    def step_ended(self, step: int) -> None:
        """Handles the end of a step on all ranks. Later steps may be planned already."""
        now_s = self._clock()
        planned = self._open_steps.pop(step, None)
        if planned is not None and planned[1]:
            self._prefill = observe(self._prefill, planned[1], now_s - max(planned[0], self._ended_at_s), now_s)
        for older in [each for each in self._open_steps if each < step]:
            del self._open_steps[older]
        self._ended_at_s = now_s


def _prefill_tokens(scheduler_output: SchedulerOutput) -> int:
    scheduled = scheduler_output.num_scheduled_tokens
    tokens = sum(scheduled.get(new.req_id, 0) for new in scheduler_output.scheduled_new_reqs)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, num_outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if num_outputs == 0:
            tokens += scheduled.get(request_id, 0)
    return tokens


class LoadSizes:
    """Block sizes of the model's groups.

    Args:
        kv_cache_config: configuration of the engine's KV cache.
        num_ranks: number of ranks; each loads into its own memory.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, num_ranks: int) -> None:
        cacheable = compat.cacheable_group_ids(kv_cache_config)
        self._groups = [
            (index, group.kv_cache_spec.block_size, _block_bytes(group) * num_ranks)
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if index in cacheable
        ]

    def load_bytes(self, blocks: KVCacheBlocks, first_token: int, num_tokens: int) -> int:
        """Bytes, over all ranks, of the blocks that hold these tokens."""
        total = 0
        for index, block_tokens, block_bytes in self._groups:
            table = blocks.blocks[index][first_token // block_tokens : -(-(first_token + num_tokens) // block_tokens)]
            total += block_bytes * sum(not block.is_null for block in table)
        return total


def _block_bytes(group: Any) -> int:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer:
        return sum(compat.unpadded_page_bytes(spec) for spec in per_layer.values())
    return compat.unpadded_page_bytes(group.kv_cache_spec) * len(group.layer_names)


def load_admission(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> LoadAdmission:
    """Admission of the loads of all children.

    Raises:
        ConfigurationError: the model has no group that can be loaded, or a group of unknown kind: then the number of
            blocks that a request needs is unknown for every child.
    """
    groups = group_specs(kv_cache_config)
    if all(group.kind is GroupKind.SCRATCH for group in groups):
        raise no_stored_group()
    return LoadAdmission(CacheSpec(groups, chunk_unit(groups)), compat.max_in_flight_tokens(vllm_config))


def shared_prefill_stops(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> PrefillStops | None:
    """Prefill stops of all children. None for a model without recurrent states, which needs no stops."""
    has_states = any(group.kind is GroupKind.RECURRENT for group in group_specs(kv_cache_config))
    return PrefillStops(compat.max_chunk_tokens(vllm_config)) if has_states else None


logger = logging.getLogger("vllm.hybridkv.multi")

_BOUNDS: Final = RoomBounds(polls=None, seconds=MAX_GATE_S, loads_end=False)
"""Limits of the wait for room beside other loads; then the engine computes the request. `loads_end` is False, because
only the child can guarantee that a load ends."""


@dataclass(slots=True)
class _Candidate:
    """Request that a child may load."""

    computed_tokens: int = 0
    answers: list[Answer] | None = None
    """Results of the last lookup, until the request is admitted."""
    chosen: int | None = None
    waiting_since_s: float | None = None
    timed_out: bool = False
    """The last lookup waited for a child until the timeout."""
    failed_children: frozenset[int] = frozenset()
    """Children that failed to load this request."""
    room: RoomWait = NOT_WAITED
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Step data for the workers: step number, whether to report the end, and children with synchronous loads."""

    step: int
    is_measured: bool
    sync_children: frozenset[int]


class Selector:
    """Scheduler half: gets the planner's choice of a child for each request.

    Args:
        children: children in the order of the configuration.
        lookup_timeout_s: maximum wait for pending lookups, in seconds. A request waits while no child has answered
            (not even with a miss), or while a child with bounded lookups may still have the best hit.
        sizes: block sizes of the model.
        admission: admission of concurrent loads.
        clock: monotonic seconds.
        prefill_stops: prefill stops of all children; None for a model without recurrent states.
    """

    def __init__(
        self,
        children: Sequence[Child],
        lookup_timeout_s: float,
        sizes: LoadSizes,
        admission: LoadAdmission,
        clock: Callable[[], float],
        prefill_stops: PrefillStops | None = None,
    ) -> None:
        self._children = children
        self._weights = [child.config.weight for child in children]
        self._bounded = [position for position, child in enumerate(children) if child.has_bounded_lookups]
        self._timeout_s = lookup_timeout_s
        self._sizes = sizes
        self._clock = clock
        self._estimator = RateEstimator(len(children), clock) if AUTO in self._weights else None
        self._clamp = TokenClamp(logger.warning, clock)
        self._requests: dict[str, _Candidate] = {}
        self._admission = admission
        self._prefill_stops = prefill_stops
        self._pool: BlockPool | None = None
        self._loads = ChildLoads(len(children), admission)
        self._stats = SelectionStats()
        self._reported_pending: list[int] | None = None
        self._num_taken = 0
        self._warned: set[int] = set()
        self._step = 0

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the engine's block pool, in which loads must fit."""
        self._pool = pool

    # Lookups, before the engine admits a request.

    def matched_tokens(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the chosen child can load after `computed_tokens`, and whether the load is asynchronous.
        None: the engine looks up again in a later step."""
        if self._admission.take_deferral(request.request_id):
            return None, False
        if self._prefill_stops is not None:
            self._prefill_stops.begin(request)
        answered: set[int] = set()
        num_tokens, is_async = self._choose(request, computed_tokens, answered)
        if num_tokens is not None:
            self._plan_stops(request, computed_tokens, answered, num_tokens, is_loaded=is_async)
        return num_tokens, is_async

    def _plan_stops(
        self, request: Request, computed_tokens: int, answered: Container[int], num_tokens: int, *, is_loaded: bool
    ) -> None:
        """Plans the prefill stops of children without an answer to this lookup, since they may store. Sets the first
        stop of all children in the engine."""
        for position, child in enumerate(self._children):
            if position not in answered:
                try:
                    child.plan_without_lookup(request, computed_tokens)
                except Exception:  # a child's error must not end the engine
                    logger.exception(
                        "request %s: %s failed to plan its prefill stops", printable(request.request_id), child.name
                    )
        if self._prefill_stops is None:
            return
        try:
            self._prefill_stops.end(request, computed_tokens + num_tokens, is_loaded=is_loaded)
        except Exception:  # a child's error must not end the engine
            logger.exception(
                "request %s: no prefill stops, because a connector failed to plan them",
                printable(request.request_id),
            )
            self._prefill_stops.begin(request)

    def _choose(self, request: Request, computed_tokens: int, answered: set[int]) -> tuple[int | None, bool]:
        """See `matched_tokens`. Adds to `answered` the positions of the children that answer with a number: their
        lookups have planned their stops."""
        if compat.skips_prefix_cache(request):
            return 0, False
        request_id = request.request_id
        candidate = self._requests.get(request_id)
        if candidate is None:
            candidate = self._requests[request_id] = _Candidate()
        if (
            not self._admission.is_idle
            and (verdict := self._gate(gate_lookup, request, candidate)) is not Verdict.ADMIT
        ):
            return (None if verdict is Verdict.WAIT else 0), False
        candidate.computed_tokens = computed_tokens
        candidate.answers = answers = []
        in_background: list[bool] = []
        for position, child in enumerate(self._children):
            tokens: Answer = self._skip_reason(position, candidate)
            is_async = False
            if tokens is None:
                try:
                    tokens, is_async = child.connector.get_num_new_matched_tokens(request, computed_tokens)
                except Exception as error:  # a child's error must not end the engine
                    self._count_error(position, error)
                    tokens = Unusable.RAISED
            answers.append(tokens)
            in_background.append(is_async)
        answered.update(position for position, answer in enumerate(answers) if isinstance(answer, int))
        may_wait = self._may_wait(candidate)
        rates = self._estimator.rates() if self._estimator is not None else UNKNOWN_RATES
        most = max(0, request.num_tokens - 1 - computed_tokens)
        soon = dict.fromkeys(self._bounded, most)
        choice = choose(answers, self._weights, rates, may_wait=may_wait, soon=soon)
        candidate.timed_out = candidate.waiting_since_s is not None and not may_wait
        candidate.chosen = None
        if isinstance(choice, Take):
            is_async = in_background[choice.child]
            if is_async and not self._admission.is_idle and self._pool is not None:
                verdict = self._gate(gate_load, request, candidate)
                if verdict is not Verdict.ADMIT:
                    return (None if verdict is Verdict.WAIT else 0), False
            # The engine may have no room for the load. Then the next wait begins anew.
            candidate.room = candidate.room.ended()
            candidate.chosen = choice.child
            return choice.tokens, is_async
        if isinstance(choice, Wait):
            if candidate.waiting_since_s is None:
                candidate.waiting_since_s = self._clock()
            for position in choice.children:
                self._counts(position).deferrals += 1
            return None, False
        return 0, False

    def _skip_reason(self, position: int, candidate: _Candidate) -> Unusable | None:
        if self._children[position].stores_only:
            return Unusable.STORES_ONLY
        return Unusable.BARRED if position in candidate.failed_children else None

    def _may_wait(self, candidate: _Candidate) -> bool:
        """Whether the request may still wait. The time starts at its first deferred lookup."""
        waited_s = 0.0 if candidate.waiting_since_s is None else self._clock() - candidate.waiting_since_s
        return waited_s < self._timeout_s

    def _gate(
        self,
        gate: Callable[[Room, RoomWait, float, RoomBounds], tuple[Verdict, RoomWait]],
        request: Request,
        candidate: _Candidate,
    ) -> Verdict:
        """Verdict of the gate on a request beside the running loads."""
        pool_blocks, free_blocks = 0, 0
        if self._pool is not None:
            pool_blocks, free_blocks = self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks()
        room = self._admission.room(request.request_id, request.num_tokens, pool_blocks, free_blocks)
        verdict, candidate.room = gate(room, candidate.room, self._clock(), _BOUNDS)
        return verdict

    def _count_error(self, position: int, error: Exception) -> None:
        if position not in self._warned:
            self._warned.add(position)
            logger.warning(
                "%s raised %r in a lookup: this and later errors count as misses; "
                "vllm:kv_connector_mc_errors_total counts them",
                self._children[position].name,
                error,
                exc_info=error,
            )

    # Events of a request.

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Handles the allocation of blocks: the chosen child loads, and the others get 0 tokens to load."""
        candidate = self._requests.get(request.request_id)
        if candidate is None:
            candidate = self._requests[request.request_id] = _Candidate()
        self._settle(candidate, num_external_tokens)
        if num_external_tokens and candidate.chosen is not None:
            num_bytes = self._sizes.load_bytes(blocks, candidate.computed_tokens, num_external_tokens)
            load = ChildLoad(
                candidate.chosen, request.num_tokens, num_external_tokens, num_bytes, self._clock(), blocks
            )
            self._loads.begin(request.request_id, load)
        for position, child in enumerate(self._children):
            num_tokens = num_external_tokens if position == candidate.chosen else 0
            child.connector.update_state_after_alloc(request, blocks, num_tokens)

    def _settle(self, candidate: _Candidate, num_external_tokens: int) -> None:
        """Counts the results of the last lookup, which the engine has used. Ends the request's waits."""
        answers, candidate.answers = candidate.answers, None
        if answers is None:
            return
        for position, answer in enumerate(answers):
            if answer in (Unusable.BARRED, Unusable.STORES_ONLY):
                continue
            counts = self._counts(position)
            counts.queries += 1
            if position == candidate.chosen and num_external_tokens:
                counts.hits += 1
                counts.hit_tokens += num_external_tokens
            elif answer is Unusable.RAISED:
                counts.errors += 1
            elif answer is None:
                counts.unanswered += 1
                counts.timeouts += candidate.timed_out
            elif isinstance(answer, int) and answer > 0:
                counts.passed_over += 1
            else:
                counts.misses += 1
        candidate.waiting_since_s = None
        candidate.room = NOT_WAITED

    def chosen(self, request: Request) -> int | None:
        """Position of the child that the last lookup chose to load the request; None if it chose none."""
        candidate = self._requests.get(request.request_id)
        return candidate.chosen if candidate is not None else None

    def hit_sources(self, request: Request, num_tokens: int, unspecified: Any) -> dict[Any, int]:
        """External tokens by source, from the chosen child, without negative counts and with `num_tokens` in total."""
        position = self.chosen(request)
        said: dict[Any, int] = {}
        if position is not None:
            try:
                said = self._children[position].connector.get_external_cache_hit_sources(request, num_tokens)
            except Exception as error:  # affects only metrics
                self._count_error(position, error)
        sources: dict[Any, int] = {}
        left = num_tokens
        for source, tokens in said.items():
            if position is not None and tokens < 0:
                _, below_zero = self._clamp.clamp(f"{self._children[position].name} ({source!s})", tokens)
                self._counts(position).clamped_tokens += int(below_zero)
            elif taken := min(tokens, left):
                sources[source] = taken
                left -= taken
        if left:
            sources[unspecified] = sources.get(unspecified, 0) + left
        return sources

    def ended(self, request: Request) -> None:
        """Handles the end of the request. A running load is tracked to its end."""
        candidate = self._requests.get(request.request_id)
        if candidate is not None:
            candidate.is_ended = True
            self._forget_ended(request.request_id, candidate)

    def _forget_ended(self, request_id: str, candidate: _Candidate) -> None:
        if candidate.is_ended and not self._loads.is_loading(request_id):
            del self._requests[request_id]
            self._loads.forget(request_id)

    # Events of a step.

    def plan_step(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Handles the plan of a step."""
        self._step += 1
        if self._prefill_stops is not None:
            self._prefill_stops.advance(scheduler_output)
        sync_children = self._loads.scheduled(scheduler_output.num_scheduled_tokens, self._step)
        if self._estimator is not None:
            self._estimator.step_planned(self._step, scheduler_output, bool(sync_children))
        return StepMetadata(self._step, bool(sync_children) or self._estimator is not None, sync_children)

    def step_ended(self, step: int, sync_load_seconds: dict[int, float], output: KVConnectorOutput) -> None:
        """Handles the end of a step and of its synchronous loads on all ranks. Loads of one child share its seconds."""
        if self._estimator is not None:
            self._estimator.step_ended(step)
        ended = self._loads.ended_within(step, output)
        num_tokens = [0] * len(self._children)
        for _, load in ended:
            num_tokens[load.child] += load.num_tokens
        for request_id, load in ended:
            share = load.num_tokens / num_tokens[load.child]
            self._load_ended(request_id, load, sync_load_seconds.get(load.child, 0.0) * share)

    def loads_reported(self, output: KVConnectorOutput) -> dict[str, int]:
        """Handles the workers' reports of ended loads. Returns the position of the child, by request."""
        ended = {}
        for request_id, load in self._loads.reported(output):
            ended[request_id] = load.child
            self._load_ended(request_id, load, self._clock() - load.started_s)
        return ended

    def _load_ended(self, request_id: str, load: ChildLoad, seconds: float) -> None:
        candidate = self._requests[request_id]
        counts = self._counts(load.child)
        if load.has_failed:
            counts.failures += 1
            candidate.failed_children |= {load.child}
        else:
            counts.load_seconds += seconds
            counts.load_bytes += load.num_bytes
            if self._estimator is not None:
                self._estimator.loaded(load.child, load.num_tokens, seconds)
        self._forget_ended(request_id, candidate)

    # Counts.

    def _counts(self, position: int) -> ChildSelection:
        return self._stats.child(self._children[position].name)

    def take_stats(self) -> SelectionStats | None:
        """Returns and resets the counts; None if there are none.

        Pending loads are counted when they have changed, and again after every `GAUGE_RESEND_INTERVAL` calls.
        """
        self._num_taken += 1
        is_due = self._num_taken % GAUGE_RESEND_INTERVAL == 0
        if (pending_loads := self._loads.pending) != self._reported_pending or is_due:
            self._reported_pending = pending_loads
            for position, pending in enumerate(pending_loads):
                self._counts(position).pending_loads = pending
        stats = self._stats.take()
        return stats if stats.children else None
