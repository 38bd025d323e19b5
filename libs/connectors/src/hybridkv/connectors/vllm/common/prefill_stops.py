"""Prefill stops: sets the boundary at which the engine next stops each prefill. No other module sets this boundary.

The engine hands over recurrent states at one boundary of a request, and reads this boundary again at every prefill
chunk. So this module moves the boundary after each chunk: to the next stop of any connector, or of the engine itself.
The connectors decide which boundaries are worth a stop. `ChildPlace` holds the objects that the children of one
HybridMultiConnector share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat
from hybridkv.planner import LoadAdmission
from hybridkv.planner.checkpoints import Placement, StopReason, next_stop

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv.scheduler")


@dataclass(slots=True)
class _StoppingRequest:
    """A request with stops. All numbers are tokens from the request's start."""

    request: Request
    plans: list[Callable[[int], Placement]] = field(default_factory=list)
    """Functions that plan the stops of each connector, given the start of the computation. Empty after `end`."""
    placements: list[Placement] = field(default_factory=list)
    """Planned stops, one placement for each connector with stops."""
    loaded: list[int] = field(default_factory=list)
    """Boundaries at which the request would resume after a load, one for each connector with a hit."""
    engine_tokens: int = 0
    """The engine's own boundary; 0: none."""

    def next(self, start_tokens: int) -> int:
        """The first stop after `start_tokens`; 0: none."""
        most = self.request.num_prompt_tokens
        found = [next_stop(placement, start_tokens) for placement in self.placements]
        stops = [stop.num_tokens for stop in found if stop is not None and stop.num_tokens <= most]
        if self.engine_tokens > start_tokens:
            stops.append(self.engine_tokens)
        return min(stops, default=0)

    def has_known_stop(self, start_tokens: int, end_tokens: int) -> bool:
        """Whether a known stop lies in (`start_tokens`, `end_tokens`]: a boundary at which prompts have diverged or
        end, or the engine's own boundary. SPACED stops do not count: they are guesses."""
        most = min(end_tokens, self.request.num_prompt_tokens)
        known = (
            stop.num_tokens
            for placement in self.placements
            for stop in placement.stops
            if stop.reason is not StopReason.SPACED
        )
        return start_tokens < self.engine_tokens <= end_tokens or any(start_tokens < each <= most for each in known)


class PrefillStops:
    """Stop boundaries of all requests of one engine, shared by all of its connectors.

    Each lookup of a request calls `begin`. A lookup that does not make the request wait then calls `add_stops` for each
    connector, even if no store is searched, and `end`. The engine sets its own boundary just before each lookup, also
    before a repeated lookup after a preemption or a failed load. Requests that have no stop left, and requests that
    have ended, are dropped.

    Args:
        chunk_tokens: maximum tokens of one prompt in one step.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._stopping: dict[str, _StoppingRequest] = {}
        self._has_logged = False

    def begin(self, request: Request) -> None:
        """Starts a lookup: drops earlier stops of the request."""
        self._stopping.pop(request.request_id, None)

    def add_stops(self, request: Request, plan: Callable[[int], Placement], loaded_tokens: int = 0) -> None:
        """Adds the stops of one connector.

        Args:
            request: the request of the lookup.
            plan: returns the stops, given the start of the computation in tokens. `end` calls `plan` at most once,
                because the start depends on the connector that loads.
            loaded_tokens: boundary at which the request resumes if this connector loads; 0: no load. The engine should
                keep the state of this boundary, so that the next request need not load the state.
        """
        stopping = self._stopping.get(request.request_id)
        if stopping is None or stopping.request is not request:
            stopping = self._stopping[request.request_id] = _StoppingRequest(request)
        stopping.plans.append(plan)
        if loaded_tokens:
            stopping.loaded.append(loaded_tokens)

    def end(self, request: Request, start_tokens: int, is_loaded: bool) -> None:
        """Ends a lookup and sets the first boundary.

        With the boundary at the end of a load, the engine keeps the loaded state, but the first prefill chunk passes
        other stops. So a known stop within that chunk takes precedence over the loaded state. A SPACED stop does not:
        requests resume at the loaded state, but none has resumed at the SPACED stop yet.

        Args:
            request: the request of the lookup.
            start_tokens: token at which the computation starts.
            is_loaded: whether the request waits for a load up to `start_tokens`.
        """
        stopping = self._stopping.get(request.request_id)
        if stopping is None:
            return
        plans, stopping.plans = stopping.plans, []
        stopping.placements = [placement for plan in plans if (placement := plan(start_tokens)).stops]
        own = compat.get_prefill_stop(request)
        wants_stops = bool(stopping.placements or stopping.loaded)
        if own is None or not wants_stops:
            if wants_stops:
                self._log_no_boundary()
            del self._stopping[request.request_id]
            return
        stopping.engine_tokens = own
        is_near = stopping.has_known_stop(start_tokens, start_tokens + self._chunk_tokens)
        is_kept = start_tokens in stopping.loaded and start_tokens <= request.num_prompt_tokens
        if is_loaded and is_kept and not is_near:
            compat.set_prefill_stop(request, start_tokens)
        else:
            self._move(stopping, stopping.next(start_tokens))

    def _log_no_boundary(self) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.debug("this engine has no boundary to move: states are stored where it hands them over")

    def _move(self, stopping: _StoppingRequest, stop_tokens: int) -> None:
        if stop_tokens:
            compat.set_prefill_stop(stopping.request, stop_tokens)
        else:
            # The boundary that is still set has no effect, because the engine has passed this boundary.
            del self._stopping[stopping.request.request_id]

    def advance(self, scheduler_output: SchedulerOutput) -> None:
        """Sets the next stop of each request of a planned step, and drops requests that have ended."""
        for request_id in compat.finished_ids(scheduler_output):
            stopping = self._stopping.get(request_id)
            if stopping is not None and stopping.request.is_finished():
                del self._stopping[request_id]
        if not self._stopping:
            return
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id, stopping in tuple(self._stopping.items()):
            num_tokens = scheduled.get(request_id)
            if num_tokens is not None:
                request = stopping.request
                # An asynchronous scheduler may count tokens that it does not know yet. They are not hashed, and the
                # engine keeps no states for them.
                start = min(request.num_computed_tokens + num_tokens, request.num_tokens)
                self._move(stopping, stopping.next(start))


@dataclass(frozen=True, slots=True)
class ChildPlace:
    """Place of a connector among the children of a HybridMultiConnector, and the objects that the children share.

    Args:
        number: number among the children; 0 for a connector without a parent.
        admission: admission of all children's loads, which need the same blocks; None without a parent.
        prefill_stops: stops of all children, because the engine reads only one boundary; None without a parent, and for
            a model without recurrent states.
    """

    number: int = 0
    admission: LoadAdmission | None = None
    prefill_stops: PrefillStops | None = None


_NO_SIBLINGS = ChildPlace()
_child_place: ContextVar[ChildPlace] = ContextVar("hybridkv_sibling", default=_NO_SIBLINGS)


@contextmanager
def as_child(place: ChildPlace) -> Iterator[None]:
    """Sets the place of connectors that are built in this context."""
    token = _child_place.set(place)
    try:
        yield
    finally:
        _child_place.reset(token)


def current_child() -> ChildPlace:
    """Place of the connector that is built in this context."""
    return _child_place.get()
