"""Stops of the prompts of one connector, at which states are stored, and states of answers.

`hybridkv.planner.checkpoints` decides which boundaries are worth a stop, and `steering.py` makes the engine stop. The
engine hands the states over, as at the end of a prompt. States of answers are read from the block tables instead, where
the engine does not hand them over. In host memory the newest state of an answer replaces the one before it. Secondary
tiers get the last one, when the request has ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.prefill_stops import Steering
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK, Checkpointed, state_groups, state_step_tokens
from hybridkv.connectors.vllm.common.stats import Recorder
from hybridkv.planner import LookupResult, Loss, State
from hybridkv.planner.checkpoints import (
    NO_EXPERIENCE,
    AwaitedStates,
    Costs,
    Limits,
    Market,
    Placement,
    Prompt,
    SeenPrefixes,
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
"""States of answers that a request may still come back to, to be counted. Beyond that the oldest is forgotten."""


class Answers:
    """The states of answers of one connector.

    Args:
        layout: of the engine's groups; one of them is RECURRENT.
        stack: the tiers.
        costs: of a state.
        recorder: counts what happens.
    """

    def __init__(self, layout: CacheLayout, stack: TierStack, costs: Costs, recorder: Recorder) -> None:
        self._layout = layout
        self._stack = stack
        self._costs = costs
        self._recorder = recorder
        self._groups = state_groups(layout.spec)
        self._step_tokens = state_step_tokens(layout.spec)
        self._awaited = AwaitedStates(MAX_REMEMBERED)
        """States of answers, stored or not, to which no request has come yet."""

    def states(self, tracked: TrackedRequest, num_scheduled: int, tables: compat.BlockTables) -> list[State]:
        """States of an answer that this step leaves whole, or the one before it did. It is asked each step.

        Args:
            tracked: the request. It has keys.
            num_scheduled: tokens that the step computes.
            tables: to be read now.
        """
        request, step = tracked.request, self._step_tokens
        start = request.num_computed_tokens
        for end in (start + num_scheduled, start):
            if end % step or end < request.num_prompt_tokens or end <= tracked.checkpointed.newest_tokens:
                continue
            # What an asynchronous scheduler does not know yet has no key. It is known one step later.
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
        """A request begins to compute behind `num_tokens`: it has met the states of answers in its prompt, also
        where they are gone or were not stored."""
        if tracked.checkpointed.was_admitted or not len(self._awaited):  # it may come back to what it left itself
            return
        step, keys, group = self._step_tokens, tracked.keys(), self._groups[0]
        first, last = num_tokens // step, (tracked.request.num_prompt_tokens - 1) // step
        self._awaited.meet(keys.key(group, place * step) for place in range(max(1, first), last + 1))

    def admits(self, tracked: TrackedRequest, num_tokens: int, market: Market) -> bool:
        """Whether a state of an answer is stored: there is room that holds nothing, or it is worth what it displaces,
        by how many of such states requests have come back to."""
        checkpointed = tracked.checkpointed
        if num_tokens > checkpointed.awaited_tokens:
            checkpointed.awaited_tokens = num_tokens
            self._awaited.note(self._keys(tracked, num_tokens)[0])
        end_tokens = (tracked.request.num_prompt_tokens - 1) // self._step_tokens * self._step_tokens
        gained_tokens = num_tokens - end_tokens
        return market.has_room(self._costs) or not self._awaited.is_unproven(gained_tokens, market, self._costs)

    def on_planned(self, tracked: TrackedRequest, states: Sequence[State]) -> None:
        """States of a request were planned to be stored, of which some may have been refused."""
        before, newest = tracked.checkpointed.newest_tokens, max(state.num_tokens for state in states)
        if newest <= before or not self._is_stored(tracked, newest):
            return
        tracked.checkpointed.newest_tokens = newest
        if before > tracked.request.num_prompt_tokens:
            tracked.path.drop([(group, before) for group in self._groups])
            for key in self._keys(tracked, before):
                self._stack.withdraw(key)
            self._recorder.superseded()

    def _is_stored(self, tracked: TrackedRequest, num_tokens: int) -> bool:
        """Whether all groups' states are there, or on their way."""
        if num_tokens % self._step_tokens:
            return False
        return all(self._stack.lookup_near(key) is not LookupResult.MISS for key in self._keys(tracked, num_tokens))

    def _keys(self, tracked: TrackedRequest, num_tokens: int) -> tuple[bytes, ...]:
        keys = tracked.keys()
        return tuple(keys.key(group, num_tokens) for group in self._groups)

    def forget(self) -> None:
        """Nothing that was stored is there any more."""
        self._awaited.forget()


MAX_SEEN = 1 << 16
"""Prefixes of requests that are remembered, to learn where others part from them."""
EXTRA_SHARE = 0.02
"""What stops may cost, as a share of what the engine computes of prompts."""
STEP_S = 0.005
"""What one more step costs an engine beside the tokens that it computes."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What an operator says of checkpoints, and what follows from other settings.

    Args:
        max_stops: more steps that one request may take.
        has_answers: states of answers are stored too.
        step_tokens: what one more step costs, in tokens that are computed.
        cut_tokens: the engine's own last stop in a prompt is at its last multiple of this.
        has_drafts: it may be one before that.
    """

    max_stops: int
    has_answers: bool
    step_tokens: int
    cut_tokens: int
    has_drafts: bool


def has_states(layout: CacheLayout) -> bool:
    """Whether there is anything to place."""
    return bool(state_groups(layout.spec))


class Checkpoints:
    """Places the states of prompts.

    Args:
        layout: of the engine's groups; one of them is RECURRENT.
        stack: the tiers.
        kept_in: names of the slower tiers that are given what host memory is given.
        options: of the operator.
        steering: has the engine stop.
        is_alone: nobody else uses `steering`.
        recorder: counts what happens.
    """

    def __init__(
        self,
        layout: CacheLayout,
        stack: TierStack,
        kept_in: Sequence[str],
        options: CheckpointOptions,
        steering: Steering,
        recorder: Recorder,
        *,
        is_alone: bool,
    ) -> None:
        self._layout = layout
        self._stack = stack
        self._steering = steering
        self._is_alone = is_alone
        self._recorder = recorder
        self._options = options
        self._limits = Limits(options.max_stops, EXTRA_SHARE)
        self._states = state_groups(layout.spec)
        self._step_tokens = state_step_tokens(layout.spec)
        self._largest: TierIndex = max(
            (stack.only_near, *(stack.slower[name] for name in kept_in)), key=lambda tier: tier.capacity_bytes
        )
        self._costs = _costs(layout, self._largest, self._states, options.step_tokens)
        self._experience = NO_EXPERIENCE
        self._seen = SeenPrefixes(MAX_SEEN)
        self._num_forgotten = 0
        self._num_bytes = 0
        self._answers = Answers(layout, stack, self._costs, recorder) if options.has_answers else None

    def begin(self, request: Request) -> None:
        """The engine asks what can be loaded for a request."""
        if self._is_alone:
            self._steering.begin(request)

    def place(self, tracked: TrackedRequest, offered_tokens: int, loss: Loss | None) -> None:
        """The engine is told what can be loaded: the stops of what remains to be computed.

        Args:
            tracked: the request. It has keys.
            offered_tokens: what it is told.
            loss: what the groups hold, None where nobody looked.
        """
        request, start = tracked.request, tracked.computed_tokens + offered_tokens
        if tracked.is_storable and tracked.hints.store:
            junction = self._junction(tracked, loss)

            def plan(begins_at: int) -> Placement:
                # Another connector may load more than is here. What one loads that has less is not computed anew for
                # states that are here.
                asked = Prompt(
                    request.num_prompt_tokens,
                    max(start, begins_at),
                    junction,
                    starts_over=tracked.checkpointed.was_admitted,
                    keeps_end=self._keeps_end(request.num_prompt_tokens),
                )
                if tracked.checkpointed.asked != asked:
                    # Otherwise nothing has changed since the engine asked last and had no room.
                    tracked.checkpointed = self._planned(tracked, asked)
                return tracked.checkpointed.placement

            self._steering.wish(request, plan, start if offered_tokens else 0)
        if self._is_alone:
            self._steering.settle(request, start, is_loaded=offered_tokens > 0)

    def _keeps_end(self, num_prompt_tokens: int) -> bool:
        """Whether the engine itself leaves a state where a prompt that comes again resumes."""
        step, cut = self._step_tokens, self._options.cut_tokens
        if step == cut or self._layout.spec.tail_tokens is not None:
            return True
        last = num_prompt_tokens - 1
        return not self._options.has_drafts and last // cut * cut == last // step * step

    def _planned(self, tracked: TrackedRequest, asked: Prompt) -> Checkpointed:
        market, step = self._market(), self._step_tokens
        prompt = self._seen.look(step, self._prefixes(tracked), asked, market)
        placement = plan_stops(step, prompt, market, self._costs, self._limits)
        return Checkpointed(asked, prompt, placement, was_admitted=tracked.checkpointed.was_admitted)

    def _prefixes(self, tracked: TrackedRequest) -> Sequence[bytes]:
        """What stands for each prefix of a prompt at whose end a state can be."""
        spec, step, keys = self._layout.spec, self._step_tokens, tracked.keys()
        last = (tracked.request.num_prompt_tokens - 1) // step
        # The key of a drafter's group names tokens behind the prefix, which may not be there yet.
        group = min(spec.stored_groups, key=lambda each: (spec.groups[each].lookahead_tokens, each != spec.first_full))
        if not last:
            return ()
        if step == spec.chunk_tokens:
            return tuple(keys.between(group, 0, last))
        return tuple(keys.key(group, end) for end in range(step, last * step + 1, step))

    def _junction(self, tracked: TrackedRequest, loss: Loss | None) -> int:
        """The deepest boundary that the FULL groups hold, if there is no state; 0 where nothing is missing."""
        if loss is None or tracked.checkpointed.was_admitted:
            # What is stored ends where it was preempted itself, or where something was withdrawn after a failed load,
            # and nobody parts there. Where it parted when it was admitted first is remembered.
            return 0
        junction = loss.full_tokens // self._step_tokens * self._step_tokens
        if junction <= loss.resumed_tokens:
            return 0
        keys = tracked.keys()
        found = (self._stack.lookup(keys.key(group, junction)) for group in self._states)
        return junction if LookupResult.MISS in found else 0

    def _market(self) -> Market:
        num_ranks = self._layout.world_size
        return Market(self._largest.capacity_bytes * num_ranks, self._largest.used_bytes * num_ranks, self._experience)

    def on_admitted(self, tracked: TrackedRequest, num_external_tokens: int) -> None:
        """The engine has given the request blocks: what was planned for it is what will be."""
        checkpointed = tracked.checkpointed
        if self._answers is not None:
            self._answers.on_resumed(tracked, tracked.computed_tokens + num_external_tokens)
        if checkpointed.prompt is None:
            return
        prompt, placement = checkpointed.prompt, checkpointed.placement
        self._seen.note(self._step_tokens, self._prefixes(tracked), prompt, placement, self._market())
        self._experience = learn_request(self._experience, prompt, placement)
        self._recorder.prefixes_forgotten(self._seen.num_forgotten - self._num_forgotten)
        self._num_forgotten = self._seen.num_forgotten
        self._recorder.placed(checkpointed.placement)
        checkpointed.was_admitted = True

    def states(
        self, tracked: TrackedRequest, num_scheduled: int, tables: compat.BlockTables, handed_over: Sequence[State]
    ) -> list[State]:
        """The states that a step leaves of a request: those that the engine hands over, and those of an answer."""
        states = [state for state in handed_over if not self._is_loaded(tracked, state)]
        more = self._answers.states(tracked, num_scheduled, tables) if self._answers is not None else ()
        if more and self._answers and self._answers.admits(tracked, more[0].num_tokens, self._market()):
            seen = {(state.group_index, state.num_tokens) for state in states}
            states += (state for state in more if (state.group_index, state.num_tokens) not in seen)
        return states

    def _is_loaded(self, tracked: TrackedRequest, state: State) -> bool:
        """Whether the engine hands over the state that was loaded, and the only tier still holds it.

        The load has made it recent. To do so again would let the prompt's own, deeper state go first.
        """
        asked = tracked.checkpointed.asked
        if self._stack.slower or asked is None or state.num_tokens != asked.resumed_tokens:
            return False
        return self._stack.in_near(tracked.keys().key(state.group_index, state.num_tokens))

    def idle_below_tokens(self, computed_tokens: int) -> int:
        """Of a request that has so many now, there is no state of an answer before this many, but for what the engine
        hands over; 0 where there may be one at each step."""
        if self._answers is None:
            return sys.maxsize
        step = self._step_tokens
        return (computed_tokens // step + 1) * step if computed_tokens % step else 0

    def on_planned(self, tracked: TrackedRequest, states: Sequence[State]) -> None:
        """What of them can be stored is on its way."""
        if self._answers is not None and states:
            self._answers.on_planned(tracked, states)

    def on_stored(self, num_bytes: int) -> None:
        """Stores of so many bytes were planned on each rank, ever."""
        if num_bytes > self._num_bytes:
            more = (num_bytes - self._num_bytes) * self._layout.world_size
            self._num_bytes, self._experience = num_bytes, learn_stored(self._experience, more)

    def forget(self) -> None:
        """Nothing that was stored is there any more."""
        if self._answers is not None:
            self._answers.forget()

    def advance(self, scheduler_output: SchedulerOutput) -> None:
        """A step is planned."""
        if self._is_alone:
            self._steering.advance(scheduler_output)


def _costs(layout: CacheLayout, tier: TierIndex, states: Sequence[int], step_tokens: int) -> Costs:
    spec = layout.spec
    # Behind the first chunks, so that whatever a window needs of one is there.
    end_token = 1024 * spec.chunk_tokens
    state_bytes = sum(tier.cost(layout.chunk_bytes(index, end_token)) for index in states)
    others = [index for index in spec.stored_groups if index not in states]
    chunk_bytes = sum(tier.cost(layout.chunk_bytes(index, end_token)) for index in others)
    return Costs(state_bytes * layout.world_size, -(-chunk_bytes * layout.world_size // spec.chunk_tokens), step_tokens)
