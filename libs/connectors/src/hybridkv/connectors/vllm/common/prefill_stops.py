"""Prefill stops: the one writer of the boundary at which the engine stops next in each prefill.

The engine hands over recurrent states at one boundary of a request, and reads that boundary anew at every chunk. So it
moves from stop to stop: at each chunk, the next stop of any connector of the engine, the engine's own included. This
module does not decide which boundaries are worth a stop. `Sibling` gives the children of one HybridMultiConnector what
they share.
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
class _Steered:
    """A request that stops somewhere. All numbers are tokens from its start."""

    request: Request
    plans: list[Callable[[int], Placement]] = field(default_factory=list)
    """Of those who wish for stops, until it is known where the request will begin."""
    placements: list[Placement] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    """Where those who wish would have it resume after a load."""
    engine_tokens: int = 0
    """The engine's own boundary, or 0."""

    def next(self, start_tokens: int) -> int:
        """The first stop above `start_tokens`, 0 for none."""
        most = self.request.num_prompt_tokens
        found = [next_stop(placement, start_tokens) for placement in self.placements]
        stops = [stop.num_tokens for stop in found if stop is not None and stop.num_tokens <= most]
        if self.engine_tokens > start_tokens:
            stops.append(self.engine_tokens)
        return min(stops, default=0)

    def is_known_within(self, start_tokens: int, end_tokens: int) -> bool:
        """Whether a stop lies above `start_tokens` and up to `end_tokens` that is no guess: prompts were seen to part
        there."""
        most = min(end_tokens, self.request.num_prompt_tokens)
        known = (
            stop.num_tokens
            for placement in self.placements
            for stop in placement.stops
            if stop.reason is not StopReason.SPACED
        )
        return start_tokens < self.engine_tokens <= end_tokens or any(start_tokens < each <= most for each in known)


class Steering:
    """The boundaries of all requests of one engine. One for all of its connectors.

    `begin`, `wish` and `settle` belong to one question of the engine: what can be loaded for a request. It has written
    a boundary of its own just before, also when it asks again after a preemption or a failed load. A request is
    forgotten when no stop is left, and when it ends, so there are never more than the engine has.

    Args:
        chunk_tokens: tokens of one prompt that a step computes at most.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._steered: dict[str, _Steered] = {}
        self._has_told = False

    def begin(self, request: Request) -> None:
        """The engine asks about a request, from its beginning on. What was wished before does not hold any more."""
        self._steered.pop(request.request_id, None)

    def wish(self, request: Request, plan: Callable[[int], Placement], loaded_tokens: int = 0) -> None:
        """Somebody wishes for stops.

        Args:
            request: that the engine asks about.
            plan: the stops, given where the request will begin to compute, which depends on who else loads. Called by
                `settle`, once at most.
            loaded_tokens: where the request resumes if who wishes is the one that loads, 0 for nowhere: the state that
                comes there is worth keeping for the next request, which then need not load it.
        """
        steered = self._steered.get(request.request_id)
        if steered is None or steered.request is not request:
            steered = self._steered[request.request_id] = _Steered(request)
        steered.plans.append(plan)
        if loaded_tokens:
            steered.loaded.append(loaded_tokens)

    def settle(self, request: Request, start_tokens: int, is_loaded: bool) -> None:
        """The engine has its answer.

        When a load has ended the engine keeps what came if that is its boundary, and cuts the first chunk there and
        then, so a stop within that chunk goes before what was loaded. A guess does not: siblings in a row come to what
        was loaded, and nobody has come to the guess.

        Args:
            request: that it asked about.
            start_tokens: where it will begin to compute.
            is_loaded: whether it waits for a load until there.
        """
        steered = self._steered.get(request.request_id)
        if steered is None:
            return
        plans, steered.plans = steered.plans, []
        steered.placements = [placement for plan in plans if (placement := plan(start_tokens)).stops]
        own = compat.kept_boundary(request)
        has_wish = bool(steered.placements or steered.loaded)
        if own is None or not has_wish:
            if has_wish:
                self._tell_there_is_none()
            del self._steered[request.request_id]
            return
        steered.engine_tokens = own
        is_near = steered.is_known_within(start_tokens, start_tokens + self._chunk_tokens)
        is_kept = start_tokens in steered.loaded and start_tokens <= request.num_prompt_tokens
        if is_loaded and is_kept and not is_near:
            compat.keep_at(request, start_tokens)
        else:
            self._move(steered, steered.next(start_tokens))

    def _tell_there_is_none(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.debug("this engine has no boundary to move: states are stored where it hands them over")

    def _move(self, steered: _Steered, stop_tokens: int) -> None:
        if stop_tokens:
            compat.keep_at(steered.request, stop_tokens)
        else:
            # What stands there is behind it and means nothing any more.
            del self._steered[steered.request.request_id]

    def advance(self, scheduler_output: SchedulerOutput) -> None:
        """A step is planned: each of its requests goes on to the stop behind it."""
        for request_id in scheduler_output.finished_req_ids or ():
            steered = self._steered.get(request_id)
            if steered is not None and steered.request.is_finished():
                del self._steered[request_id]
        if not self._steered:
            return
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id, steered in tuple(self._steered.items()):
            num_tokens = scheduled.get(request_id)
            if num_tokens is not None:
                request = steered.request
                # Tokens that an asynchronous scheduler has not seen yet are not hashed, and their states not kept.
                start = min(request.num_computed_tokens + num_tokens, request.num_tokens)
                self._move(steered, steered.next(start))


@dataclass(frozen=True, slots=True)
class Sibling:
    """Which of an engine's connectors one is.

    Args:
        number: among the children; 0 for one that stands alone.
        admission: of all children's loads, which wait for the same blocks; None for one that stands alone.
        steering: of all children's prefills, whose stops the engine reads in one place; None for one that stands alone.
    """

    number: int = 0
    admission: LoadAdmission | None = None
    steering: Steering | None = None


_ALONE = Sibling()
_sibling: ContextVar[Sibling] = ContextVar("hybridkv_sibling", default=_ALONE)


@contextmanager
def as_sibling(sibling: Sibling) -> Iterator[None]:
    """Connectors that are built inside are this one of several."""
    token = _sibling.set(sibling)
    try:
        yield
    finally:
        _sibling.reset(token)


def current_sibling() -> Sibling:
    """Which of several a connector that is being built is."""
    return _sibling.get()
