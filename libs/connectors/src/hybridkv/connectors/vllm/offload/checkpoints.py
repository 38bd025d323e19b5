"""Recurrent states that one connector stores: states at prefill stops, and states of answers.

A prefill stop is a token position at which a prefill step ends, so that the state there can be stored.
`hybridkv.planner.checkpoints` decides which positions are worth a stop, and `prefill_stops.py` sets them in the engine.
The engine hands the states over, as it does at the end of a prompt. It does not hand over all states of answers; this
module finds the others in the block tables. In host memory, the newest state of an answer replaces the earlier state.
Secondary tiers get only the last state of an answer, after the request has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.prefill_stops import PrefillStops
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, CheckpointState, state_groups, state_step_tokens
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.planner import LookupResult, Loss, State
from hybridkv.planner.checkpoints import (
    NO_EXPERIENCE,
    AnswerReuse,
    Costs,
    Limits,
    Placement,
    Prompt,
    SeenPrefixes,
    StoreUsage,
    learn_request,
    learn_stored,
    plan_stops,
)
from hybridkv.tiers import TierIndex
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from hybridkv.connectors.vllm.common.requests import TrackedRequest

MAX_REMEMBERED: Final = 4096
"""Maximum number of remembered states of answers; the oldest is dropped. Remembered states show which share of such
states is reused."""


class AnswerStates:
    """States of answers of one connector.

    Args:
        layout: the engine's groups; one of them is RECURRENT.
        stack: the tiers.
        costs: cost of a state.
        metrics: metrics of the connector.
    """

    def __init__(self, layout: CacheLayout, stack: TierStack, costs: Costs, metrics: ConnectorMetrics) -> None:
        self._layout = layout
        self._stack = stack
        self._costs = costs
        self._metrics = metrics
        self._groups = state_groups(layout.spec)
        self._step_tokens = state_step_tokens(layout.spec)
        self._answer_reuse = AnswerReuse(MAX_REMEMBERED)
        """States of answers, stored or not, that no request has reused yet, and the share of reused states."""

    def states(self, tracked: TrackedRequest, num_scheduled: int, tables: compat.BlockTables) -> list[State]:
        """States of an answer at the boundary where this step or the previous step ends. Empty without such a boundary,
        without its keys or blocks, and if the newest stored states are there or later.

        Args:
            tracked: the request. It has keys.
            num_scheduled: tokens that the step computes.
            tables: block tables of the running requests, valid during this call.
        """
        request, step = tracked.request, self._step_tokens
        start = request.num_computed_tokens
        for end in (start + num_scheduled, start):
            if end % step or end < request.num_prompt_tokens or end <= tracked.checkpoint_state.newest_tokens:
                continue
            # With asynchronous scheduling the last tokens are not known yet, so they have no key until the next step.
            if end <= min(request.num_tokens, len(tracked.prefix_hashes()) * self._layout.hash_block_tokens):
                return self._states_at(request.request_id, end, tables)
        return []

    def _states_at(self, request_id: str, num_tokens: int, tables: compat.BlockTables) -> list[State]:
        table = tables(request_id)
        states = []
        for group in self._groups:
            slot = num_tokens // self._layout.spec.groups[group].block_tokens - 1
            block = table[group][slot] if slot < len(table[group]) else NULL_BLOCK
            if block == NULL_BLOCK:
                return []
            states.append(State(group, block, num_tokens))
        return states

    def on_resumed(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Called when a request is admitted; its computation begins at `num_tokens`. Counts the remembered states that
        the request reuses there, and those later in its prompt, which it could reuse if they were stored. Counts none
        for a request that must not load. The requests of a producer count, because consumers resume at its states."""
        if not tracked.hints.load or compat.skips_prefix_cache(tracked.request):
            return
        if tracked.checkpoint_state.was_admitted or not len(self._answer_reuse):
            # A request that was admitted before may have stored the remembered states itself.
            return
        step, keys, group = self._step_tokens, tracked.keys(), self._groups[0]
        first, last = num_tokens // step, (tracked.request.num_prompt_tokens - 1) // step
        self._answer_reuse.record_resumed(keys.key(group, place * step) for place in range(max(1, first), last + 1))

    def admits(self, tracked: TrackedRequest, num_tokens: int, usage: StoreUsage) -> bool:
        """Whether to store a state of an answer: there is free room, or the state is worth more than the chunks that it
        displaces. Its worth follows from the share of earlier states of answers that requests have reused. Remembers
        the state for this share."""
        checkpoint_state = tracked.checkpoint_state
        if num_tokens > checkpoint_state.awaited_tokens:
            checkpoint_state.awaited_tokens = num_tokens
            self._answer_reuse.note(self._keys(tracked, num_tokens)[0])
        end_tokens = (tracked.request.num_prompt_tokens - 1) // self._step_tokens * self._step_tokens
        gained_tokens = num_tokens - end_tokens
        return usage.has_room(self._costs) or not self._answer_reuse.is_unproven(gained_tokens, usage, self._costs)

    def on_planned(self, tracked: TrackedRequest, states: Sequence[State]) -> None:
        """Called after a store of these states was planned. If host memory refused none of the newest states, withdraws
        the answer's earlier states from host memory."""
        before, newest = tracked.checkpoint_state.newest_tokens, max(state.num_tokens for state in states)
        if newest <= before or not self._is_stored(tracked, newest):
            return
        tracked.checkpoint_state.newest_tokens = newest
        if before > tracked.request.num_prompt_tokens:
            tracked.chain.drop([(group, before) for group in self._groups])
            for key in self._keys(tracked, before):
                self._stack.invalidate_primary(key)
            self._metrics.superseded()

    def _is_stored(self, tracked: TrackedRequest, num_tokens: int) -> bool:
        """Whether the states of all groups are stored or being stored."""
        if num_tokens % self._step_tokens:
            return False
        return all(self._stack.primary.lookup(key) is not LookupResult.MISS for key in self._keys(tracked, num_tokens))

    def _keys(self, tracked: TrackedRequest, num_tokens: int) -> tuple[bytes, ...]:
        keys = tracked.keys()
        return tuple(keys.key(group, num_tokens) for group in self._groups)

    def forget(self) -> None:
        """Drops all remembered states, after the tiers were cleared. Keeps the share of reused states."""
        self._answer_reuse.forget()


MAX_SEEN = 1 << 16
"""Maximum number of remembered prefixes, which show where later requests diverge."""
EXTRA_SHARE = 0.02
"""Limit for the cost of stops, as a share of the recently computed tokens."""
STEP_S = 0.005
"""Cost of one more step of an engine in seconds, without the tokens that it computes."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of checkpoints, from the configuration and from other settings of the engine.

    Args:
        max_stops: limit for the stops of one request.
        has_answers: states of answers are stored too.
        step_tokens: cost of one more step, in computed tokens.
        cut_tokens: the engine itself stops the prefill of a prompt at the last multiple of this number.
        has_drafts: there is a drafter. It may move that stop back by `cut_tokens`.
    """

    max_stops: int
    has_answers: bool
    step_tokens: int
    cut_tokens: int
    has_drafts: bool


def has_states(layout: CacheLayout) -> bool:
    """Whether the model has recurrent groups."""
    return bool(state_groups(layout.spec))


class Checkpoints:
    """Prefill stops and states of one connector.

    Args:
        layout: the engine's groups; one of them is RECURRENT.
        stack: the tiers.
        copied_to: names of the secondary tiers to which all chunks are copied.
        options: options of checkpoints.
        prefill_stops: sets the stops in the engine.
        is_alone: whether no other connector uses `prefill_stops`.
        metrics: metrics of the connector.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        copied_to: Sequence[str],
        options: CheckpointOptions,
        prefill_stops: PrefillStops,
        metrics: ConnectorMetrics,
        *,
        is_alone: bool,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._prefill_stops = prefill_stops
        self._is_alone = is_alone
        self._metrics = metrics
        self._options = options
        self._limits = Limits(options.max_stops, EXTRA_SHARE)
        self._states = state_groups(layout.spec)
        """Indices of the recurrent groups."""
        self._step_tokens = state_step_tokens(layout.spec)
        """Distance between boundaries at which states can be stored. Not `options.step_tokens`, which is a cost."""
        self._largest: TierIndex = max(
            (stack.primary, *(stack.secondary[name] for name in copied_to)), key=lambda tier: tier.capacity_bytes
        )
        """Tier with the largest capacity."""
        self._costs = _costs(layout, self._largest, self._states, options.step_tokens)
        self._experience = NO_EXPERIENCE
        self._seen = SeenPrefixes(MAX_SEEN)
        self._num_forgotten = 0
        self._num_bytes = 0
        self._answers = AnswerStates(layout, stack, self._costs, metrics) if options.has_answers else None

    def begin(self, request: Request) -> None:
        """Called when the engine looks a request up. Drops its earlier stops, if no other connector sets stops."""
        if self._is_alone:
            self._prefill_stops.begin(request)

    def plan_stops(self, tracked: TrackedRequest, offered_tokens: int, loss: Loss | None) -> None:
        """Plans the stops within the tokens that remain to be computed.

        Args:
            tracked: the request. It has keys.
            offered_tokens: tokens that are offered to the engine.
            loss: tokens that the FULL groups hold beyond the offered tokens; None if they are not known.
        """
        request, start = tracked.request, tracked.computed_tokens + offered_tokens
        if tracked.is_storable and tracked.hints.store:
            junction = self._junction(tracked, loss)

            def plan(begins_at: int) -> Placement:
                # Another connector may load, so the computation begins at `begins_at`. If that is before `start`, the
                # stops still begin at `start`: the states up to there are stored already.
                bare_prompt = Prompt(
                    request.num_prompt_tokens,
                    max(start, begins_at),
                    junction,
                    starts_over=tracked.checkpoint_state.was_admitted,
                    engine_stops_at_end=self._engine_stops_at_end(request.num_prompt_tokens),
                )
                # The last plan stays if the engine looks up again because it had no room, and nothing has changed.
                if tracked.checkpoint_state.bare_prompt != bare_prompt:
                    tracked.checkpoint_state = self._planned(tracked, bare_prompt)
                return tracked.checkpoint_state.placement

            self._prefill_stops.add_stops(request, plan, start if offered_tokens else 0)
        if self._is_alone:
            self._prefill_stops.end(request, start, is_loaded=offered_tokens > 0)

    def _engine_stops_at_end(self, num_prompt_tokens: int) -> bool:
        """Whether the engine itself hands over the state from which the same prompt would resume."""
        step, cut = self._step_tokens, self._options.cut_tokens
        if step == cut or self._layout.spec.tail_tokens is not None:
            return True
        last = num_prompt_tokens - 1
        return not self._options.has_drafts and last // cut * cut == last // step * step

    def _planned(self, tracked: TrackedRequest, bare_prompt: Prompt) -> CheckpointState:
        usage, step = self._store_usage(), self._step_tokens
        prompt = self._seen.add_facts(step, self._prefixes(tracked), bare_prompt, usage)
        placement = plan_stops(step, prompt, usage, self._costs, self._limits)
        return CheckpointState(bare_prompt, prompt, placement, was_admitted=tracked.checkpoint_state.was_admitted)

    def _prefixes(self, tracked: TrackedRequest) -> Sequence[bytes]:
        """Keys of the prompt's prefixes, one for each boundary where a state can be stored."""
        spec, step, keys = self._layout.spec, self._step_tokens, tracked.keys()
        last = (tracked.request.num_prompt_tokens - 1) // step
        # The key of a drafter's group depends on tokens after the prefix, which may not exist yet.
        group = min(spec.stored_groups, key=lambda each: (spec.groups[each].lookahead_tokens, each != spec.first_full))
        if not last:
            return ()
        if step == spec.chunk_tokens:
            return tuple(keys.between(group, 0, last))
        return tuple(keys.key(group, end) for end in range(step, last * step + 1, step))

    def _junction(self, tracked: TrackedRequest, loss: Loss | None) -> int:
        """The last boundary that the FULL groups hold, if it is beyond the hit and a group's state is missing there;
        else 0. Also 0 without `loss`, and for a request that was admitted before."""
        if loss is None or tracked.checkpoint_state.was_admitted:
            # A request that was admitted before: its stored prefix ends where it was preempted, or where chunks were
            # withdrawn after a failed load. No request diverges there. `SeenPrefixes` has recorded the junction of its
            # first admission.
            return 0
        junction = loss.full_tokens // self._step_tokens * self._step_tokens
        if junction <= loss.resumed_tokens:
            return 0
        keys = tracked.keys()
        found = (self._stack.lookup(keys.key(group, junction)) for group in self._states)
        return junction if LookupResult.MISS in found else 0

    def _store_usage(self) -> StoreUsage:
        num_ranks = self._layout.world_size
        return StoreUsage(
            self._largest.capacity_bytes * num_ranks, self._largest.used_bytes * num_ranks, self._experience
        )

    def on_admitted(self, tracked: TrackedRequest, num_external_tokens: int) -> None:
        """Called when the engine has allocated the request's blocks: its stops are final. Records its prefixes and
        stops for the plans of later requests."""
        checkpoint_state = tracked.checkpoint_state
        if self._answers is not None:
            self._answers.on_resumed(tracked, tracked.computed_tokens + num_external_tokens)
        if checkpoint_state.prompt is None:
            return
        prompt, placement = checkpoint_state.prompt, checkpoint_state.placement
        self._seen.note(self._step_tokens, self._prefixes(tracked), prompt, placement, self._store_usage())
        self._experience = learn_request(self._experience, prompt, placement)
        self._metrics.prefixes_forgotten(self._seen.num_forgotten - self._num_forgotten)
        self._num_forgotten = self._seen.num_forgotten
        self._metrics.placed(checkpoint_state.placement)
        checkpoint_state.was_admitted = True

    def states(
        self, tracked: TrackedRequest, num_scheduled: int, tables: compat.BlockTables, handed_over: Sequence[State]
    ) -> list[State]:
        """States to store after a step: states that the engine hands over, without a state at which the request resumed
        (see `_is_loaded`), and states of an answer, if `AnswerStates` admits them."""
        states = [state for state in handed_over if not self._is_loaded(tracked, state)]
        more = self._answers.states(tracked, num_scheduled, tables) if self._answers is not None else ()
        if more and self._answers and self._answers.admits(tracked, more[0].num_tokens, self._store_usage()):
            seen = {(state.group_index, state.num_tokens) for state in states}
            states += (state for state in more if (state.group_index, state.num_tokens) not in seen)
        return states

    def _is_loaded(self, tracked: TrackedRequest, state: State) -> bool:
        """Whether the request resumed at this state, and host memory is the only tier and still has the state.

        Such a state is not stored again. A store would touch it, so that the prompt's own, deeper state would be
        evicted first.
        """
        bare_prompt = tracked.checkpoint_state.bare_prompt
        if self._stack.secondary or bare_prompt is None or state.num_tokens != bare_prompt.resumed_tokens:
            return False
        return self._stack.in_primary(tracked.keys().key(state.group_index, state.num_tokens))

    def idle_below_tokens(self, computed_tokens: int) -> int:
        """Next boundary after `computed_tokens`: before it, `states` finds no state of an answer. 0 if
        `computed_tokens` is a boundary, because the next step may find its state. `sys.maxsize` if such states are not
        stored. Ignores handed-over states."""
        if self._answers is None:
            return sys.maxsize
        step = self._step_tokens
        return (computed_tokens // step + 1) * step if computed_tokens % step else 0

    def on_planned(self, tracked: TrackedRequest, states: Sequence[State]) -> None:
        """Called after a store of these states was planned."""
        if self._answers is not None and states:
            self._answers.on_planned(tracked, states)

    def record_planned_bytes(self, num_bytes: int) -> None:
        """Updates the statistics that give states their price. `num_bytes`: bytes of all stores planned so far, on each
        rank."""
        if num_bytes > self._num_bytes:
            more = (num_bytes - self._num_bytes) * self._layout.world_size
            self._num_bytes, self._experience = num_bytes, learn_stored(self._experience, more)

    def forget(self) -> None:
        """Drops all remembered states, after the tiers were cleared."""
        if self._answers is not None:
            self._answers.forget()

    def advance(self, scheduler_output: SchedulerOutput) -> None:
        """Called when a step is planned. Sets the next stops in the engine, if no other connector sets stops."""
        if self._is_alone:
            self._prefill_stops.advance(scheduler_output)


def _costs(layout: CacheLayout, tier: TierIndex, states: Sequence[int], step_tokens: int) -> Costs:
    spec = layout.spec
    # Use the sizes at a boundary far from the beginning of a prompt, where a window group needs whole chunks.
    end_token = 1024 * spec.chunk_tokens
    state_bytes = sum(tier.cost(layout.chunk_bytes(index, end_token)) for index in states)
    others = [index for index in spec.stored_groups if index not in states]
    chunk_bytes = sum(tier.cost(layout.chunk_bytes(index, end_token)) for index in others)
    return Costs(state_bytes * layout.world_size, -(-chunk_bytes * layout.world_size // spec.chunk_tokens), step_tokens)
