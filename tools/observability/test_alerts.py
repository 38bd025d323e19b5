"""The alerts use declared metrics only. Tests in tests/observability check with promtool when the alerts fire."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from reference import read_alerts, render
from repository import PAGE, RULES, RUNBOOK, TESTS, read

from hybridkv.metrics import CATALOGUE, Kind, Metric

ALERTS = read_alerts(read(RULES))
CASES: list[dict[str, Any]] = yaml.safe_load(read(TESTS))["tests"]
SERIES = r"(vllm:\w+)(?:\{([^}]*)\})?"
each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])


def named(expression: str) -> list[tuple[Metric, dict[str, list[str]]]]:
    """The metrics of an expression, with the label values that it selects."""
    found = []
    for name, selectors in re.findall(SERIES, expression):
        chosen = {label: values.split("|") for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selectors)}
        found.append((CATALOGUE.named(name), chosen))
    return found


def assert_declared(metric: Metric, chosen: dict[str, list[str]]) -> None:
    labels = {label.name: label for label in metric.labels}
    for label, values in chosen.items():
        if label not in ("model_name", "engine"):
            assert label in labels, f"{metric.name} has no label {label}"
            assert set(values) <= set(getattr(labels[label], "values", values)), (metric.name, label, values)


def test_the_reference_page_is_up_to_date() -> None:
    hint = f"run: tools/bazel run //tools/observability:reference > {PAGE}"
    assert read(PAGE) == render(CATALOGUE, ALERTS), hint


@each_alert
def test_an_alert_uses_declared_metrics_only(alert: dict[str, Any]) -> None:
    found = named(alert["expr"])
    assert found
    for metric, chosen in found:
        assert_declared(metric, chosen)


@each_alert
def test_an_alert_states_the_problem_and_the_remedy(alert: dict[str, Any]) -> None:
    assert re.fullmatch(r"HybridKV[A-Za-z]+", alert["alert"])
    assert alert["annotations"].keys() == {"summary", "action", "runbook"}
    assert all(alert["annotations"][part].endswith(".") for part in ("summary", "action"))
    assert alert["labels"]["severity"] in ("critical", "warning", "info")


def test_the_runbook_has_exactly_one_paragraph_for_each_alert() -> None:
    paragraphs = re.findall(r"^### (\w+)\n\n[\w`]", read(RUNBOOK), re.MULTILINE)
    assert sorted(paragraphs) == sorted(alert["alert"] for alert in ALERTS)


@each_alert
def test_an_alert_links_to_its_paragraph_of_the_runbook(alert: dict[str, Any]) -> None:
    assert alert["annotations"]["runbook"] == f"{RUNBOOK}#{alert['alert'].lower()}"


@each_alert
def test_an_alert_about_tiers_names_the_tier(alert: dict[str, Any]) -> None:
    if any("tier" in metric.label_names for metric, _ in named(alert["expr"])):
        assert re.search(r"by \(model_name, engine, tier\)", alert["expr"])
        assert "{{ $labels.tier }}" in alert["annotations"]["summary"]


@each_alert
def test_series_of_alerts_that_fire_on_one_event_begin_at_zero(alert: dict[str, Any]) -> None:
    """Prometheus sees no increase if a series begins at 1, so such a series must begin at 0."""
    if re.search(r"increase.*> 0$", alert["expr"]):
        assert all(metric.starts_at_zero for metric, _ in named(alert["expr"]))


def test_the_test_series_of_alerts_are_declared() -> None:
    for case in CASES:
        for series in case["input_series"]:
            [(metric, chosen)] = named(series["series"])
            assert_declared(metric, chosen)
            assert chosen.keys() == {"model_name", "engine", *metric.label_names}, series
            assert metric.kind is not Kind.HISTOGRAM


def test_each_alert_is_tested_firing_and_quiet() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert [case["name"] for case in CASES] == [f"{name} {claim}" for name in names for claim in ("fires", "is quiet")]
    for case in CASES:
        [test] = case["alert_rule_test"]
        assert test["alertname"] == case["name"].split()[0]
        assert bool(test["exp_alerts"]) == case["name"].endswith("fires")
