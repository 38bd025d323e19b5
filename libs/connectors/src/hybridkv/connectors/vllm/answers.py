"""States of answers: read from the block tables, where the engine does not hand them over.

The next turn of a conversation begins with the last answer, so it should resume there and not inside the last prompt. A
table's entry p is the state after p + 1 blocks. It is whole once the step that ends there has run, and the step behind
it copies it before it writes; so it can be stored with either of the two. Where tokens are proposed before they are
computed running states move between blocks, and nothing here holds.

Of one path the newest state serves all that follows. Those of answers before it may leave the tiers first, the last
turn's where `hybridkv.planner.checkpoints` does not find that others come back to such; states at stops and at ends of
prompts are where others resume, and stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.checkpointed import state_groups, state_step_tokens
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.requests import NULL_BLOCK
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.planner import LookupResult, State
from hybridkv.planner.checkpoints import Costs, Market, OutgrownStates, keep
from hybridkv.planner.checkpoints.keeping import Supersession
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from hybridkv.connectors.vllm.requests import TrackedRequest

MAX_REMEMBERED: Final = 4096
"""Answers whose newest state is known, so that it can give way to the next turn's. Beyond that the oldest is forgotten:
its state then leaves the tiers like any other."""


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
        self._newest: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()
        """The keys of the newest state of an answer, by the first of them."""
        self._outgrown = OutgrownStates(MAX_REMEMBERED)
        self._awaited = OutgrownStates(MAX_REMEMBERED)
        """States of answers, stored or not, to which no request has come yet."""
        self._ends = OutgrownStates(MAX_REMEMBERED)
        """States of prompts' ends behind which a state of the answer is stored."""

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
        """A request begins to compute behind `num_tokens`: where that is the newest state of an answer, it is the next
        turn, whose states will take that one's place. What others outgrew is met here again."""
        prompt = tracked.checkpointed.prompt
        held_tokens = prompt.held_tokens(self._step_tokens) if prompt is not None else 0
        first_keys = {
            tokens: self._keys(tracked, tokens)[0]
            for tokens in {num_tokens, held_tokens}
            if tokens > 0 and tokens % self._step_tokens == 0
        }
        if not tracked.checkpointed.was_admitted:  # or it may come back to what it went on from itself
            self._outgrown.meet(first_keys.values())
            self._ends.meet(first_keys.values())
            self._meet_awaited(tracked, num_tokens)
        is_next_turn = first_keys.get(num_tokens) in self._newest
        tracked.checkpointed.outgrown_tokens = num_tokens if is_next_turn else 0

    def _meet_awaited(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """This prompt goes on from states of answers, also where they are gone or were not stored."""
        if not len(self._awaited):
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
        return market.has_room(self._costs) or not self._is_unproven(tracked, num_tokens, market)

    def _is_unproven(self, tracked: TrackedRequest, num_tokens: int, market: Market) -> bool:
        return self._awaited.is_unproven(num_tokens - self._end_tokens(tracked), market, self._costs)

    def _end_tokens(self, tracked: TrackedRequest) -> int:
        """Where the state of a prompt's end is."""
        return (tracked.request.num_prompt_tokens - 1) // self._step_tokens * self._step_tokens

    def on_planned(self, tracked: TrackedRequest, states: Sequence[State], market: Market) -> None:
        """States of a request were planned to be stored, of which some may have been refused.

        Args:
            tracked: the request.
            states: they.
            market: what is known of the store.
        """
        checkpointed = tracked.checkpointed
        newest = max(state.num_tokens for state in states)
        prompt_tokens = tracked.request.num_prompt_tokens
        kept = keep(prompt_tokens, newest, checkpointed.newest_tokens, checkpointed.outgrown_tokens)
        if kept is None or not self._is_stored(tracked, newest):
            return
        for num_tokens, why in kept.superseded:
            if why is not Supersession.TURN or self._gives_way(tracked, num_tokens, market):
                self._supersede(tracked, num_tokens, why)
        if kept.answer_tokens:
            keys = self._keys(tracked, kept.answer_tokens)
            self._remember(keys)
            if self._is_unproven(tracked, kept.answer_tokens, market):
                if not self._stack.slower:  # it would get no copy, though it has the room
                    self._stack.demote(keys)
            elif end_tokens := self._end_tokens(tracked):
                end_keys = self._keys(tracked, end_tokens)
                self._ends.note(end_keys[0])
                if not market.has_room(self._costs) and self._ends.gives_way(end_tokens, market, self._costs):
                    self._stack.demote(end_keys)
        checkpointed.outgrown_tokens, checkpointed.newest_tokens = 0, newest

    def _gives_way(self, tracked: TrackedRequest, num_tokens: int, market: Market) -> bool:
        """Whether the last turn's state goes first, now that this turn has outgrown it."""
        key = self._keys(tracked, num_tokens)[0]
        self._newest.pop(key, None)
        self._outgrown.note(key)
        return self._outgrown.gives_way(num_tokens, market, self._costs)

    def _is_stored(self, tracked: TrackedRequest, num_tokens: int) -> bool:
        """Whether all groups' states are there, or on their way."""
        if num_tokens % self._step_tokens:
            return False
        return all(self._stack.lookup_near(key) is not LookupResult.MISS for key in self._keys(tracked, num_tokens))

    def _keys(self, tracked: TrackedRequest, num_tokens: int) -> tuple[bytes, ...]:
        keys = tracked.keys()
        return tuple(keys.key(group, num_tokens) for group in self._groups)

    def _remember(self, keys: tuple[bytes, ...]) -> None:
        self._newest[keys[0]] = keys
        self._newest.move_to_end(keys[0])
        if len(self._newest) > MAX_REMEMBERED:
            self._newest.popitem(last=False)
            self._recorder.superseded("forgotten")

    def _supersede(self, tracked: TrackedRequest, num_tokens: int, reason: str) -> None:
        keys = self._keys(tracked, num_tokens)
        self._newest.pop(keys[0], None)
        # A path is made recent as a whole, and this is no part of it any more.
        tracked.path.drop([(group, num_tokens) for group in self._groups])
        self._stack.demote(keys)
        self._recorder.superseded(reason)

    def forget(self) -> None:
        """Nothing that was stored is there any more."""
        self._newest.clear()
        self._outgrown.forget()
        self._awaited.forget()
        self._ends.forget()
