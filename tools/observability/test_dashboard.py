"""The dashboard shows every metric, and is valid for Grafana."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from dashboard import COLUMNS, all_panels, dashboard, render
from repository import DASHBOARD, read

from hybridkv.metrics import CATALOGUE, Kind, Metric, MetricsError, Panel, Section, View

BUILT_IN = {"__rate_interval"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard(CATALOGUE)["panels"] if panel["type"] != "row"]


def targets() -> list[dict[str, Any]]:
    return [target for panel in panels() for target in panel["targets"]]


def test_the_dashboard_is_up_to_date() -> None:
    assert read(DASHBOARD) == render(CATALOGUE), f"run: tools/bazel run //tools/observability:dashboard > {DASHBOARD}"


@pytest.mark.parametrize("metric", CATALOGUE.metrics, ids=lambda metric: metric.name)
def test_each_metric_is_shown_by_a_panel(metric: Metric) -> None:
    assert metric.panel is not None
    assert curves_of(metric)


def curves_of(metric: Metric) -> list[tuple[str, str]]:
    """Queries of a metric, each with the name of its curves."""
    named = re.compile(rf"{metric.name}{'_bucket' if metric.buckets else ''}\b")
    return [curve for panel in all_panels(CATALOGUE) for curve in panel.queries if named.search(curve[0])]


def test_each_metric_of_a_query_is_declared() -> None:
    suffixes = {Kind.HISTOGRAM: ("_bucket",), Kind.COUNTER: ("",), Kind.GAUGE: ("",)}
    known = {metric.name + suffix for metric in CATALOGUE.metrics for suffix in suffixes[metric.kind]}
    for target in targets():
        named = set(re.findall(r"vllm:\w+", target["expr"]))
        assert named and named <= known, target["expr"]


def test_each_query_selects_only_the_chosen_models_and_engines() -> None:
    for target in targets():
        num_selectors = len(re.findall(r"vllm:\w+", target["expr"]))
        for label in ("model_name", "engine"):
            assert target["expr"].count(f'{label}=~"${label}"') == num_selectors, target["expr"]


def test_each_query_about_a_store_selects_only_the_chosen_stores() -> None:
    for target in targets():
        assert target["expr"].count('connector=~"$connector"') == target["expr"].count("vllm:kv_connector_mc_")


def test_each_variable_is_defined_and_used() -> None:
    whole = dashboard(CATALOGUE)
    defined = {variable["name"] for variable in whole["templating"]["list"]}
    text = json.dumps(whole["panels"])
    used = set(re.findall(r"\$\{?(\w+)\}?", text)) - BUILT_IN
    assert used == defined == {"datasource", "model_name", "engine", "connector"}


def test_each_panel_and_target_uses_the_chosen_data_source() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert all(part["datasource"] == chosen for part in [*panels(), *targets()])


def test_each_legend_uses_only_labels_that_its_query_keeps() -> None:
    for target in targets():
        kept = set(re.findall(r"\w+", re.findall(r"by \(([^)]*)\)", target["expr"])[0]))
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept


def test_curves_of_a_panel_have_different_names() -> None:
    for panel in panels():
        names = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(names)) == len(names), panel["title"]
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + i) for i in range(len(names))]


def test_panels_have_different_ids_and_do_not_overlap() -> None:
    everything = dashboard(CATALOGUE)["panels"]
    assert sorted(panel["id"] for panel in everything) == list(range(1, len(everything) + 1))
    covered: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= COLUMNS
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not covered & cells, panel["title"]
        covered |= cells


@pytest.mark.parametrize("metric", [m for m in CATALOGUE.metrics if "tier" in m.label_names], ids=lambda m: m.name)
def test_tiers_are_distinguished_in_every_panel(metric: Metric) -> None:
    for query, legend in curves_of(metric):
        assert "{{tier}}" in legend and re.search(r"by \([^)]*\btier\b", query), legend


def test_a_panel_that_cannot_show_its_metric_is_refused() -> None:
    with pytest.raises(MetricsError, match="panel"):
        Metric("x_total", Kind.COUNTER, "bytes", "", panel=Panel(Section.LOADS, "X", view=View.QUANTILES))


def test_metrics_with_the_same_title_share_a_panel() -> None:
    declared = {panel.title: panel for panel in all_panels(CATALOGUE)}
    assert [legend for _, legend in declared["Space"].queries] == ["used {{tier}}", "capacity {{tier}}"]
