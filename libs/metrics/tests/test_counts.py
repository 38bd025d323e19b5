"""Counts add up in any order of merges, survive encoding, and refuse undeclared names."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.metrics import CATALOGUE, MAX_CHILDREN, Catalogue, ConfiguredLabel, Counts, Kind, Metric, MetricsError

LOOKUPS = "vllm:hybridkv_lookups_total"
TOKENS = "vllm:hybridkv_hit_tokens_total"
USED = "vllm:hybridkv_tier_used_bytes"
SECONDS = "vllm:hybridkv_load_seconds"

# Multiples of 2**-10 add up without rounding, so that the laws hold exactly.
exact_numbers = st.integers(min_value=0, max_value=20 << 10).map(lambda number: number / 1024)


def record(counts: Counts, metric: Metric, value: float, labels: dict[str, str]) -> None:
    method = {Kind.COUNTER: counts.add, Kind.GAUGE: counts.set, Kind.HISTOGRAM: counts.observe}[metric.kind]
    method(metric.name, value, **labels)


@st.composite
def all_counts(draw: st.DrawFn, kinds: tuple[Kind, ...] = tuple(Kind)) -> Counts:
    counts = Counts()
    metrics = [metric for metric in CATALOGUE.metrics if metric.kind in kinds and metric.series_labels is not None]
    for metric in draw(st.lists(st.sampled_from(metrics), max_size=8)):
        labels = {label.name: draw(st.sampled_from(label.values)) for label in metric.series_labels or ()}
        record(counts, metric, draw(exact_numbers), labels)
    return counts


def series(counts: Counts) -> tuple[dict[object, object], ...]:
    """Comparable form: the order of the series does not matter."""
    data = counts.data()
    return tuple(
        {(name, values): value for name, values, value in lines}
        for lines in (data.counters, data.gauges, data.histograms)
    )


def merged(*parts: Counts) -> Counts:
    total = Counts()
    for part in parts:
        total.merge(part)
    return total


@given(all_counts(), all_counts(), all_counts())
def test_merging_ignores_grouping(a: Counts, b: Counts, c: Counts) -> None:
    assert series(merged(merged(a, b), c)) == series(merged(a, merged(b, c)))


@given(all_counts((Kind.COUNTER, Kind.HISTOGRAM)), all_counts((Kind.COUNTER, Kind.HISTOGRAM)))
def test_merging_counters_and_histograms_ignores_order(a: Counts, b: Counts) -> None:
    assert series(merged(a, b)) == series(merged(b, a))


@given(all_counts())
def test_merging_empty_counts_changes_nothing(a: Counts) -> None:
    assert series(merged(a, Counts())) == series(merged(Counts(), a)) == series(a)


@given(all_counts(), all_counts())
def test_merging_does_not_change_the_other_counts(a: Counts, b: Counts) -> None:
    before = b.to_dict()
    a.merge(b)
    a.merge(b)
    assert b.to_dict() == before


@given(all_counts())
def test_counts_survive_encoding(a: Counts) -> None:
    plain = a.to_dict()
    for encoding in (msgspec.msgpack, msgspec.json):
        assert series(Counts.from_dict(encoding.decode(encoding.encode(plain)))) == series(a)


@given(all_counts(), all_counts())
def test_taking_leaves_nothing_and_loses_nothing(a: Counts, b: Counts) -> None:
    whole = merged(a, b)
    taken = a.take()
    assert a.is_empty()
    a.merge(b)
    assert series(merged(taken, a)) == series(whole)


@given(st.lists(exact_numbers, max_size=20))
def test_a_histogram_counts_and_sums_each_bucket(observations: list[float]) -> None:
    counts = Counts()
    for value in observations:
        counts.observe(SECONDS, value)
    bounds = [-math.inf, *CATALOGUE.metric(SECONDS, Kind.HISTOGRAM).buckets, math.inf]
    inside = [
        [value for value in observations if low < value <= high]
        for low, high in zip(bounds, bounds[1:], strict=False)  # noqa: RUF007
    ]
    expected = tuple((len(values), sum(values)) for values in inside)
    assert [buckets for _, _, buckets in counts.data().histograms] == ([expected] if observations else [])


def test_the_last_value_of_a_gauge_counts() -> None:
    early, late = Counts(), Counts()
    early.set(USED, 5, tier="ram")
    late.set(USED, 3, tier="ram")
    assert merged(early, late).totals() == {USED: 3}


def test_totals_sum_over_labels() -> None:
    counts = Counts()
    counts.add(LOOKUPS, 2, result="hit", reason="complete")
    counts.add(LOOKUPS, result="miss", reason="not_stored")
    counts.add(TOKENS, 128)
    counts.observe(SECONDS, 0.1)
    assert counts.totals() == {LOOKUPS: 3, TOKENS: 128}


def test_empty_data_are_empty_counts() -> None:
    assert Counts.from_dict({}).is_empty()


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("vllm:hybridkv_unheard_of_total", {}),
        (USED, {"tier": "ram"}),
        (LOOKUPS, {"result": "hit"}),
        (LOOKUPS, {"result": "hit", "reason": "complete", "extra": "x"}),
        (LOOKUPS, {"result": "maybe", "reason": "complete"}),
    ],
    ids=["unknown name", "not a counter", "label missing", "label too many", "unknown label value"],
)
def test_undeclared_names_and_labels_are_refused_and_change_nothing(name: str, labels: dict[str, str]) -> None:
    counts = Counts()
    with pytest.raises(MetricsError, match="expected"):
        counts.add(name, 1, **labels)
    assert counts.is_empty()


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    with pytest.raises(MetricsError, match=f"did you mean {TOKENS}"):
        Counts().add("vllm:hybridkv_hit_token_total")


@pytest.mark.parametrize("amount", [-1, -0.5, math.nan, math.inf])
def test_a_counter_never_decreases(amount: float) -> None:
    counts = Counts()
    for record_amount in (
        lambda: counts.add(TOKENS, amount),
        lambda: counts.observe(SECONDS, amount),
    ):
        with pytest.raises(MetricsError):
            record_amount()
    assert counts.is_empty()


@pytest.mark.parametrize(
    "plain",
    [
        {"counters": [[TOKENS, [], -1]]},
        {"counters": [[TOKENS, ["x"], 1]]},
        {"counters": [[LOOKUPS, ["hit", "sideways"], 1]]},
        {"counters": [["nonsense", [], 1]]},
        {"counters": [[TOKENS, []]]},
        {"gauges": [[TOKENS, [], 1]]},
        {"histograms": [[SECONDS, [], [[1, 1.0]]]]},
        {"histograms": [[SECONDS, [], [[-1, 1.0]] * 12]]},
        {"something": []},
    ],
)
def test_invalid_data_are_refused(plain: dict[str, object]) -> None:
    with pytest.raises(MetricsError):
        Counts.from_dict(plain)


def test_counts_of_different_catalogues_do_not_merge() -> None:
    with pytest.raises(MetricsError, match="same catalogue"):
        Counts().merge(Counts(Catalogue(())))


def test_the_number_of_series_is_bounded_by_the_catalogue() -> None:
    sizes = {
        metric.name: math.prod(
            label.max_values if isinstance(label, ConfiguredLabel) else len(label.values) for label in metric.labels
        )
        for metric in CATALOGUE.metrics
    }
    assert max(sizes.values()) <= 72
    assert sum(size for name, size in sizes.items() if name.startswith("vllm:hybridkv_")) <= 440
    assert sum(size for name, size in sizes.items() if name.startswith("vllm:kv_connector_mc_")) <= 14 * MAX_CHILDREN
