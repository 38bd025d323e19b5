"""Writes the reference page: `python -m hybridkv.metrics.reference > docs/reference/metrics.md`."""

from __future__ import annotations

import sys

from hybridkv.metrics.catalogue import CATALOGUE, Catalogue, ConfiguredLabel, Label, Metric

_HEAD = """# Metrics

Generated from `hybridkv.metrics.CATALOGUE` by `python -m hybridkv.metrics.reference`; a test compares the two.
vLLM puts its own labels (`model_name`, `engine`) before these.

| name | kind | unit | labels | meaning |
| --- | --- | --- | --- | --- |
"""


def render(catalogue: Catalogue) -> str:
    """The whole page."""
    rows = "".join(f"| {' | '.join(_cells(metric))} |\n" for metric in catalogue.metrics)
    histograms = [metric for metric in catalogue.metrics if metric.buckets]
    buckets = "".join(
        f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}\n" for metric in histograms
    )
    return f"{_HEAD}{rows}\n## Buckets\n\nUpper bounds, in the unit of the metric.\n\n{buckets}"


def _cells(metric: Metric) -> list[str]:
    labels = "; ".join(f"`{label.name}`: {_values(label)}" for label in metric.labels)
    return [f"`{metric.name}`", str(metric.kind), metric.unit, labels, metric.help]


def _values(label: Label | ConfiguredLabel) -> str:
    if isinstance(label, ConfiguredLabel):
        return f"{label.meaning}, at most {label.max_values}"
    return ", ".join(f"`{value}`" if value else "(empty)" for value in label.values)


if __name__ == "__main__":
    sys.stdout.write(render(CATALOGUE))
