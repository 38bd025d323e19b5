"""Explanations of lookups name the reason that limits the hit."""

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hybridkv.connectors.vllm.common.explain import Admission, Explanation, LookupReason, explain, log, logger
from hybridkv.connectors.vllm.common.requests import TrackedRequest
from hybridkv.metrics import CATALOGUE, Label
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, Hit, Loss, Miss
from hybridkv.planner.stages import COMPUTE, Offer, Past, Unsearched

RECURRENT, FULL = 0, 1
SPEC = CacheSpec(
    (GroupSpec(kind=GroupKind.RECURRENT, block_tokens=16), GroupSpec(kind=GroupKind.FULL, block_tokens=16)), 16
)
NUM_TOKENS = 100
END = 96


def request(offered_tokens: int = 0, computed_tokens: int = 0, **past: Any) -> TrackedRequest:
    tracked = TrackedRequest(SimpleNamespace(request_id="a", num_tokens=NUM_TOKENS), None, None)  # type: ignore[arg-type]
    tracked.stage, tracked.computed_tokens = Unsearched(Past(**past)), computed_tokens
    tracked.last_reply = Offer(offered_tokens) if offered_tokens else COMPUTE
    return tracked


def explained(
    answer: Hit | Miss,
    full_tokens: int,
    limiting: int | None = None,
    taken: int | None = None,
    limit: int = NUM_TOKENS,
    **more: Any,
) -> Explanation:
    resumed = answer.num_tokens if isinstance(answer, Hit) else more.get("computed_tokens", 0)
    if taken is None:
        taken = answer.num_tokens if isinstance(answer, Hit) else 0
    admission = Admission(answer, limit, taken, Loss(resumed, full_tokens, limiting), "ram")
    return explain(SPEC, request(offered_tokens=taken) if not more else request(**more), admission)


@pytest.mark.parametrize(
    ("answer", "full_tokens", "more", "reason", "kind"),
    [
        (Hit(END), END, {}, LookupReason.COMPLETE, ""),
        (Hit(48), 48, {}, LookupReason.PREFIX_ENDS, "full"),
        (Hit(48), 80, {"limiting": RECURRENT}, LookupReason.GROUP_LIMITS, "recurrent"),
        (Miss(RECURRENT, "no state"), 80, {"limiting": RECURRENT}, LookupReason.GROUP_LIMITS, "recurrent"),
        (Hit(48), 48, {"limit": 50, "room_limit": 50}, LookupReason.TIER_ROOM, ""),
        (Hit(48), 48, {"taken": 0, "offered_tokens": 0}, LookupReason.ENGINE_ROOM, "full"),
        (Hit(48), 48, {"taken": 0, "offered_tokens": 48}, LookupReason.NOT_TAKEN, "full"),
        (Miss(None, "too short"), END, {"computed_tokens": END}, LookupReason.NO_BOUNDARY, ""),
        (Miss(RECURRENT, "no state"), 0, {}, LookupReason.NOT_STORED, "full"),
        (Miss(RECURRENT, "no state"), 0, {"waited_in_vain": True}, LookupReason.TIMEOUT, "full"),
        (Hit(48), 48, {"only_primary": True}, LookupReason.TIMEOUT, "full"),
        (Miss(None, "3 loads failed"), 0, {"failed_loads": 3}, LookupReason.FAILED_LOADS, "full"),
        (Hit(48), 48, {"failed_loads": 1, "limit": 50}, LookupReason.FAILED_LOADS, ""),
    ],
)
def test_the_reason_is_the_one_that_limits_most(
    answer: Hit | Miss, full_tokens: int, more: dict[str, Any], reason: LookupReason, kind: str
) -> None:
    told = explained(answer, full_tokens, **more)
    assert (told.reason, told.limiting_kind) == (reason, kind)


@pytest.mark.parametrize(
    ("answer", "full_tokens", "limiting", "junction"),
    [
        (Hit(48), 48, None, "resumed"),
        (Hit(48), 80, RECURRENT, "lost"),
        (Miss(RECURRENT, ""), 80, RECURRENT, "lost"),
        (Hit(48), END, RECURRENT, ""),
        (Hit(END), END, None, ""),
        (Miss(RECURRENT, ""), 0, None, ""),
    ],
)
def test_a_junction_is_the_end_of_the_stored_prefix_of_the_full_groups(
    answer: Hit | Miss, full_tokens: int, limiting: int | None, junction: str
) -> None:
    assert explained(answer, full_tokens, limiting).junction == junction


def test_tokens_are_counted_by_their_source() -> None:
    told = explained(Hit(48), 48, taken=16, computed_tokens=32)
    assert (told.num_tokens, told.engine_tokens, told.offered_tokens, told.compute_tokens) == (100, 32, 16, 52)


def test_lookup_reasons_equal_the_metric_labels() -> None:
    (declared,) = (
        label.values
        for label in CATALOGUE.named("vllm:hybridkv_lookups_total").labels
        if isinstance(label, Label) and label.name == "reason"
    )
    assert set(declared) == {str(reason) for reason in LookupReason} | {"being_stored", "async_lookup"}


def test_a_record_is_one_json_line_at_debug_level(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = explained(Hit(48), 80, RECURRENT)
    # The propagation of vLLM's loggers depends on whether vLLM has configured them.
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    try:
        for level, number in ((logging.INFO, 0), (logging.DEBUG, 1)):
            caplog.clear()
            logger.setLevel(level)
            log(told)
            assert len(caplog.records) == number
        assert msgspec.json.decode(caplog.records[0].getMessage(), type=Explanation) == told
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(logging.NOTSET)
