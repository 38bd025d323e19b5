"""Prefill stops: sets the boundary at which the engine stops next in each prefill. No other module sets it.

The engine hands over recurrent states at one boundary of a request, and reads that boundary again at every chunk. So
the boundary moves from stop to stop: at each chunk it becomes the next stop of any connector, or of the engine itself.
This module does not decide which boundaries are worth a stop. `ChildPlace` holds the objects that the children of one
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
    """A request with stops. All numbers are tokens from its start."""

    request: Request
    plans: list[Callable[[int], Placement]] = field(default_factory=list)
    """Planners of the connectors that want stops, until the start of the request's computation is known."""
    placements: list[Placement] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    """Boundaries at which these connectors would resume the request after a load."""
    engine_tokens: int = 0
    """The engine's own boundary, 0 for none."""

    def next(self, start_tokens: int) -> int:
        """The first stop after `start_tokens`, 0 for none."""
        most = self.request.num_prompt_tokens
        found = [next_stop(placement, start_tokens) for placement in self.placements]
        stops = [stop.num_tokens for stop in found if stop is not None and stop.num_tokens <= most]
        if self.engine_tokens > start_tokens:
            stops.append(self.engine_tokens)
        return min(stops, default=0)

    def has_known_stop(self, start_tokens: int, end_tokens: int) -> bool:
        """Whether a stop in (`start_tokens`, `end_tokens`] is a known one: a point at which prompts were seen to
        diverge, or the engine's own."""
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

    `begin`, `add_stops` and `end` belong to one lookup of a request. The engine sets a boundary of its own just
    before each lookup, also when it repeats one after a preemption or a failed load. A request is dropped when it has
    no stop left, and when it ends.

    Args:
        chunk_tokens: maximum tokens of one prompt in one step.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._stopping: dict[str, _StoppingRequest] = {}
        self._has_logged = False

    def begin(self, request: Request) -> None:
        """Starts a lookup: earlier stops of the request no longer hold."""
        self._stopping.pop(request.request_id, None)

    def add_stops(self, request: Request, plan: Callable[[int], Placement], loaded_tokens: int = 0) -> None:
        """Adds the stops of one connector.

        Args:
            request: the request of the lookup.
            plan: returns the stops, given the tokens at which computation will start; that depends on which connector
                loads. `end` calls it, at most once.
            loaded_tokens: boundary at which the request resumes if this connector loads, 0 for none. The state there is
                worth keeping, so that the next request need not load it.
        """
        stopping = self._stopping.get(request.request_id)
        if stopping is None or stopping.request is not request:
            stopping = self._stopping[request.request_id] = _StoppingRequest(request)
        stopping.plans.append(plan)
        if loaded_tokens:
            stopping.loaded.append(loaded_tokens)

    def end(self, request: Request, start_tokens: int, is_loaded: bool) -> None:
        """Ends a lookup and sets the first boundary.

        After a load the engine keeps the loaded state if the boundary is there. It cuts the first chunk at the boundary
        too, so a known stop within that chunk takes precedence over the loaded state. An evenly spaced stop does not:
        later requests are known to resume at the loaded state, but none has reached the spaced stop yet.

        Args:
            request: the request of the lookup.
            start_tokens: tokens at which computation will start.
            is_loaded: whether the request waits for a load up to there.
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
            # The remaining boundary has been passed, so it has no effect.
            del self._stopping[stopping.request.request_id]

    def advance(self, scheduler_output: SchedulerOutput) -> None:
        """Moves each request of a planned step to its next stop."""
        for request_id in scheduler_output.finished_req_ids or ():
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
                # Tokens that an asynchronous scheduler has not seen yet are not hashed, and their states not kept.
                start = min(request.num_computed_tokens + num_tokens, request.num_tokens)
                self._move(stopping, stopping.next(start))


@dataclass(frozen=True, slots=True)
class ChildPlace:
    """Place of a connector among the children of a HybridMultiConnector, and the objects that the children share.

    Args:
        number: number among the children; 0 for a connector without siblings.
        admission: admission of all children's loads, which need the same blocks; None without siblings.
        prefill_stops: stops of all children, as the engine reads only one boundary; None without siblings.
    """

    number: int = 0
    admission: LoadAdmission | None = None
    prefill_stops: PrefillStops | None = None


_NO_SIBLINGS = ChildPlace()
_child_place: ContextVar[ChildPlace] = ContextVar("hybridkv_sibling", default=_NO_SIBLINGS)


@contextmanager
def as_child(sibling: ChildPlace) -> Iterator[None]:
    """Sets the place of connectors that are built in this context."""
    token = _child_place.set(sibling)
    try:
        yield
    finally:
        _child_place.reset(token)


def current_child() -> ChildPlace:
    """Place of the connector that is being built."""
    return _child_place.get()
