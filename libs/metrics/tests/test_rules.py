"""The alert rules are those that were declared. That they fire and are quiet is tested by promtool, in
tests/observability."""

from __future__ import annotations

import dataclasses
import re

import pytest
from repository import generated

from hybridkv.metrics import CATALOGUE, MetricsError
from hybridkv.metrics.alerts import ALERTS, Alert
from hybridkv.metrics.promql import Rate, metrics_of
from hybridkv.metrics.reference import render
from hybridkv.metrics.rules import expression, render_rules, render_tests

RULES = "deploy/prometheus/hybridkv-alerts.yml"
TESTS = "deploy/prometheus/hybridkv-alerts-test.yml"


def test_the_rules_are_the_generated_ones() -> None:
    assert generated(RULES) == render_rules(ALERTS, CATALOGUE), (
        f"run: python -m hybridkv.metrics.rules alerts > {RULES}"
    )


def test_the_tests_of_the_rules_are_the_generated_ones() -> None:
    assert generated(TESTS) == render_tests(ALERTS), f"run: python -m hybridkv.metrics.rules tests > {TESTS}"


def test_an_alert_is_declared_once() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_what_is_wrong_and_what_to_do(alert: Alert) -> None:
    assert re.fullmatch(r"HybridKV[A-Za-z]+", alert.name)
    assert alert.summary.endswith(".") and alert.action.endswith(".")
    assert f"`{alert.name}`" in render(CATALOGUE)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_the_series_that_prove_an_alert_are_declared(alert: Alert) -> None:
    for series in (*alert.firing, *alert.quiet):
        name, _, labels = series.partition("{")
        metric = CATALOGUE.named(name)
        assert set(re.findall(r'(\w+)="', labels)) == set(metric.label_names), series
        for label in metric.series_labels or ():
            assert re.findall(rf'{label.name}="(\w+)"', labels)[0] in label.values, series


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_about_tiers_says_which(alert: Alert) -> None:
    labels = {label for name in metrics_of(alert.query) for label in CATALOGUE.named(name).label_names}
    if "tier" in labels:
        assert re.search(r"by \(model_name, engine, tier\)", expression(alert, CATALOGUE)), alert.name
        assert "{{ $labels.tier }}" in alert.summary


def test_an_alert_on_what_is_not_declared_is_refused() -> None:
    alert = dataclasses.replace(ALERTS[0], query=Rate("vllm:hybridkv_unheard_of_total"))
    with pytest.raises(MetricsError, match="catalogue"):
        expression(alert, CATALOGUE)


def test_each_alert_is_tested_both_ways() -> None:
    text = render_tests(ALERTS)
    for alert in ALERTS:
        assert f'"{alert.name} fires"' in text and f'"{alert.name} is quiet"' in text
    assert text.count("exp_alerts: []") == len(ALERTS)
