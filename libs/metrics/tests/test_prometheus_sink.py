"""Output of /metrics, as prometheus_client writes it."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybridkv.metrics import CATALOGUE, Counts, MetricsError, PrometheusSink

ENGINES = {0: ["tiny", "0"], 1: ["tiny", 1]}
TOKENS = "vllm:hybridkv_hit_tokens_total"
SECONDS = "vllm:hybridkv_load_seconds"


def make_sink() -> tuple[PrometheusSink, CollectorRegistry]:
    registry = CollectorRegistry()
    classes = [partial(metric_cls, registry=registry) for metric_cls in (Counter, Gauge, Histogram)]
    return PrometheusSink(CATALOGUE, *classes, ["model_name", "engine"], ENGINES), registry


def lines(registry: CollectorRegistry) -> list[str]:
    return generate_latest(registry).decode().splitlines()


def labels(engine: int, **own: str) -> dict[str, str]:
    return {"model_name": "tiny", "engine": str(engine), **own}


def test_a_counter_is_shown_with_the_engines_labels_first() -> None:
    sink, registry = make_sink()
    counts = Counts()
    counts.add("vllm:hybridkv_lookups_total", 3, result="miss", reason="not_stored")
    sink.observe(counts.to_dict(), 1)
    shown = [line for line in lines(registry) if line.startswith("vllm:hybridkv_lookups_total{")]
    assert shown == ['vllm:hybridkv_lookups_total{engine="1",model_name="tiny",reason="not_stored",result="miss"} 3.0']
    [metric] = [metric for metric in registry.collect() if metric.name == "vllm:hybridkv_lookups"]
    assert list(metric.samples[0].labels) == ["model_name", "engine", "result", "reason"]


def test_counters_add_up_over_observations() -> None:
    sink, registry = make_sink()
    counts = Counts()
    counts.add(TOKENS, 128)
    sink.observe(counts.to_dict())
    sink.observe(counts.to_dict())
    assert registry.get_sample_value(TOKENS, labels(0)) == 256


def test_series_without_labels_start_at_zero_and_others_appear_when_counted() -> None:
    _, registry = make_sink()
    assert registry.get_sample_value(TOKENS, labels(1)) == 0
    assert registry.get_sample_value(f"{SECONDS}_count", labels(1)) == 0
    for name in ("stores_total", "move_seconds", "tier_used_bytes"):
        assert not [line for line in lines(registry) if line.startswith(f"vllm:hybridkv_{name}")]


def test_a_metric_declared_so_starts_at_zero_in_every_series() -> None:
    _, registry = make_sink()
    assert registry.get_sample_value("vllm:hybridkv_load_failures_total", labels(1, reason="checksum")) == 0


def test_a_gauge_shows_its_last_value() -> None:
    sink, registry = make_sink()
    for used in (10, 4):
        counts = Counts()
        counts.set("vllm:hybridkv_tier_used_bytes", used, tier="ram")
        sink.observe(counts.to_dict())
    assert registry.get_sample_value("vllm:hybridkv_tier_used_bytes", labels(0, tier="ram")) == 4


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0001, 0.1, 0.3, 0.7, 10.0, 11.5]) | st.floats(0, 20), max_size=30))
def test_a_histogram_equals_direct_observation(observations: list[float]) -> None:
    sink, registry = make_sink()
    counts = Counts()
    for value in observations:
        counts.observe(SECONDS, value)
    sink.observe(counts.to_dict())
    direct_registry = CollectorRegistry()
    buckets = next(metric.buckets for metric in CATALOGUE.metrics if metric.name == SECONDS)
    direct = Histogram("direct", "Direct.", buckets=buckets, registry=direct_registry)
    for value in observations:
        direct.observe(value)
    for bound in [*map(str, buckets), "+Inf"]:
        shown = registry.get_sample_value(f"{SECONDS}_bucket", labels(0, le=bound))
        assert shown == direct_registry.get_sample_value("direct_bucket", {"le": bound})
    shown_sum = registry.get_sample_value(f"{SECONDS}_sum", labels(0))
    assert shown_sum == pytest.approx(direct_registry.get_sample_value("direct_sum"), rel=1e-9)


def test_help_and_type_come_from_the_declaration() -> None:
    _, registry = make_sink()
    shown = set(lines(registry))
    for metric in CATALOGUE.metrics:
        if metric.series_labels is None:
            continue
        assert {f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"} <= shown


def test_a_metric_with_an_unconfigured_label_is_not_shown() -> None:
    _, registry = make_sink()
    assert "kv_connector_mc" not in generate_latest(registry).decode()


def test_a_configured_label_takes_each_of_its_values() -> None:
    registry = CollectorRegistry()
    classes = [partial(metric_cls, registry=registry) for metric_cls in (Counter, Gauge, Histogram)]
    PrometheusSink(
        CATALOGUE.only_with_label("connector", ["fast", "slow"]), *classes, ["model_name", "engine"], ENGINES
    )
    clamped = "vllm:kv_connector_mc_clamped_tokens_total"
    for engine, store in ((0, "fast"), (1, "slow")):
        assert registry.get_sample_value(clamped, labels(engine, connector=store)) == 0
    assert "hybridkv" not in generate_latest(registry).decode()


def test_invalid_data_are_refused_as_a_whole() -> None:
    sink, registry = make_sink()
    with pytest.raises(MetricsError):
        sink.observe({"counters": [[TOKENS, [], 5], ["nonsense", [], 1]]})
    assert registry.get_sample_value(TOKENS, labels(0)) == 0


def test_a_counter_is_not_decreased() -> None:
    sink, registry = make_sink()
    with pytest.raises(MetricsError):
        sink.observe({"counters": [[TOKENS, [], -5]]})
    assert registry.get_sample_value(TOKENS, labels(0)) == 0


def test_an_unknown_engine_is_refused() -> None:
    sink, _ = make_sink()
    with pytest.raises(MetricsError, match="engine_idx"):
        sink.observe({}, 7)


def test_a_sink_without_engine_labels_works() -> None:
    registry = CollectorRegistry()
    classes = [partial(metric_cls, registry=registry) for metric_cls in (Counter, Gauge, Histogram)]
    sink = PrometheusSink(CATALOGUE, *classes, [], {0: []})
    counts = Counts()
    counts.add(TOKENS, 2)
    sink.observe(counts.to_dict())
    assert registry.get_sample_value(TOKENS) == 2
