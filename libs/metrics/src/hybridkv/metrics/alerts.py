"""The alerts of hybridkv, declared as data: what is asked, from where on it is too much, and series that prove it.

Rules and their tests are written from this by `hybridkv.metrics.rules`; docs/reference/metrics.md lists them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hybridkv.metrics.promql import Increase, Query, Rate, Ratio, Value

WINDOW: Final = "10m"
"""Over which rates and increases are taken."""
MODEL_LABELS: Final = 'model_name="tiny", engine="0"'
"""Of the series that prove an alert."""


class Severity(enum.StrEnum):
    CRITICAL = "critical"
    """Answers or requests are in danger: look now."""
    WARNING = "warning"
    """Something is broken and costs time: look today."""
    INFO = "info"
    """It works, and could be worth more."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Args:
        name: in CamelCase, beginning with HybridKV.
        query: what is looked at; a label that it tells apart beyond the engine's is told apart by the alert too.
        above: the alert fires where the query is more than this.
        for_: how long it must be, in Prometheus' notation.
        severity: how urgent it is.
        summary: what is wrong, in a sentence.
        action: what the operator can do.
        firing: series for which it fires after an hour: own labels in Prometheus' notation, as `name{label="value"}`,
            and values a minute in promtool's notation ("0+5x90": 0, 5, 10 ...).
        quiet: series for which it does not.
    """

    name: str
    query: Query
    above: float
    for_: str
    severity: Severity
    summary: str
    action: str
    firing: Mapping[str, str]
    quiet: Mapping[str, str]


def _share(metric: str, label: str, *values: str) -> Ratio:
    return Ratio(Rate(metric, {label: values}), (Rate(metric),))


ALERTS: Final = (
    Alert(
        name="HybridKVBytesDamaged",
        query=Increase("vllm:hybridkv_load_failures_total", {"reason": ("checksum", "wrong_key")}),
        above=0,
        for_="0m",
        severity=Severity.CRITICAL,
        summary="A stored chunk was not what it was when it was stored; it was found out and not used.",
        action="Look for failing memory or a failing disk; if there is none, report a bug.",
        firing={'vllm:hybridkv_load_failures_total{reason="checksum"}': "0x50 1x40"},
        quiet={
            'vllm:hybridkv_load_failures_total{reason="checksum"}': "1x90",
            'vllm:hybridkv_load_failures_total{reason="io"}': "0x50 1x40",
        },
    ),
    Alert(
        name="HybridKVBytesDamagedInSlowTier",
        query=Increase("vllm:hybridkv_move_failures_total", {"reason": ("checksum", "wrong_key")}, by=("tier",)),
        above=0,
        for_="0m",
        severity=Severity.WARNING,
        summary="The tier {{ $labels.tier }} gave back other bytes than it was given; they were found and not used.",
        action="Look for a failing disk, or for somebody else who writes into that tier.",
        firing={'vllm:hybridkv_move_failures_total{reason="wrong_key",tier="disk"}': "0x50 1x40"},
        quiet={
            'vllm:hybridkv_move_failures_total{reason="wrong_key",tier="disk"}': "1x90",
            'vllm:hybridkv_move_failures_total{reason="busy",tier="disk"}': "0x50 1x40",
        },
    ),
    Alert(
        name="HybridKVLoadsFail",
        query=_share("vllm:hybridkv_loads_total", "outcome", "failed"),
        above=0.05,
        for_="10m",
        severity=Severity.WARNING,
        summary="More than one load in twenty fails, and its tokens are computed or its request ends with an error.",
        action="See the panel Failed loads for the reason, and the log for its detail.",
        firing={
            'vllm:hybridkv_loads_total{outcome="loaded"}': "0+90x90",
            'vllm:hybridkv_loads_total{outcome="failed"}': "0+10x90",
        },
        quiet={
            'vllm:hybridkv_loads_total{outcome="loaded"}': "0+99x90",
            'vllm:hybridkv_loads_total{outcome="failed"}': "0+1x90",
        },
    ),
    Alert(
        name="HybridKVStoresFail",
        query=_share("vllm:hybridkv_stores_total", "outcome", "failed"),
        above=0.05,
        for_="10m",
        severity=Severity.WARNING,
        summary="More than one chunk in twenty fails to be stored.",
        action="See the panel Failed stores for the reason, and the log for its detail.",
        firing={
            'vllm:hybridkv_stores_total{kind="full",outcome="stored"}': "0+90x90",
            'vllm:hybridkv_stores_total{kind="full",outcome="failed"}': "0+10x90",
        },
        quiet={
            'vllm:hybridkv_stores_total{kind="full",outcome="stored"}': "0+99x90",
            'vllm:hybridkv_stores_total{kind="full",outcome="failed"}': "0+1x90",
        },
    ),
    Alert(
        name="HybridKVStoresDropped",
        query=_share(
            "vllm:hybridkv_stores_total",
            "outcome",
            "dropped_no_room",
            "dropped_too_large",
        ),
        above=0.1,
        for_="10m",
        severity=Severity.WARNING,
        summary="More than one chunk in ten finds no room in the fast tier.",
        action="Raise the capacity of the fast tier: what is in use at one time does not fit.",
        firing={
            'vllm:hybridkv_stores_total{kind="full",outcome="stored"}': "0+50x90",
            'vllm:hybridkv_stores_total{kind="full",outcome="dropped_no_room"}': "0+50x90",
        },
        quiet={
            'vllm:hybridkv_stores_total{kind="full",outcome="stored"}': "0+50x90",
            'vllm:hybridkv_stores_total{kind="full",outcome="present"}': "0+45x90",
            'vllm:hybridkv_stores_total{kind="full",outcome="dropped_no_room"}': "0+5x90",
        },
    ),
    Alert(
        name="HybridKVSlowTierLeftAlone",
        query=Value("vllm:hybridkv_breaker_open", {"direction": ("promote",)}, by=("tier",)),
        above=0,
        for_="5m",
        severity=Severity.WARNING,
        summary="The tier {{ $labels.tier }} does not answer loads and has been left alone for five minutes.",
        action="Look at the disk or the store behind it; requests do without it meanwhile.",
        firing={
            'vllm:hybridkv_breaker_open{direction="promote",tier="disk"}': "0x90",
            'vllm:hybridkv_breaker_open{direction="promote",tier="peer"}': "1x90",
        },
        quiet={
            'vllm:hybridkv_breaker_open{direction="promote",tier="disk"}': "0x90",
            'vllm:hybridkv_breaker_open{direction="cascade",tier="peer"}': "1x90",
        },
    ),
    Alert(
        name="HybridKVSlowTierTakesNothing",
        query=Value("vllm:hybridkv_breaker_open", {"direction": ("cascade",)}, by=("tier",)),
        above=0,
        for_="5m",
        severity=Severity.WARNING,
        summary="Stores to the tier {{ $labels.tier }} have failed or not ended for five minutes; what it has is "
        "served meanwhile.",
        action="Look whether what is behind it is full, over a quota or read-only.",
        firing={'vllm:hybridkv_breaker_open{direction="cascade",tier="disk"}': "1x90"},
        quiet={
            'vllm:hybridkv_breaker_open{direction="cascade",tier="disk"}': "0x90",
            'vllm:hybridkv_breaker_open{direction="promote",tier="disk"}': "1x90",
        },
    ),
    Alert(
        name="HybridKVTierAnswersTooLate",
        query=Ratio(
            Rate("vllm:hybridkv_asked_total", {"outcome": ("late",)}, by=("tier",)),
            (Rate("vllm:hybridkv_asked_total", by=("tier",)),),
        ),
        above=0.5,
        for_="10m",
        severity=Severity.WARNING,
        summary="Of more than half of what the tier {{ $labels.tier }} is asked for it says nothing in time.",
        action="Look at what is behind it. Long prompts wait for it until ask_timeout_seconds are over, unless it is "
        "left alone for a pause: raise them if it is only slow, or take the tier out.",
        firing={
            'vllm:hybridkv_asked_total{tier="object",outcome="held"}': "0+100x90",
            'vllm:hybridkv_asked_total{tier="peer",outcome="held"}': "0+40x90",
            'vllm:hybridkv_asked_total{tier="peer",outcome="late"}': "0+60x90",
        },
        quiet={
            'vllm:hybridkv_asked_total{tier="peer",outcome="held"}': "0+20x90",
            'vllm:hybridkv_asked_total{tier="peer",outcome="missing"}': "0+40x90",
            'vllm:hybridkv_asked_total{tier="peer",outcome="late"}': "0+40x90",
        },
    ),
    Alert(
        name="HybridKVWaitsInVain",
        query=Ratio(Rate("vllm:hybridkv_wait_timeouts_total"), (Rate("vllm:hybridkv_lookups_total"),)),
        above=0.01,
        for_="10m",
        severity=Severity.WARNING,
        summary="More than one request in a hundred waits for a tier until its time is over.",
        action="Look at the time of a move of each tier, and in the log for which did not answer; lower its "
        "load_timeout_seconds, or mend it.",
        firing={
            'vllm:hybridkv_wait_timeouts_total{wait="load"}': "0+10x90",
            'vllm:hybridkv_lookups_total{result="miss",reason="timeout"}': "0+100x90",
        },
        quiet={
            'vllm:hybridkv_wait_timeouts_total{wait="load"}': "0x90",
            'vllm:hybridkv_lookups_total{result="hit",reason="complete"}': "0+100x90",
        },
    ),
    Alert(
        name="HybridKVGroupLosesHits",
        query=Ratio(
            Rate("vllm:hybridkv_lost_tokens_total"),
            (Rate("vllm:hybridkv_lost_tokens_total"), Rate("vllm:hybridkv_hit_tokens_total")),
        ),
        above=0.5,
        for_="30m",
        severity=Severity.INFO,
        summary="More than half of what the full groups hold cannot be used, for want of states or windows.",
        action="See the panel Tokens lost to a kind of group. For recurrent: lower chunk_tokens or keep more states.",
        firing={
            'vllm:hybridkv_lost_tokens_total{limiting_kind="recurrent"}': "0+900x90",
            "vllm:hybridkv_hit_tokens_total": "0+100x90",
        },
        quiet={
            'vllm:hybridkv_lost_tokens_total{limiting_kind="recurrent"}': "0+100x90",
            "vllm:hybridkv_hit_tokens_total": "0+900x90",
        },
    ),
    Alert(
        name="HybridKVTierTurnsOver",
        query=Ratio(
            Increase("vllm:hybridkv_evicted_bytes_total", by=("tier",)),
            (Value("vllm:hybridkv_tier_capacity_bytes", by=("tier",)),),
        ),
        above=1,
        for_="30m",
        severity=Severity.INFO,
        summary="The tier {{ $labels.tier }} replaces all that it holds every ten minutes.",
        action="Raise its capacity, or put a larger tier below it, if prefixes come back later than that.",
        firing={
            'vllm:hybridkv_evicted_bytes_total{tier="ram"}': "0+200x90",
            'vllm:hybridkv_tier_capacity_bytes{tier="ram"}': "1000x90",
        },
        quiet={
            'vllm:hybridkv_evicted_bytes_total{tier="ram"}': "0+20x90",
            'vllm:hybridkv_tier_capacity_bytes{tier="ram"}': "1000x90",
        },
    ),
    Alert(
        name="HybridKVStoreLoadsFail",
        query=Ratio(
            Rate("vllm:kv_connector_mc_failures_total", by=("connector",)),
            (Rate("vllm:kv_connector_mc_hits_total", by=("connector",)),),
        ),
        above=0.05,
        for_="10m",
        severity=Severity.WARNING,
        summary="More than one load in twenty of the store {{ $labels.connector }} fails.",
        action="See that store's own log; lower its load_weight meanwhile.",
        firing={
            'vllm:kv_connector_mc_failures_total{connector="disk"}': "0+10x90",
            'vllm:kv_connector_mc_hits_total{connector="disk"}': "0+100x90",
        },
        quiet={
            'vllm:kv_connector_mc_failures_total{connector="disk"}': "0+1x90",
            'vllm:kv_connector_mc_hits_total{connector="disk"}': "0+100x90",
        },
    ),
    Alert(
        name="HybridKVStoreDoesNotAnswer",
        query=Ratio(
            Rate("vllm:kv_connector_mc_timeouts_total", by=("connector",)),
            (Rate("vllm:kv_connector_mc_queries_total", by=("connector",)),),
        ),
        above=0.05,
        for_="10m",
        severity=Severity.WARNING,
        summary="More than one request in twenty waits for the store {{ $labels.connector }} in vain.",
        action="Look at that store, or take it out of connectors.",
        firing={
            'vllm:kv_connector_mc_timeouts_total{connector="peer"}': "0+10x90",
            'vllm:kv_connector_mc_queries_total{connector="peer"}': "0+100x90",
        },
        quiet={
            'vllm:kv_connector_mc_timeouts_total{connector="peer"}': "0+1x90",
            'vllm:kv_connector_mc_queries_total{connector="peer"}': "0+100x90",
        },
    ),
    Alert(
        name="HybridKVStoreAnswersTooLate",
        query=Ratio(
            Rate("vllm:kv_connector_mc_unanswered_total", by=("connector",)),
            (Rate("vllm:kv_connector_mc_queries_total", by=("connector",)),),
        ),
        above=0.5,
        for_="10m",
        severity=Severity.WARNING,
        summary="More than half of the requests are admitted before the store {{ $labels.connector }} has answered.",
        action="Look at that store. Nobody waits for it beside one that answers: take it out of connectors, or let it "
        "be a tier of the other.",
        firing={
            'vllm:kv_connector_mc_unanswered_total{connector="peer"}': "0+60x90",
            'vllm:kv_connector_mc_queries_total{connector="peer"}': "0+100x90",
        },
        quiet={
            'vllm:kv_connector_mc_unanswered_total{connector="peer"}': "0+40x90",
            'vllm:kv_connector_mc_queries_total{connector="peer"}': "0+100x90",
        },
    ),
    Alert(
        name="HybridKVCountsBelowZero",
        query=Increase("vllm:kv_connector_mc_clamped_tokens_total", by=("connector",)),
        above=0,
        for_="0m",
        severity=Severity.INFO,
        summary="The store {{ $labels.connector }} counted less than nothing; it was taken as nothing.",
        action="Report a bug with the warning in the log, which carries the numbers.",
        firing={'vllm:kv_connector_mc_clamped_tokens_total{connector="ram"}': "0x50 128x40"},
        quiet={'vllm:kv_connector_mc_clamped_tokens_total{connector="ram"}': "128x90"},
    ),
)
