"""Further policies that choose stops in a simulation: `Junctions`, `Ladder` and `Hindsight`."""

from __future__ import annotations

from collections.abc import Sequence

from optimal_placement import optimal_stops

from hybridkv.cli.simulation.policies import PromptEnds
from hybridkv.cli.simulation.store import CostModel, RequestFacts
from hybridkv.cli.simulation.traces import Trace

MAX_FUTURES = 64
"""Maximum number of later requests that `Hindsight` uses for one prompt."""
MAX_HINDSIGHT_STOPS = 32


class Junctions(PromptEnds):
    """Also stores a state at the end of the stored attention, if it has no state."""

    def stops(self, facts: RequestFacts) -> Sequence[int]:
        return (facts.held,)


class Ladder(PromptEnds):
    """Also stores a state every `chunks` chunks."""

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    def stops(self, facts: RequestFacts) -> Sequence[int]:
        return sorted({facts.held, *range(self._chunks, facts.end, self._chunks)})


class Hindsight:
    """Places states for the later requests that branch from a prompt, by dynamic programming over the whole trace.

    A later request counts for a prompt if it comes before the whole store would have been replaced, and if the prompt,
    or another request that counts, is the last earlier request that contains its whole shared prefix.

    Args:
        trace: the whole trace.
        capacity_chunks: size of the store.
        costs: the cost model.
        price_chunks: minimum saving for which a state is placed, in chunks.
        with_all_ends: True: stores the states at all ends of prompts, as the other policies do. False: only used ones.
    """

    def __init__(
        self, trace: Trace, capacity_chunks: int, costs: CostModel, price_chunks: float, with_all_ends: bool
    ) -> None:
        self._futures, self._stored_before = _futures(trace, costs)
        self._horizon = capacity_chunks
        self._price = price_chunks
        self._with_all_ends = with_all_ends

    def stops(self, facts: RequestFacts) -> Sequence[int]:
        counts: dict[int, float] = {}
        for depth in self._branch_depths(facts.number):
            if facts.resumed < depth < facts.end:
                counts[depth] = counts.get(depth, 0.0) + 1.0
        return optimal_stops(sorted(counts.items()), facts.resumed, MAX_HINDSIGHT_STOPS, self._price)

    def keeps_end(self, facts: RequestFacts) -> bool:
        return self._with_all_ends or any(depth >= facts.end for depth in self._branch_depths(facts.number))

    def keeps_answer(self, facts: RequestFacts) -> bool:
        return False

    def _branch_depths(self, number: int) -> list[int]:
        """For each later request that counts: the number of chunks that it shares with this prompt."""
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
    """For each request: the later requests for which it is the last earlier request with their whole shared prefix, and
    the length of this prefix in chunks. Also the chunks stored before each request in an unlimited store."""
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
