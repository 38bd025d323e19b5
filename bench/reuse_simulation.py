"""One trace through one store: requests one after the other, the repository's RAM index, no engine and no bytes.

A request resumes at its deepest state below which all attention is held, computes the rest, and stores all chunks of
attention and the states of its stops and of its end. A token of attention counts for one byte and a state for
`state_tokens`; what does not fit evicts what was used longest ago, of a request's path its end first.
"""

from __future__ import annotations

from collections import deque
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

    def older_answers(self, moment: Moment) -> Sequence[int]:
        """Boundaries of the answer whose states are stored before the newest one."""
        ...

    def go_first(self, moment: Moment) -> Sequence[int]:
        """Boundaries in chunks whose states may go before all others, now that the request's own are stored."""
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


class Stranded:
    """Chunks behind the deepest state of an ended path go first once a quarter of the store was stored since, if no
    other request met them: as the connector does."""

    def __init__(self, index: RamIndex, patience_bytes: int) -> None:
        self._index = index
        self._patience_bytes = patience_bytes
        self._brought_by: dict[bytes, int] = {}
        self._ended: deque[tuple[int, int, list[bytes]]] = deque()

    def note(self, number: int, key: bytes, *, is_new: bool) -> None:
        brought_by = self._brought_by.get(key)
        if brought_by is None:
            if is_new:
                self._brought_by[key] = number
        elif brought_by != number:
            del self._brought_by[key]

    def on_over(self, number: int, path: list[bytes], useful: int, stored: int) -> None:
        """`useful`: chunks of attention before the deepest state, or before where the request resumed."""
        attention = [key for key in path if key[:1] == b"f"]
        beyond = [key for key in attention[useful:] if self._brought_by.get(key) == number]
        for key in set(path).difference(beyond):
            if self._brought_by.get(key) == number:
                del self._brought_by[key]
        if beyond:
            self._ended.append((stored, number, beyond[::-1]))
        while self._ended and self._ended[0][0] <= stored - self._patience_bytes:
            _, number, waiting = self._ended.popleft()
            left = [key for key in waiting if self._brought_by.get(key) == number]
            for key in left:
                del self._brought_by[key]
            self._index.demote(left)


def simulate(
    trace: Trace,
    capacity_chunks: int,
    costs: CostModel,
    policy: Policy | None,
    *,
    gives_up_stranded: bool = False,
    supersede: str | None = None,
) -> Outcome:
    """A trace through a store of so many chunks; without a policy as if attention were all that a model has."""
    chunk = trace.chunk_tokens
    index = RamIndex(capacity_chunks * chunk, chunk)
    total = hits = stored = num_stops = 0
    stranded = Stranded(index, capacity_chunks * chunk // 4) if gives_up_stranded else None

    def put(key: bytes) -> int:
        more = _store(index, key, chunk * (costs.state_chunks if key[:1] == b"s" else 1))
        if stranded is not None:
            stranded.note(number, key, is_new=more > 0)
        return more

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
        stored += sum(map(put, path))
        index.touch(reversed(path))
        if request.answered:
            older: list[int] = []
            if policy is not None and len(both) > end and policy.keeps_answer(moment):
                older = list(policy.older_answers(moment))
                kept.update(older, [len(both)])
            at = kept | ({resumed} if resumed else set())
            superseded: list[bytes] = []
            for key in _path(*whole, at):
                stored += put(key)
                if key[:1] == b"s" and older and supersede is not None:
                    place = whole[1].index(key) + 1
                    if place > end and place - 1 in older:
                        before = whole[1][place - 2]
                        superseded.append(before)
                        kept.discard(place - 1)
                        (index.demote if supersede == "demote" else index.invalidate_all)([before])
            path = [key for key in _path(*whole, at) if key not in superseded]
            index.touch(reversed(path))
        if stranded is not None:
            stored_deepest = max(
                (place for place in kept if index.lookup(whole[1][place - 1]) is LookupResult.HIT), default=0
            )
            stranded.on_over(number, path, max(resumed, stored_deepest), stored)
        if policy is not None:
            index.demote([whole[1][place - 1] for place in policy.go_first(moment)])
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
