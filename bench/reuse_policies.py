"""Who chooses stops in the simulation: nobody, the store's junctions, a ladder, the planner, and hindsight."""

from __future__ import annotations

from collections.abc import Sequence

from optimal_placement import optimal_stops
from reuse_files import Trace
from reuse_simulation import CostModel, Moment

from hybridkv.planner import (
    AwaitedStates,
    Costs,
    Experience,
    Limits,
    Market,
    Prompt,
    SeenPrefixes,
    learn_request,
    learn_stored,
    plan_stops,
)
from hybridkv.planner.checkpoints import experience

MAX_FUTURES = 64
"""Later requests that hindsight looks at for one prompt."""
MAX_HINDSIGHT_STOPS = 32
MAX_REMEMBERED = 4096
"""States of answers of which the planner's policy knows: as many as the connector."""


class PromptEnds:
    """What the engine hands over by itself."""

    def stops(self, moment: Moment) -> Sequence[int]:
        return ()

    def keeps_end(self, moment: Moment) -> bool:
        return True

    def keeps_answer(self, moment: Moment) -> bool:
        return False


class Junctions(PromptEnds):
    """And a state where the store holds all attention and no state."""

    def stops(self, moment: Moment) -> Sequence[int]:
        return (moment.held,)


class Ladder(PromptEnds):
    """And one every so many chunks."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    def stops(self, moment: Moment) -> Sequence[int]:
        return sorted({moment.held, *range(self._chunks, moment.end, self._chunks)})


class Budgeted(PromptEnds):
    """The planner's: all that it is told is what a connector knows.

    Args:
        has_answers: states of answers are stored, where the trace has answers.
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
        self._costs = Costs(costs.state_chunks * self._chunk, 1, costs.step_tokens)
        self._limits = Limits()
        self._seen = SeenPrefixes(max_seen_chunks)
        self._experience = Experience(partings=(experience.DOUBTED_PARTINGS,) * len(experience.RUNGS))
        self._stored = 0
        self._has_answers = has_answers
        self._awaited = AwaitedStates(MAX_REMEMBERED)

    def _market(self) -> Market:
        return Market(self._capacity, min(self._capacity, self._stored), self._experience)

    def stops(self, moment: Moment) -> Sequence[int]:
        chunk, keys = self._chunk, moment.request.chunks
        self._experience = learn_stored(self._experience, moment.stored_tokens - self._stored)
        self._stored = moment.stored_tokens
        market = self._market()
        prompt = Prompt(moment.request.num_tokens, moment.resumed * chunk, moment.held * chunk)
        prompt = self._seen.look(chunk, keys, prompt, market)
        placement = plan_stops(chunk, prompt, market, self._costs, self._limits)
        self._experience = learn_request(self._experience, prompt, placement)
        self._seen.note(chunk, keys, prompt, placement, market)
        self._awaited.meet(keys[place - 1] for place in range(max(1, moment.resumed), moment.end + 1))
        return [stop.num_tokens // chunk for stop in placement.stops]

    def _is_unproven(self, moment: Moment) -> bool:
        gained = (len(moment.request.answered) - moment.end) * self._chunk
        return self._awaited.is_unproven(gained, self._market(), self._costs)

    def keeps_answer(self, moment: Moment) -> bool:
        if not self._has_answers:
            return False
        self._awaited.note(moment.request.answered[-1])
        return self._market().has_room(self._costs) or not self._is_unproven(moment)


class Hindsight:
    """Knows which later requests part from a prompt, and places states for those by dynamic programming.

    A later request counts for a prompt if it comes before the store would have been stored anew, and if the prompt is
    the last before it on the path to where it parts, or the last before one that counts.

    Args:
        price_chunks: what a state must save to be placed.
        with_all_ends: the states of all prompts' ends are kept, as by everybody else; or those alone that are of use.
    """

    def __init__(
        self, trace: Trace, capacity_chunks: int, costs: CostModel, price_chunks: float, with_all_ends: bool
    ) -> None:
        self._futures, self._stored_before = _futures(trace, costs)
        self._horizon = capacity_chunks
        self._price = price_chunks
        self._with_all_ends = with_all_ends

    def stops(self, moment: Moment) -> Sequence[int]:
        counts: dict[int, float] = {}
        for depth in self._partings(moment.number):
            if moment.resumed < depth < moment.end:
                counts[depth] = counts.get(depth, 0.0) + 1.0
        return optimal_stops(sorted(counts.items()), moment.resumed, MAX_HINDSIGHT_STOPS, self._price)

    def keeps_end(self, moment: Moment) -> bool:
        return self._with_all_ends or any(depth >= moment.end for depth in self._partings(moment.number))

    def keeps_answer(self, moment: Moment) -> bool:
        return False

    def _partings(self, number: int) -> list[int]:
        """How deep later requests share this prompt."""
        found: list[int] = []
        waiting = [(number, 1 << 62)]
        until = self._stored_before[number] + self._horizon
        while waiting and len(found) < MAX_FUTURES:
            place, limit = waiting.pop()
            for later, depth in self._futures[place]:
                if self._stored_before[later] <= until:
                    found.append(min(depth, limit))
                    waiting.append((later, found[-1]))
        return found


def _futures(trace: Trace, costs: CostModel) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Of each request the later ones that part from it before from any other, and how deep; and what had been stored
    before it, were there no bound."""
    last: dict[int, int] = {}
    futures: list[list[tuple[int, int]]] = [[] for _ in trace.requests]
    stored, stored_before = 0, []
    for number, request in enumerate(trace.requests):
        stored_before.append(stored)
        end = (request.num_tokens - 1) // trace.chunk_tokens
        depth = 0
        while depth < end and request.chunks[depth] in last:
            depth += 1
        if depth:
            futures[last[request.chunks[depth - 1]]].append((number, depth))
        stored += sum(name not in last for name in request.chunks) + costs.state_chunks
        last.update(dict.fromkeys(request.chunks, number))
    return futures, stored_before
