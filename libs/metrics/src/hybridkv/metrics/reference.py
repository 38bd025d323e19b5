"""Writes the reference page: `python -m hybridkv.metrics.reference > docs/reference/metrics.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from hybridkv.metrics.alerts import ALERTS, Alert
from hybridkv.metrics.catalogue import CATALOGUE
from hybridkv.metrics.declaration import Catalogue, ConfiguredLabel, Label, Metric

_HEAD = """# Metrics

Generated from `hybridkv.metrics.CATALOGUE` by `python -m hybridkv.metrics.reference`; a test compares the two.
vLLM puts its own labels (`model_name`, `engine`) before these. Each has a panel in `deploy/grafana/hybridkv.json`;
[Observing](../guides/observing.md) says how to use that and the alerts.

| name | kind | unit | labels | meaning |
| --- | --- | --- | --- | --- |
"""


_ALERTS_HEAD = """
## Alerts

`deploy/prometheus/hybridkv-alerts.yml`. An alert carries the labels `model_name`, `engine` and `severity`.

| alert | severity | after | what is wrong | what to do |
| --- | --- | --- | --- | --- |
"""


def render(catalogue: Catalogue, alerts: Sequence[Alert] = ALERTS) -> str:
    """The whole page."""
    rows = "".join(f"| {' | '.join(_cells(metric))} |\n" for metric in catalogue.metrics)
    histograms = [metric for metric in catalogue.metrics if metric.buckets]
    buckets = "".join(f"- `{metric.name}`: {', '.join(map(_bound, metric.buckets))}\n" for metric in histograms)
    told = "".join(
        f"| `{alert.name}` | {alert.severity} | {alert.for_} | {_label_words(alert.summary)} | {alert.action} |\n"
        for alert in alerts
    )
    return f"{_HEAD}{rows}\n## Buckets\n\nUpper bounds, in the unit of the metric.\n\n{buckets}{_ALERTS_HEAD}{told}"


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
    sys.stdout.write(render(CATALOGUE))
