"""Selection counts add up in any order of merges, survive encoding, and reach Prometheus for each store."""

from __future__ import annotations

import re
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybridkv.metrics import CATALOGUE, ChildSelection, Kind, MetricsError, PrometheusSink, SelectionStats, TokenClamp
from hybridkv.metrics.selection import COUNTERS

# Multiples of 2**-10 add up without rounding, so that the laws hold exactly.
exact_numbers = st.integers(min_value=0, max_value=20 << 10).map(lambda number: number / 1024)
counts = st.integers(min_value=0, max_value=1 << 20)
children = st.builds(
    ChildSelection,
    **{name: exact_numbers if name == "load_seconds" else counts for name in COUNTERS},
    pending_loads=st.none() | st.integers(0, 9),
)
all_stats = st.dictionaries(st.sampled_from(["ram", "disk", "peer"]), children).map(SelectionStats)
never = TokenClamp(pytest.fail, lambda: 0.0)


def merged(*parts: SelectionStats) -> SelectionStats:
    total = SelectionStats()
    for part in parts:
        total.merge(part)
    return total


@given(all_stats, all_stats, all_stats)
def test_merging_ignores_grouping_of_selections(a: SelectionStats, b: SelectionStats, c: SelectionStats) -> None:
    assert merged(merged(a, b), c) == merged(a, merged(b, c))


@given(all_stats, all_stats)
def test_merging_selections_ignores_order_except_for_pending_loads(a: SelectionStats, b: SelectionStats) -> None:
    there, back = merged(a, b), merged(b, a)
    for one in (there, back):
        for child in one.children.values():
            child.pending_loads = None
    assert there == back


def test_the_last_number_of_pending_loads_counts() -> None:
    early, late, elsewhere = (SelectionStats({"ram": ChildSelection(pending_loads=n)}) for n in (5, 2, None))
    assert merged(early, late, elsewhere).children["ram"].pending_loads == 2


@given(all_stats, all_stats)
def test_merging_a_selection_does_not_change_the_other(a: SelectionStats, b: SelectionStats) -> None:
    before = b.to_dict()
    a.merge(b)
    a.merge(b)
    assert b.to_dict() == before


@given(all_stats)
def test_a_selection_survives_encoding(a: SelectionStats) -> None:
    for encoding in (msgspec.msgpack, msgspec.json):
        assert SelectionStats.from_dict(encoding.decode(encoding.encode(a.to_dict()))) == a


@given(all_stats, all_stats)
def test_taking_a_selection_leaves_nothing_and_loses_nothing(a: SelectionStats, b: SelectionStats) -> None:
    whole = merged(a, b)
    taken = a.take()
    assert a.is_empty() and not a.children
    a.merge(b)
    assert merged(taken, a) == whole


def test_invalid_selections_are_refused() -> None:
    for plain in ({"ram": {"querys": 1}}, {"ram": 3}, {"ram": {"hits": "many"}}):
        with pytest.raises(MetricsError, match="SelectionStats"):
            SelectionStats.from_dict(plain)


def test_every_field_has_a_metric_and_every_metric_a_field() -> None:
    declared = {metric.name: metric.kind for metric in CATALOGUE.metrics if "kv_connector_mc" in metric.name}
    expected = {f"vllm:kv_connector_mc_{field}_total": Kind.COUNTER for field in COUNTERS}
    assert declared == expected | {"vllm:kv_connector_mc_pending_loads": Kind.GAUGE}


def test_a_selection_is_shown_for_each_store() -> None:
    registry = CollectorRegistry()
    catalogue = CATALOGUE.only_with_label("connector", ["ram", "disk"])
    classes = [partial(metric, registry=registry) for metric in (Counter, Gauge, Histogram)]
    sink = PrometheusSink(catalogue, *classes, ["model_name", "engine"], {0: ["tiny", "0"]})
    stats = SelectionStats()
    stats.child("ram").merge(ChildSelection(queries=3, hits=2, hit_tokens=640, misses=1, pending_loads=1))
    sink.observe(stats.counts(catalogue, never.clamp).to_dict())
    text = generate_latest(registry).decode()
    for name, value in (("queries_total", 3), ("hits_total", 2), ("hit_tokens_total", 640), ("misses_total", 1)):
        assert f'vllm:kv_connector_mc_{name}{{connector="ram",engine="0",model_name="tiny"}} {value}.0' in text
    assert 'vllm:kv_connector_mc_pending_loads{connector="ram",engine="0",model_name="tiny"} 1.0' in text


def test_a_negative_count_is_shown_as_zero_and_in_its_own_counter() -> None:
    texts: list[str] = []
    catalogue = CATALOGUE.only_with_label("connector", ["ram"])
    stats = SelectionStats({"ram": ChildSelection(hits=1, hit_tokens=-128)})
    totals = stats.counts(catalogue, TokenClamp(texts.append, lambda: 0.0).clamp).totals()
    assert totals["vllm:kv_connector_mc_clamped_tokens_total"] == 128
    assert totals.get("vllm:kv_connector_mc_hit_tokens_total", 0) == 0
    assert len(texts) == 1 and re.search(r"ram.hit_tokens counted -128", texts[0])


def test_an_unconfigured_store_is_not_shown() -> None:
    stats = SelectionStats({"other": ChildSelection(hits=1)})
    with pytest.raises(MetricsError, match="one of"):
        stats.counts(CATALOGUE.only_with_label("connector", ["ram"]), never.clamp)


def test_the_log_line_has_the_nonzero_counts() -> None:
    stats = SelectionStats({"ram": ChildSelection(hits=2, pending_loads=0), "disk": ChildSelection()})
    assert stats.nonzero_counts() == {"ram.hits": 2}
