"""Writes the reference page: `tools/bazel run //tools/observability:reference > docs/reference/metrics.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hybridkv.metrics import CATALOGUE, Catalogue, ConfiguredLabel, Label, Metric

RULES = Path("deploy/prometheus/hybridkv-alerts.yml")

_HEAD = """# Metrics

Generated from `hybridkv.metrics.CATALOGUE` by `tools/observability/reference.py`; a test compares the two.
vLLM puts its own labels (`model_name`, `engine`) before these. Each metric has a panel in the dashboard
`deploy/grafana/hybridkv.json`; [Observing](../guides/observing.md) says how to use the dashboard and the alerts.

| name | kind | unit | labels | meaning |
| --- | --- | --- | --- | --- |
"""


_ALERTS_HEAD = """
## Alerts

`deploy/prometheus/hybridkv-alerts.yml`. An alert carries the labels `model_name`, `engine` and `severity`;
its name links to its paragraph of the [runbook](../guides/runbook.md).

| alert | severity | after | what is wrong | what to do |
| --- | --- | --- | --- | --- |
"""


def read_alerts(rules: str) -> list[dict[str, Any]]:
    """The alerts of a file of rules."""
    alerts: list[dict[str, Any]] = yaml.safe_load(rules)["groups"][0]["rules"]
    return alerts


def render(catalogue: Catalogue, alerts: Sequence[Mapping[str, Any]]) -> str:
    """The whole page."""
    rows = "".join(f"| {' | '.join(_cells(metric))} |\n" for metric in catalogue.metrics)
    histograms = [metric for metric in catalogue.metrics if metric.buckets]
    buckets = "".join(f"- `{metric.name}`: {', '.join(map(_bound, metric.buckets))}\n" for metric in histograms)
    told = "".join(f"| {' | '.join(_alert_cells(alert))} |\n" for alert in alerts)
    return f"{_HEAD}{rows}\n## Buckets\n\nUpper bounds, in the unit of the metric.\n\n{buckets}{_ALERTS_HEAD}{told}"


def _alert_cells(alert: Mapping[str, Any]) -> list[str]:
    texts = alert["annotations"]
    severity, summary = alert["labels"]["severity"], _label_words(texts["summary"])
    name = f"[`{alert['alert']}`](../guides/runbook.md#{alert['alert'].lower()})"
    return [name, severity, alert["for"], summary, texts["action"]]


def _bound(bound: float) -> str:
    return str(int(bound)) if bound.is_integer() else f"{bound:g}"


def _label_words(text: str) -> str:
    return re.sub(r"{{ \$labels\.(\w+) }}", r"*\1*", text)


def _cells(metric: Metric) -> list[str]:
    labels = "; ".join(f"`{label.name}`: {_values(label)}" for label in metric.labels)
    return [f"`{metric.name}`", str(metric.kind), metric.unit, labels, metric.help]


def _values(label: Label | ConfiguredLabel) -> str:
    if isinstance(label, ConfiguredLabel):
        return f"{label.meaning}, at most {label.max_values}"
    return ", ".join(f"`{value}`" if value else "(empty)" for value in label.values)


if __name__ == "__main__":
    sys.stdout.write(render(CATALOGUE, read_alerts(RULES.read_text())))
