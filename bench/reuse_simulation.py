"""One trace through one store: requests one after the other, the repository's RAM index, no engine and no bytes.

A request resumes at its deepest state below which all attention is held, computes the rest, and stores all chunks of
attention and the states of its stops and of its end. A token of attention counts for one byte and a state for
`state_tokens`; what does not fit evicts what was used longest ago, of a request's path its end first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reuse_files import Request, Trace

from hybridkv.planner import LookupResult
from hybridkv.tiers.contract import Refusal
from hybridkv.tiers.ram import RamIndex


@dataclass(frozen=True, slots=True)
class CostModel:
    """Args:
    state_chunks: what the states of one boundary take up, in chunks of attention.
    step_tokens: what one more step costs, in tokens of prefill.
    """

    state_chunks: int = 4
    step_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known when a request's stops are chosen, in chunks.

    Args:
        number: the request's place in the trace.
        held: the deepest boundary of which all attention is held.
        resumed: the deepest of those with a state.
        end: the last boundary of the prompt, whose state is stored in any case.
        stored_tokens: that were stored ever before.
    """

    number: int
    request: Request
    held: int
    resumed: int
    end: int
    stored_tokens: int


class Policy(Protocol):
    """Chooses stops."""

    def stops(self, moment: Moment) -> Sequence[int]:
        """Boundaries in chunks, above `resumed` and below `end`."""
        ...

    def keeps_end(self, moment: Moment) -> bool:
        """Whether the state of the prompt's end is stored."""
        ...

    def keeps_answer(self, moment: Moment) -> bool:
        """Whether the newest state of the answer is stored."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one trace through one store. Tokens; `hit_rate` and `extra_share` are shares of 1."""

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
        return self.extra_tokens / (self.total_tokens - self.hit_tokens)

    @property
    def stored_per_saved_token(self) -> float:
        """In tokens of attention."""
        return self.stored_tokens / max(1, self.hit_tokens)


def simulate(trace: Trace, capacity_chunks: int, costs: CostModel, policy: Policy | None) -> Outcome:
    """A trace through a store of so many chunks; without a policy as if attention were all that a model has."""
    chunk = trace.chunk_tokens
    index = RamIndex(capacity_chunks * chunk, chunk)
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
            moment = Moment(number, request, held, resumed, end, stored)
            stops = [stop for stop in policy.stops(moment) if resumed < stop < end]
            num_stops += len(stops)
            kept = {*stops, *([end] if end > resumed and policy.keeps_end(moment) else [])}
        path = _path(attention, states, kept | ({resumed} if policy is not None and resumed else set()))
        index.touch(reversed(path))
        stored += sum(_store(index, key, chunk * (costs.state_chunks if key[:1] == b"s" else 1)) for key in path)
        index.touch(reversed(path))
        if request.answered:
            if policy is not None and len(both) > end and policy.keeps_answer(moment):
                kept.add(len(both))
            path = _path(*whole, kept | ({resumed} if resumed else set()))
            stored += sum(_store(index, key, chunk * (costs.state_chunks if key[:1] == b"s" else 1)) for key in path)
            index.touch(reversed(path))
        total, hits = total + request.num_tokens, hits + resumed * chunk
    return Outcome(total, hits, stored, num_stops, num_stops * costs.step_tokens)


def _deepest_state(index: RamIndex, states: Sequence[bytes], held: int) -> int:
    last = index.last_held(states[:held])
    return 0 if last is None else last + 1


def _path(attention: Sequence[bytes], states: Sequence[bytes], with_state: set[int]) -> list[bytes]:
    """From the beginning on, each state behind the chunk that it needs."""
    path = []
    for place, key in enumerate(attention, 1):
        path.append(key)
        if place in with_state:
            path.append(states[place - 1])
    return path


def _store(index: RamIndex, key: bytes, num_bytes: int) -> int:
    """What was stored, 0 where it was there or does not fit."""
    if index.lookup(key) is not LookupResult.MISS or isinstance(index.reserve(key, num_bytes), Refusal):
        return 0
    index.commit(key)
    return num_bytes


def unique_chunks(trace: Trace, costs: CostModel) -> int:
    """What a trace would store today without a bound, in chunks: its attention, and a state at each prompt's end."""
    ends = {
        request.chunks[(request.num_tokens - 1) // trace.chunk_tokens - 1]
        for request in trace.requests
        if request.num_tokens > trace.chunk_tokens
    }
    return len({name for request in trace.requests for name in request.chunks}) + costs.state_chunks * len(ends)
