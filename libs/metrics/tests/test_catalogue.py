"""The catalogue of metrics: valid names, kinds and labels."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hybridkv.metrics import CATALOGUE, Catalogue, ConfiguredLabel, Counts, Kind, Label, Metric, MetricsError


@pytest.mark.parametrize("metric", CATALOGUE.metrics, ids=lambda metric: metric.name)
def test_every_metric_has_a_valid_prometheus_name(metric: Metric) -> None:
    assert re.fullmatch(r"vllm:(hybridkv|kv_connector_mc)_[a-z_]+", metric.name)
    assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.label_names)
    assert metric.help.endswith(".")
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)


def test_an_invalid_metric_cannot_be_declared() -> None:
    for arguments in (
        {"name": "x", "kind": Kind.COUNTER},
        {"name": "x_total", "kind": Kind.COUNTER, "buckets": (1.0,)},
        {"name": "x", "kind": Kind.HISTOGRAM},
        {"name": "x", "kind": Kind.HISTOGRAM, "buckets": (2.0, 1.0)},
        {"name": "x", "kind": Kind.GAUGE, "labels": (Label("empty", ()),)},
        {"name": "x", "kind": Kind.GAUGE, "labels": (Label("twice", ("a", "a")),)},
        {"name": "x", "kind": Kind.GAUGE, "labels": (ConfiguredLabel("none", 0, "none"),)},
    ):
        with pytest.raises(MetricsError):
            Metric(unit="", help="", **arguments)  # type: ignore[arg-type]


def test_a_name_is_declared_once() -> None:
    metric = Metric("x", Kind.GAUGE, "bytes", "Bytes.")
    with pytest.raises(MetricsError, match="each name once"):
        Catalogue((metric, metric))


def with_configured_labels() -> Catalogue:
    label = ConfiguredLabel("store", 2, "stores")
    return Catalogue((Metric("x_total", Kind.COUNTER, "", "", (label,)), Metric("y_total", Kind.COUNTER, "", "")))


def test_a_configured_label_takes_only_the_configured_values() -> None:
    counts = Counts(with_configured_labels().only_with_label("store", ["fast", "slow"]))
    counts.add("x_total", 1, store="fast")
    with pytest.raises(MetricsError, match="one of"):
        counts.add("x_total", 1, store="other")


def test_a_label_that_was_not_configured_takes_no_value() -> None:
    with pytest.raises(MetricsError, match="configured"):
        Counts(with_configured_labels()).add("x_total", 1, store="fast")


def test_configuring_a_label_keeps_only_the_metrics_with_it() -> None:
    configured = with_configured_labels().only_with_label("store", ["fast"])
    assert [metric.name for metric in configured.metrics] == ["x_total"]


@pytest.mark.parametrize("values", [[], ["a", "a"], ["a", "b", "c"]], ids=["none", "twice the same", "too many"])
def test_the_values_of_a_configured_label_are_bounded(values: list[str]) -> None:
    with pytest.raises(MetricsError, match=r"x_total\.store"):
        with_configured_labels().only_with_label("store", values)


def test_an_unknown_label_cannot_be_configured() -> None:
    with pytest.raises(MetricsError, match="configured label"):
        with_configured_labels().only_with_label("shop", ["a"])


def test_metrics_import_neither_torch_nor_vllm_nor_prometheus() -> None:
    program = (
        "import sys, hybridkv.metrics\n"
        "sys.exit(', '.join({'torch', 'vllm', 'prometheus_client'} & set(sys.modules)) or 0)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
