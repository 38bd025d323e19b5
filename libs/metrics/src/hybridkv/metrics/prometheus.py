"""Export of counts to Prometheus. The caller passes the metric classes; no client library is imported.

vLLM passes the classes of prometheus_client, or its wrappers of Ray's classes; both have `labels`, `inc`, `set`,
`observe`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hybridkv.metrics.counts import Counts
from hybridkv.metrics.declaration import Catalogue, Kind, Metric, MetricsError

MetricClass: TypeAlias = Callable[..., Any]


class PrometheusSink:
    """Prometheus metrics of a catalogue, one per declaration.

    The engine's `labelnames` come before the declared labels; `labelvalues_per_engine` has their values by engine
    index. Counters and histograms without labels, or with `starts_at_zero`, start at zero. All other series appear with
    their first count. Metrics with an unconfigured label are not exported.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        counter_cls: MetricClass,
        gauge_cls: MetricClass,
        histogram_cls: MetricClass,
        labelnames: Sequence[str],
        labelvalues_per_engine: Mapping[int, Sequence[object]],
    ) -> None:
        self._catalogue = catalogue
        self._labelvalues = {engine: tuple(values) for engine, values in labelvalues_per_engine.items()}
        classes: dict[Kind, MetricClass] = {
            Kind.COUNTER: counter_cls,
            Kind.GAUGE: gauge_cls,
            Kind.HISTOGRAM: histogram_cls,
        }
        self._metrics: dict[str, Any] = {}
        for metric in catalogue.metrics:
            labels = metric.series_labels
            if labels is None:
                continue
            self._metrics[metric.name] = _make(classes[metric.kind], metric, [*labelnames, *metric.label_names])
            if metric.kind is not Kind.GAUGE and (metric.starts_at_zero or not labels):
                series = itertools.product(*(label.values for label in labels))
                for engine, values in itertools.product(self._labelvalues, series):
                    self._child(metric.name, engine, values)

    def observe(self, counts: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add `Counts.to_dict()` of one engine. `MetricsError` if it does not fit; nothing is added then."""
        if engine_idx not in self._labelvalues:
            raise MetricsError("engine_idx", f"one of {sorted(self._labelvalues)}", engine_idx)
        data = Counts.from_dict(counts, self._catalogue).data()
        for name, values, amount in data.counters:
            self._child(name, engine_idx, values).inc(amount)
        for name, values, value in data.gauges:
            self._child(name, engine_idx, values).set(value)
        for name, values, buckets in data.histograms:
            child = self._child(name, engine_idx, values)
            bounds = self._catalogue.metric(name, Kind.HISTOGRAM).buckets
            for position, (count, total) in enumerate(buckets):
                for _ in range(count):
                    child.observe(_mean_within(bounds, position, total / count))

    def _child(self, name: str, engine_idx: int, values: Sequence[str]) -> Any:
        labelvalues = (*self._labelvalues[engine_idx], *values)
        metric = self._metrics[name]
        return metric.labels(*labelvalues) if labelvalues else metric


def _make(metric_cls: MetricClass, metric: Metric, labelnames: list[str]) -> Any:
    arguments: dict[str, Any] = {"name": metric.name, "documentation": metric.help, "labelnames": labelnames}
    if metric.kind is Kind.GAUGE:
        arguments["multiprocess_mode"] = "mostrecent"
    if metric.kind is Kind.HISTOGRAM:
        arguments["buckets"] = list(metric.buckets)
    return metric_cls(**arguments)


def _mean_within(bounds: Sequence[float], position: int, mean: float) -> float:
    """Move the mean of a bucket back into the bucket if rounding moved it out."""
    actual = bisect.bisect_left(bounds, mean)
    if actual > position:
        return bounds[position]
    return math.nextafter(bounds[position - 1], math.inf) if actual < position else mean
