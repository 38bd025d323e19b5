"""Explanations of hits and misses: one record for each admission of a request.

/metrics counts the values of these records, so both agree to the token. A request that the engine starts over, after a
failed load or a preemption, is looked up again and gets another record.
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


class LookupReason(enum.StrEnum):
    """Reason why the hit was not longer. docs/guides/observing.md has advice for each reason."""

    COMPLETE = "complete"
    """All possible tokens were offered."""
    PREFIX_ENDS = "prefix_ends"
    """The hit ends where the stored prefix ends or diverges from the request."""
    GROUP_LIMITS = "group_limits"
    """The tiers hold a longer prefix of the FULL groups, but another group lacks its state or window there."""
    TIER_ROOM = "tier_room"
    """A longer hit would not fit into the primary tier at once."""
    ENGINE_ROOM = "engine_room"
    """The engine's pool had no room for the load's blocks beside other loads. Not below HybridMultiConnector, which
    admits the loads: there the reason is NOT_TAKEN."""
    NOT_TAKEN = "not_taken"
    """Tokens were offered, but the engine did not take them, or HybridMultiConnector chose another child, or had no
    room for the load."""
    NO_BOUNDARY = "no_boundary"
    """No boundary lies between the tokens that the engine holds and the end of the request."""
    NOT_STORED = "not_stored"
    """Nothing is stored beyond the tokens that the engine holds."""
    TIMEOUT = "timeout"
    """A wait for a pending store or for a secondary tier timed out."""
    FAILED_LOADS = "failed_loads"
    """Loads of this request failed, so fewer tokens were offered, or none."""
    HINT = "hint"
    """A hint of the request forbids loads, so nothing was looked up."""
    ADAPTER = "adapter"
    """The content of the request's adapter is in doubt, so nothing was looked up, and nothing is stored."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one request at its admission. `num_tokens` = `engine_tokens` + `offered_tokens` + `compute_tokens`.

    Args:
        request_id: the engine's id of the request.
        result: "hit" if the tiers hold tokens beyond the engine's own, whether or not they were loaded; else "miss".
        reason: reason why the hit was not longer.
        num_tokens: tokens of the request: its prompt, and the output it had before it was started over.
        engine_tokens: tokens of the prefix that the engine itself held.
        offered_tokens: further tokens that were found in the tiers and taken by the engine.
        compute_tokens: tokens that the engine computes.
        local_tokens: offered tokens for which only states are read from a tier, because the engine still has their
            attention blocks.
        source: slowest tier that holds a part of the hit; "" without a hit.
        limiting_group: group that prevented a longer hit; None if no group did.
        limiting_kind: kind of `limiting_group`, or "".
        lost_tokens: tokens that the FULL groups held beyond the hit.
        resumable_tokens: boundary of the hit if no group lacked a state or window: the end of the prefix that the FULL
            groups or the engine hold.
        stop: boundary of the missing recurrent state: with this state, the hit would end at `resumable_tokens`. An
            earlier request with a stop there would have stored the state. 0 if no state is missing.
        stop_reason: reason why this request stops at `stop` and stores the state; "" if it does not stop there.
        stops: prefill stops of this request, each as tokens from the request's start and a reason.
        junction: "resumed" or "lost" if the prefix that the FULL groups or the engine hold ends before the request's
            last boundary: the request diverges from the prefix, or extends it. "resumed": the request resumes at the
            end of the prefix; "lost": a group prevents this. "" if the prefix is complete or empty.
        async_lookup: whether secondary tiers without a local index were looked up; False if the expected gain was less
            than the wait. None if there are no such tiers, or none that may be used.
        detail: more detail, as text.
    """

    request_id: str
    result: str
    reason: LookupReason
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
    async_lookup: bool | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """Decision about a request at its admission.

    Args:
        answer: result of the lookup.
        limit_tokens: tokens of the request that were looked up.
        taken_tokens: tokens that the engine loads.
        loss: tokens that the FULL groups held beyond the hit.
        source: slowest tier that the load reads.
        async_lookup: see `Explanation`.
    """

    answer: Hit | Miss
    limit_tokens: int
    taken_tokens: int
    loss: Loss
    source: str
    async_lookup: bool | None = None


def explain(spec: CacheSpec, tracked: TrackedRequest, admission: Admission) -> Explanation:
    """Record of a request at its admission."""
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
        stop_reason=tracked.checkpoint_state.reason_at(stop),
        stops=tuple((each.num_tokens, str(each.reason)) for each in tracked.checkpoint_state.placement.stops),
        junction=("lost" if loss.lost_tokens else "resumed") if has_ended and loss.full_tokens else "",
        async_lookup=admission.async_lookup,
        detail=answer.reason if isinstance(answer, Miss) else "",
    )


def unsearched(tracked: TrackedRequest, reason: LookupReason) -> Explanation:
    """Record of a request that is admitted without a lookup."""
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


def explain_adapter_in_doubt(tracked: TrackedRequest) -> Explanation:
    """Record of a request that is admitted without a lookup, because its adapter is in doubt."""
    return unsearched(tracked, LookupReason.ADAPTER)


def _full_group(spec: CacheSpec) -> int | None:
    last = spec.scarce_first[-1]
    return last if spec.groups[last].kind is GroupKind.FULL else None


def _limiting_group(answer: Hit | Miss, loss: Loss, ended_group: int | None) -> int | None:
    """Group that limits the hit; None if no group does.

    Args:
        answer: result of the lookup.
        loss: tokens that the FULL groups held beyond the hit.
        ended_group: a FULL group, if the stored prefix ends before the last boundary; else None. If no tokens are lost,
            this group limits the hit, even if the search tried another group first.
    """
    if loss.lost_tokens:
        return loss.limiting_group
    if ended_group is not None or isinstance(answer, Hit):
        return ended_group
    return answer.limiting_group


def _reason(spec: CacheSpec, tracked: TrackedRequest, admission: Admission) -> LookupReason:
    answer, loss, past = admission.answer, admission.loss, tracked.stage.past
    if isinstance(answer, Hit):
        if not admission.taken_tokens:
            return LookupReason.NOT_TAKEN if isinstance(tracked.last_reply, Offer) else LookupReason.ENGINE_ROOM
        if answer.num_tokens >= last_boundary(spec, tracked.request.num_tokens):
            return LookupReason.COMPLETE
    elif answer.limiting_group is None and past.failed_loads:
        return LookupReason.FAILED_LOADS
    if loss.lost_tokens:
        return LookupReason.GROUP_LIMITS
    if loss.full_tokens >= last_boundary(spec, admission.limit_tokens):
        # The whole range is stored, or the range is empty.
        if past.failed_loads:
            return LookupReason.FAILED_LOADS
        return LookupReason.NO_BOUNDARY if past.room_limit is None else LookupReason.TIER_ROOM
    if past.waited_in_vain or past.only_primary:
        return LookupReason.TIMEOUT
    return LookupReason.PREFIX_ENDS if isinstance(answer, Hit) else LookupReason.NOT_STORED


def log(explanation: Explanation) -> None:
    """Logs a record at DEBUG as one line of JSON."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", msgspec.json.encode(explanation).decode())
