"""Why a request did or did not hit: one record for each request that was looked up and then admitted.

What it says is what /metrics counts, so that sums of records agree with /metrics to the token. A request that the
engine starts over, after a failed load or a preemption, is looked up again and has one more record.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hybridkv.planner import CacheSpec, GroupKind, Hit, Loss, Miss, last_boundary
from hybridkv.planner.stages import Offer

if TYPE_CHECKING:
    from hybridkv.connectors.vllm.common.requests import TrackedRequest

logger = logging.getLogger("vllm.hybridkv.explain")


class Reason(enum.StrEnum):
    """Why no more was offered. docs/guides/observing.md says what to do about each."""

    COMPLETE = "complete"
    """All that could be."""
    PREFIX_ENDS = "prefix_ends"
    """The stored prefix ends, or parts from the request, where the hit does."""
    GROUP_LIMITS = "group_limits"
    """The full groups hold more, but a group lacks its state or window there."""
    TIER_ROOM = "tier_room"
    """More would not fit into the fast tier at once."""
    ENGINE_ROOM = "engine_room"
    """The blocks for the load did not fit beside other loads."""
    NOT_TAKEN = "not_taken"
    """It was offered, and the engine or a choice between stores took something else."""
    NO_BOUNDARY = "no_boundary"
    """No boundary lies between what the engine holds and the end of the request."""
    NOT_STORED = "not_stored"
    """Nothing beyond what the engine holds is stored."""
    TIMEOUT = "timeout"
    """It was waited for in vain: for a store to end, or for a slower tier."""
    FAILED_LOADS = "failed_loads"
    """Loads of this request failed, so less is offered, or nothing."""
    HINT = "hint"
    """The request said that nothing is to be loaded, so nothing was looked up."""
    ADAPTER = "adapter"
    """It is in doubt what the request's adapter holds, so nothing was looked up, and nothing will be stored."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as it was when the engine gave it blocks. `num_tokens` is the sum of what the engine held, what was
    loaded, and what was left to compute.

    Args:
        request_id: the engine's name of the request.
        result: "hit" where something beyond what the engine held was found, whether or not it was taken, else "miss".
        reason: why not more.
        num_tokens: of the request: its prompt, and what it had generated before it was started over.
        engine_tokens: the prefix that the engine held itself.
        offered_tokens: what was found in the tiers beyond that and taken by the engine.
        compute_tokens: the rest.
        local_tokens: of those that were offered, the ones of which nothing but states is read from a tier, because the
            engine has their attention in blocks of its own.
        source: the slowest tier that a part of it came from, "" without a hit.
        limiting_group: the group that ruled more out, None where no group did.
        limiting_kind: its kind, or "".
        lost_tokens: how much more the full groups held than could be resumed.
        resumable_tokens: where it could have been resumed, had every group what it needs at every boundary: the prefix
            that the full groups hold, or the engine itself.
        stop: the boundary whose recurrent state is missing for that: an earlier request that had stopped there would
            have left it. 0 where no state is missing.
        stop_reason: why this request stops there, so that the next one finds the state, or "" where it does not.
        stops: where this request stops so that states are stored, and why: tokens from its beginning, and a reason.
        junction: "" or, where the request parts from what the full groups hold, "resumed" if it resumes at that point
            and "lost" if a group keeps it from that.
        asked: whether tiers that answer late were asked about it: not where that was worth no wait. None where there is
            none, or none that may be asked.
        detail: more, in words.
    """

    request_id: str
    result: str
    reason: Reason
    num_tokens: int
    engine_tokens: int
    offered_tokens: int
    compute_tokens: int
    local_tokens: int = 0
    source: str = ""
    limiting_group: int | None = None
    limiting_kind: str = ""
    lost_tokens: int = 0
    resumable_tokens: int = 0
    stop: int = 0
    stop_reason: str = ""
    stops: tuple[tuple[int, str], ...] = ()
    junction: str = ""
    asked: bool | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """What was decided for a request.

    Args:
        answer: of the lookup.
        limit_tokens: how much of the request was looked up.
        taken_tokens: what the engine loads.
        loss: what the groups held.
        source: the slowest tier that is read.
        asked: whether tiers that answer late were asked; None where there was none to be asked.
    """

    answer: Hit | Miss
    limit_tokens: int
    taken_tokens: int
    loss: Loss
    source: str
    asked: bool | None = None


def explain(spec: CacheSpec, tracked: TrackedRequest, admission: Admission) -> Explanation:
    """The record of a request that is being admitted."""
    answer, loss, num_tokens = admission.answer, admission.loss, tracked.request.num_tokens
    full_group = _full_group(spec)
    has_ended = full_group is not None and loss.full_tokens < last_boundary(spec, admission.limit_tokens)
    limiting = _limiting_group(answer, loss, full_group if has_ended else None)
    lacks_state = loss.lost_tokens > 0 and limiting is not None and spec.groups[limiting].kind is GroupKind.RECURRENT
    stop = loss.full_tokens if lacks_state else 0
    return Explanation(
        request_id=tracked.request_id,
        result="hit" if isinstance(answer, Hit) else "miss",
        reason=_reason(spec, tracked, admission),
        num_tokens=num_tokens,
        engine_tokens=tracked.computed_tokens,
        offered_tokens=admission.taken_tokens,
        compute_tokens=num_tokens - tracked.computed_tokens - admission.taken_tokens,
        source=admission.source if isinstance(answer, Hit) else "",
        limiting_group=limiting,
        limiting_kind=str(spec.groups[limiting].kind) if limiting is not None else "",
        lost_tokens=loss.lost_tokens,
        resumable_tokens=loss.full_tokens,
        stop=stop,
        stop_reason=tracked.checkpointed.reason_at(stop),
        stops=tuple((each.num_tokens, str(each.reason)) for each in tracked.checkpointed.placement.stops),
        junction=("lost" if loss.lost_tokens else "resumed") if has_ended and loss.full_tokens else "",
        asked=admission.asked,
        detail=answer.reason if isinstance(answer, Miss) else "",
    )


def unsearched(tracked: TrackedRequest, reason: Reason) -> Explanation:
    """The record of a request that is admitted and was not looked up."""
    num_tokens, computed = tracked.request.num_tokens, tracked.computed_tokens
    return Explanation(
        request_id=tracked.request_id,
        result="miss",
        reason=reason,
        num_tokens=num_tokens,
        engine_tokens=computed,
        offered_tokens=0,
        compute_tokens=num_tokens - computed,
        resumable_tokens=computed,
    )


def unidentified(tracked: TrackedRequest) -> Explanation:
    """The record of a request that is admitted with its adapter in doubt."""
    return unsearched(tracked, Reason.ADAPTER)


def _full_group(spec: CacheSpec) -> int | None:
    last = spec.scarce_first[-1]
    return last if spec.groups[last].kind is GroupKind.FULL else None


def _limiting_group(answer: Hit | Miss, loss: Loss, ended_group: int | None) -> int | None:
    """Where the full prefix ends, no state or window is to blame, whichever of them the search asked first."""
    if loss.lost_tokens:
        return loss.limiting_group
    if ended_group is not None or isinstance(answer, Hit):
        return ended_group
    return answer.limiting_group


def _reason(spec: CacheSpec, tracked: TrackedRequest, admission: Admission) -> Reason:
    answer, loss, past = admission.answer, admission.loss, tracked.stage.past
    if isinstance(answer, Hit):
        if not admission.taken_tokens:
            return Reason.NOT_TAKEN if isinstance(tracked.told, Offer) else Reason.ENGINE_ROOM
        if answer.num_tokens >= last_boundary(spec, tracked.request.num_tokens):
            return Reason.COMPLETE
    elif answer.limiting_group is None and past.failed_loads:
        return Reason.FAILED_LOADS
    if loss.lost_tokens:
        return Reason.GROUP_LIMITS
    if loss.full_tokens >= last_boundary(spec, admission.limit_tokens):
        # All that was looked for is there, or there is nothing to look for.
        if past.failed_loads:
            return Reason.FAILED_LOADS
        return Reason.NO_BOUNDARY if past.room_limit is None else Reason.TIER_ROOM
    if past.waited_in_vain or past.near_only:
        return Reason.TIMEOUT
    return Reason.PREFIX_ENDS if isinstance(answer, Hit) else Reason.NOT_STORED


def log(explanation: Explanation) -> None:
    """One line of JSON, at DEBUG."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", msgspec.json.encode(explanation).decode())
