"""Further policies that choose stops in a simulation: the store's junctions, a ladder, and hindsight."""

from __future__ import annotations

from collections.abc import Sequence

from optimal_placement import optimal_stops

from hybridkv.cli.simulation.policies import PromptEnds
from hybridkv.cli.simulation.store import CostModel, Moment
from hybridkv.cli.simulation.traces import Trace

MAX_FUTURES = 64
"""Later requests that hindsight looks at for one prompt."""
MAX_HINDSIGHT_STOPS = 32


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
