"""Writes the Grafana dashboard: `tools/bazel run //tools/observability:dashboard > deploy/grafana/hybridkv.json`.

In each section, panels that relate metrics to each other come first, then panels for all declared metrics. Needs no
Grafana.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hybridkv.metrics import CATALOGUE, Catalogue, Metric, Section, View

SCHEMA_VERSION: Final = 39
"""Version of the format in Grafana 11. Later versions of Grafana read it too."""
COLUMNS: Final = 24
PANEL_WIDTH: Final = 8
PANEL_HEIGHT: Final = 8
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
VARIABLES: Final = {
    "model_name": "vllm:hybridkv_hit_tokens_total",
    "engine": "vllm:hybridkv_hit_tokens_total",
    "connector": "vllm:kv_connector_mc_queries_total",
}
"""Variables of the dashboard, each with a metric that has a label of this name."""
WINDOW: Final = "$__rate_interval"
_QUANTILES: Final = (0.5, 0.99)
_UNITS: Final = {"bytes": "bytes", "seconds": "s"}
_UNITS_A_SECOND: Final = {"bytes": "Bps", "seconds": "percentunit", "tokens": "tokens/s"}


def series(name: str, *own: str) -> str:
    """The series of the chosen models, engines and stores; `own`: selectors of the metric's own labels."""
    chosen = [f'{label}=~"${label}"' for label in ("model_name", "engine")]
    if name.startswith("vllm:kv_connector_mc_"):
        chosen.append('connector=~"$connector"')
    return f"{name}{{{', '.join([*chosen, *own])}}}"


def total(inner: str, *by: str) -> str:
    """The sum of series over all labels but the engine's and `by`."""
    return f"sum by ({', '.join(('model_name', 'engine', *by))}) ({inner})"


def rate(name: str, *own: str) -> str:
    return f"rate({series(name, *own)}[{WINDOW}])"


def share(part: str, *whole: str) -> str:
    return f"{part} / {whole[0]}" if len(whole) == 1 else f"{part} / ({' + '.join(whole)})"


@dataclass(frozen=True, slots=True)
class DashboardPanel:
    """One panel: queries, each with the name of its curves, in which {{label}} stands for a label's value."""

    section: Section
    title: str
    unit: str
    description: str
    queries: tuple[tuple[str, str], ...]


OVERVIEW: Final = (
    DashboardPanel(
        Section.HITS,
        "Share of tokens from the tiers",
        "percentunit",
        "Of all tokens that were looked up: how many came from a tier rather than from the engine or from computing.",
        (
            (
                share(
                    total(rate("vllm:hybridkv_lookup_tokens_total", 'source!~"engine|compute"')),
                    total(rate("vllm:hybridkv_lookup_tokens_total")),
                ),
                "tiers",
            ),
        ),
    ),
    DashboardPanel(
        Section.HITS,
        "Share of found tokens that were lost",
        "percentunit",
        "Tokens that the full groups held and that could not be used, for want of a state or a window.",
        (
            (
                share(
                    total(rate("vllm:hybridkv_lost_tokens_total")),
                    total(rate("vllm:hybridkv_lost_tokens_total")),
                    total(rate("vllm:hybridkv_hit_tokens_total")),
                ),
                "lost",
            ),
        ),
    ),
    DashboardPanel(
        Section.LOADS,
        "Share of loads that failed",
        "percentunit",
        "A failed load is computed again, or ends its request, as kv_load_failure_policy says.",
        (
            (
                share(
                    total(rate("vllm:hybridkv_loads_total", 'outcome="failed"')),
                    total(rate("vllm:hybridkv_loads_total")),
                ),
                "failed",
            ),
        ),
    ),
    DashboardPanel(
        Section.TIERS,
        "Share of space in use",
        "percentunit",
        "A full tier is well used. Evictions show whether it is too small.",
        (
            (
                share(
                    total(series("vllm:hybridkv_tier_used_bytes"), "tier"),
                    total(series("vllm:hybridkv_tier_capacity_bytes"), "tier"),
                ),
                "{{tier}}",
            ),
        ),
    ),
    DashboardPanel(
        Section.CHOICE,
        "Share of requests that a store was chosen for",
        "percentunit",
        "Of the requests that were looked up in a store: how many the store was chosen to load.",
        (
            (
                share(
                    total(rate("vllm:kv_connector_mc_hits_total"), "connector"),
                    total(rate("vllm:kv_connector_mc_queries_total"), "connector"),
                ),
                "{{connector}}",
            ),
        ),
    ),
)


def all_panels(catalogue: Catalogue) -> list[DashboardPanel]:
    """All panels: section by section, panels that relate metrics first."""
    panels = [*OVERVIEW, *_declared(catalogue)]
    return [panel for section in Section for panel in panels if panel.section is section]


def _declared(catalogue: Catalogue) -> Iterator[DashboardPanel]:
    together: dict[tuple[Section, str], list[Metric]] = {}
    for metric in catalogue.metrics:
        if metric.panel is not None:
            together.setdefault((metric.panel.section, metric.panel.title), []).append(metric)
    for (section, title), metrics in together.items():
        views = {(metric.view, metric.unit) for metric in metrics}
        unit = _unit(metrics[0]) if len(views) == 1 else "short"
        description = "\n\n".join(metric.help for metric in metrics)
        queries = tuple(query for metric in metrics for query in _queries(metric, metrics))
        yield DashboardPanel(section, title, unit, description, queries)


def _queries(metric: Metric, beside: Sequence[Metric]) -> Iterator[tuple[str, str]]:
    by = metric.label_names
    names = [f"{{{{{label}}}}}" for label in by]
    if len(beside) > 1:
        names.insert(0, _difference(metric, beside))
    match metric.view:
        case View.RATE:
            yield total(rate(metric.name), *by), " ".join(names) or _plain(metric)
        case View.INCREASE:
            yield total(f"increase({series(metric.name)}[{WINDOW}])", *by), " ".join(names) or _plain(metric)
        case View.VALUE:
            yield total(series(metric.name), *by), " ".join(names) or _plain(metric)
        case View.QUANTILES:
            buckets = total(rate(f"{metric.name}_bucket"), *by, "le")
            for quantile in _QUANTILES:
                yield f"histogram_quantile({quantile:g}, {buckets})", " ".join([*names, f"p{100 * quantile:g}"])


def _plain(metric: Metric) -> str:
    name = metric.name.removesuffix("_total")
    for prefix in ("vllm:hybridkv_", "vllm:kv_connector_mc_"):
        name = name.removeprefix(prefix)
    return name.replace("_", " ")


def _difference(metric: Metric, beside: Sequence[Metric]) -> str:
    """Name of a metric without the first and last words that all metrics of the panel share."""
    words = [_plain(other).split() for other in beside]
    mine = _plain(metric).split()
    while len(mine) > 1 and all(len(other) > 1 and other[0] == words[0][0] for other in words):
        mine, words = mine[1:], [other[1:] for other in words]
    while len(mine) > 1 and all(len(other) > 1 and other[-1] == words[0][-1] for other in words):
        mine, words = mine[:-1], [other[:-1] for other in words]
    return " ".join(mine)


def _unit(metric: Metric) -> str:
    if metric.view is View.RATE:
        return _UNITS_A_SECOND.get(metric.unit, "ops")
    return _UNITS.get(metric.unit, "short")


def dashboard(catalogue: Catalogue) -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for section in Section:
        members = [panel for panel in all_panels(catalogue) if panel.section is section]
        panels.append(_row(section, len(panels) + 1, top))
        top += 1
        for position, panel in enumerate(members):
            down, across = divmod(position, COLUMNS // PANEL_WIDTH)
            place = {"x": across * PANEL_WIDTH, "y": top + down * PANEL_HEIGHT, "w": PANEL_WIDTH, "h": PANEL_HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
        top += -(-len(members) // (COLUMNS // PANEL_WIDTH)) * PANEL_HEIGHT
    return {
        "uid": "hybridkv",
        "title": "hybridkv",
        "description": "Generated from the declaration of hybridkv's metrics by tools/observability/dashboard.py.",
        "tags": ["vllm", "hybridkv"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": [_datasource(), *_variables()]},
        "panels": panels,
    }


def _row(section: Section, panel_id: int, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
    return {"id": panel_id, "type": "row", "title": str(section), "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: DashboardPanel, panel_id: int, place: dict[str, int]) -> dict[str, Any]:
    # Engines are separate curves only if the operator chose several.
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "expr": query,
            "legendFormat": f"{legend} (engine {{{{engine}}}})",
            "range": True,
            "instant": False,
        }
        for number, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _variables() -> Iterator[dict[str, Any]]:
    for name, metric in VARIABLES.items():
        query = f"label_values({CATALOGUE.named(metric).name}, {name})"
        yield {
            "name": name,
            "label": name,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "hide": 0,
        }


def render(catalogue: Catalogue) -> str:
    """The whole file."""
    return json.dumps(dashboard(catalogue), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render(CATALOGUE))
