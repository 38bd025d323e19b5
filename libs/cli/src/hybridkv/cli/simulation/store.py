"""Simulation of one trace with one store: requests one after the other, on the RAM tier's index, without bytes.

A request resumes at its last state before which all attention is held, computes the rest, and stores all attention
chunks and the states of its stops and of its end. A token of attention counts as one byte. If the store is full, the
least recently used content is evicted first, and the path of one request from its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hybridkv.cli.simulation.traces import Trace, TraceRequest
from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Refusal
from hybridkv.tiers.ram import RamIndex

GRANULES: Final = 8
"""If states are not whole chunks, their size is rounded up to a multiple of 1 / GRANULES of a chunk."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Sizes and costs of a model.

    Args:
        state_chunks: size of the states of one boundary, in chunks of attention.
        step_tokens: cost of one more step, in tokens of prefill.
    """

    state_chunks: float = 4
    step_tokens: int = 64


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts with which the stops of a request are chosen, in chunks.

    Args:
        number: index of the request in the trace.
        request: the request.
        held: last boundary before which all attention is held.
        resumed: last boundary up to `held` that has a state.
        end: last boundary of the prompt.
        stored_tokens: tokens that all earlier requests have stored.
    """

    number: int
    request: TraceRequest
    held: int
    resumed: int
    end: int
    stored_tokens: int


class StopPolicy(Protocol):
    """Chooses the boundaries at which states are stored.

    Each method is called at most once for each request, in order of the requests, so a policy can learn from the calls.
    """

    def stops(self, facts: RequestFacts) -> Sequence[int]:
        """Boundaries in chunks, above `resumed` and below `end`."""
        ...

    def keeps_end(self, facts: RequestFacts) -> bool:
        """True if the state at the end of the prompt is stored."""
        ...

    def keeps_answer(self, facts: RequestFacts) -> bool:
        """True if the last state of the answer is stored."""
        ...


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of one trace with one store. All sizes are in tokens; `hit_rate` and `extra_share` are from 0 to 1."""

    total_tokens: int
    hit_tokens: int
    stored_tokens: int
    num_stops: int
    extra_tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.total_tokens

    @property
    def extra_share(self) -> float:
        """Cost of all stops, as a share of the computed tokens."""
        return self.extra_tokens / (self.total_tokens - self.hit_tokens)

    @property
    def stored_per_saved_token(self) -> float:
        """Stored tokens for each restored token."""
        return self.stored_tokens / max(1, self.hit_tokens)


def simulate(trace: Trace, capacity_chunks: int, costs: CostModel, policy: StopPolicy | None) -> SimulationResult:
    """Simulates a trace with a store of `capacity_chunks` attention chunks. Without a policy, the model has no
    states."""
    chunk = trace.chunk_tokens
    state_bytes = max(1, round(chunk * costs.state_chunks))
    granule = chunk if float(costs.state_chunks).is_integer() else max(1, chunk // GRANULES)
    index = RamIndex(capacity_chunks * chunk, granule)
    total = hits = stored = num_stops = 0
    for number, request in enumerate(trace.requests):
        attention = [b"f%d" % name for name in request.chunks]
        states = [b"s%d" % name for name in request.chunks]
        end = (request.num_tokens - 1) // chunk
        held = index.leading(attention[:end])
        resumed = held if policy is None else _deepest_state(index, states, held)
        both = request.answered or request.chunks
        whole = [b"f%d" % name for name in both], [b"s%d" % name for name in both]
        kept: set[int] = set()
        if policy is not None:
            facts = RequestFacts(number, request, held, resumed, end, stored)
            stops = [stop for stop in policy.stops(facts) if resumed < stop < end]
            num_stops += len(stops)
            kept = {*stops, *([end] if end > resumed and policy.keeps_end(facts) else [])}
        path = _path(attention, states, kept | ({resumed} if policy is not None and resumed else set()))
        index.touch(reversed(path))
        stored += sum(_store(index, key, state_bytes if key[:1] == b"s" else chunk) for key in path)
        index.touch(reversed(path))
        if request.answered:
            if policy is not None and len(both) > end and policy.keeps_answer(facts):
                kept.add(len(both))
            path = _path(*whole, kept | ({resumed} if resumed else set()))
            stored += sum(_store(index, key, state_bytes if key[:1] == b"s" else chunk) for key in path)
            index.touch(reversed(path))
        total, hits = total + request.num_tokens, hits + resumed * chunk
    return SimulationResult(total, hits, stored, num_stops, num_stops * costs.step_tokens)


def _deepest_state(index: RamIndex, states: Sequence[bytes], held: int) -> int:
    last = index.last_held(states[:held])
    return 0 if last is None else last + 1


def _path(attention: Sequence[bytes], states: Sequence[bytes], with_state: set[int]) -> list[bytes]:
    """Keys of a path, in order. Each state comes after the chunk that ends at its boundary."""
    path = []
    for place, key in enumerate(attention, 1):
        path.append(key)
        if place in with_state:
            path.append(states[place - 1])
    return path


def _store(index: RamIndex, key: bytes, num_bytes: int) -> int:
    """Stores a key. Returns `num_bytes`; 0 if the key is held already or does not fit."""
    if index.lookup(key) is not LookupResult.MISS or isinstance(index.reserve(key, num_bytes), Refusal):
        return 0
    index.commit(key)
    return num_bytes


def unique_chunks(trace: Trace, costs: CostModel) -> int:
    """Size, in chunks, of an unlimited store after the trace without its answers: all attention, and a state at the end
    of each prompt."""
    ends = {
        request.chunks[(request.num_tokens - 1) // trace.chunk_tokens - 1]
        for request in trace.requests
        if request.num_tokens > trace.chunk_tokens
    }
    attention = len({name for request in trace.requests for name in request.chunks})
    return attention + round(costs.state_chunks * len(ends))
