"""Policies that choose prefill stops in a simulation: `PromptEnds` adds no stops, `PlannerStops` adds the stops of the
planner."""

from __future__ import annotations

from collections.abc import Sequence

from hybridkv.cli.simulation.store import CostModel, RequestFacts
from hybridkv.cli.simulation.traces import Trace
from hybridkv.planner import (
    AnswerReuse,
    Costs,
    Experience,
    Limits,
    Prompt,
    SeenPrefixes,
    StoreUsage,
    learn_request,
    learn_stored,
    plan_stops,
)
from hybridkv.planner.checkpoints import experience

MAX_REMEMBERED = 4096
"""Maximum number of answers' states in the table, as in a connector."""


class PromptEnds:
    """Stores the states that an engine hands over by default, at the ends of prompts."""

    def stops(self, facts: RequestFacts) -> Sequence[int]:
        return ()

    def keeps_end(self, facts: RequestFacts) -> bool:
        return True

    def keeps_answer(self, facts: RequestFacts) -> bool:
        return False


class PlannerStops(PromptEnds):
    """Stores the states that the planner chooses. The planner gets the same facts as in a connector.

    Args:
        trace: the trace.
        capacity_chunks: size of the store, in chunks of attention.
        costs: costs of the model.
        max_seen_chunks: limit of the prefixes in the planner's table.
        has_answers: states of answers can be stored, if the trace has answers.
    """

    def __init__(
        self,
        trace: Trace,
        capacity_chunks: int,
        costs: CostModel,
        max_seen_chunks: int,
        *,
        has_answers: bool = True,
    ) -> None:
        self._chunk = trace.chunk_tokens
        self._capacity = capacity_chunks * self._chunk
        self._costs = Costs(max(1, round(costs.state_chunks * self._chunk)), 1, costs.step_tokens)
        self._limits = Limits()
        self._seen = SeenPrefixes(max_seen_chunks)
        self._experience = Experience(divergences=(experience.PRIOR_DIVERGENCES,) * len(experience.DISTANCES))
        self._stored = 0
        self._has_answers = has_answers
        self._answer_reuse = AnswerReuse(MAX_REMEMBERED)

    def _store_usage(self) -> StoreUsage:
        return StoreUsage(self._capacity, min(self._capacity, self._stored), self._experience)

    def stops(self, facts: RequestFacts) -> Sequence[int]:
        chunk, keys = self._chunk, facts.request.chunks
        self._experience = learn_stored(self._experience, facts.stored_tokens - self._stored)
        self._stored = facts.stored_tokens
        usage = self._store_usage()
        prompt = Prompt(facts.request.num_tokens, facts.resumed * chunk, facts.held * chunk)
        prompt = self._seen.add_facts(chunk, keys, prompt, usage)
        placement = plan_stops(chunk, prompt, usage, self._costs, self._limits)
        self._experience = learn_request(self._experience, prompt, placement)
        self._seen.note(chunk, keys, prompt, placement, usage)
        self._answer_reuse.record_resumed(keys[place - 1] for place in range(max(1, facts.resumed), facts.end + 1))
        return [stop.num_tokens // chunk for stop in placement.stops]

    def _is_unproven(self, facts: RequestFacts) -> bool:
        gained = (len(facts.request.answered) - facts.end) * self._chunk
        return self._answer_reuse.is_unproven(gained, self._store_usage(), self._costs)

    def keeps_answer(self, facts: RequestFacts) -> bool:
        if not self._has_answers:
            return False
        self._answer_reuse.note(facts.request.answered[-1])
        return self._store_usage().has_room(self._costs) or not self._is_unproven(facts)
