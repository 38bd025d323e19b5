"""Counts of metrics that merge over steps, ranks and processes and serialize as plain data. No exporter.

A histogram keeps the count and the sum of each bucket, not the observations. So its size is bounded. An exporter whose
metric library only accepts single observations can still produce exact buckets and an exact sum.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from hybridkv.metrics.catalogue import CATALOGUE
from hybridkv.metrics.declaration import Catalogue, Kind, Metric, MetricsError

Series: TypeAlias = tuple[str, tuple[str, ...]]
"""Name of a metric, and values of its labels in declared order."""

CountAndSum: TypeAlias = tuple[int, float]
"""Number of observations in a bucket, and their sum."""

EMPTY_BUCKET: CountAndSum = (0, 0.0)


class CountsData(msgspec.Struct, forbid_unknown_fields=True):
    """Serialized form of `Counts`: [name, label values, value]; a histogram has one [count, sum] per bucket."""

    counters: list[tuple[str, tuple[str, ...], int | float]] = []
    gauges: list[tuple[str, tuple[str, ...], int | float]] = []
    histograms: list[tuple[str, tuple[str, ...], tuple[CountAndSum, ...]]] = []


class Counts:
    """Accumulates the metrics of a catalogue. `merge` adds the counts of another accumulator. For one thread.

    Raises `MetricsError` for a name, label or value that the catalogue does not allow. The counts do not change then.
    """

    def __init__(self, catalogue: Catalogue = CATALOGUE) -> None:
        self._catalogue = catalogue
        self._counters: dict[Series, int | float] = {}
        self._gauges: dict[Series, int | float] = {}
        self._histograms: dict[Series, tuple[CountAndSum, ...]] = {}
        self._known_series: dict[tuple[str, Kind, tuple[tuple[str, str], ...]], Series] = {}
        """Cache of checked series by name, kind and labels. The catalogue bounds its size."""

    def add(self, name: str, amount: int | float = 1, /, **labels: str) -> None:
        """Add `amount` >= 0 to a counter."""
        self._add(self._series(name, Kind.COUNTER, labels), amount)

    def set(self, name: str, value: int | float, /, **labels: str) -> None:
        """Set the value of a gauge."""
        self._set(self._series(name, Kind.GAUGE, labels), value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add one observation >= 0 to a histogram."""
        series = self._series(name, Kind.HISTOGRAM, labels)
        bounds = self._catalogue.metric(name, Kind.HISTOGRAM).buckets
        _require(name, value, is_negative_allowed=False)
        buckets = self._histograms.get(series) or (EMPTY_BUCKET,) * (len(bounds) + 1)
        place = bisect.bisect_left(bounds, value)
        count, total = buckets[place]
        self._histograms[series] = (*buckets[:place], (count + 1, total + float(value)), *buckets[place + 1 :])

    def merge(self, other: Counts) -> None:
        """Add the counts of `other`, which does not change.

        Counters and histograms add up, in any order and grouping. A gauge takes the value of `other`, so merge in order
        of time. `MetricsError` if the catalogues differ.
        """
        if other._catalogue is not self._catalogue and other._catalogue != self._catalogue:
            raise MetricsError("merge", "counts of the same catalogue", "another catalogue")
        for series, amount in other._counters.items():
            self._add(series, amount)
        for series, value in other._gauges.items():
            self._set(series, value)
        for series, buckets in other._histograms.items():
            self._add_buckets(series, buckets)

    def is_empty(self) -> bool:
        """True if nothing was counted, set or observed."""
        return not (self._counters or self._gauges or self._histograms)

    def take(self) -> Counts:
        """Return all counts and reset this object."""
        taken = Counts(self._catalogue)
        taken._counters, self._counters = self._counters, {}
        taken._gauges, self._gauges = self._gauges, {}
        taken._histograms, self._histograms = self._histograms, {}
        return taken

    def totals(self) -> dict[str, int | float]:
        """Each counter and gauge that has a value, summed over its labels; for a log line."""
        totals: dict[str, int | float] = {}
        for (name, _), value in [*self._counters.items(), *self._gauges.items()]:
            totals[name] = totals.get(name, 0) + value
        return totals

    def data(self) -> CountsData:
        """The counts by series."""
        return CountsData(
            [(name, values, amount) for (name, values), amount in self._counters.items()],
            [(name, values, value) for (name, values), value in self._gauges.items()],
            [(name, values, buckets) for (name, values), buckets in self._histograms.items()],
        )

    def to_dict(self) -> dict[str, Any]:
        """Serialize to plain dicts, lists, strings and numbers, in the form of `CountsData`."""
        plain: dict[str, Any] = msgspec.to_builtins(self.data())
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], catalogue: Catalogue = CATALOGUE) -> Counts:
        """Inverse of `to_dict`; {} gives empty counts. `MetricsError` if the data does not fit the catalogue."""
        try:
            data = msgspec.convert(plain, CountsData)
        except msgspec.ValidationError as error:
            raise MetricsError("counts", "what Counts.to_dict gave", str(error)) from error
        counts = cls(catalogue)
        for name, values, amount in data.counters:
            counts._add(counts._checked_series(catalogue.metric(name, Kind.COUNTER), values), amount)
        for name, values, value in data.gauges:
            counts._set(counts._checked_series(catalogue.metric(name, Kind.GAUGE), values), value)
        for name, values, buckets in data.histograms:
            metric = catalogue.metric(name, Kind.HISTOGRAM)
            _require_buckets(metric, buckets)
            counts._add_buckets(counts._checked_series(metric, values), buckets)
        return counts

    def _series(self, name: str, kind: Kind, labels: Mapping[str, str]) -> Series:
        key = (name, kind, tuple(labels.items()))
        known = self._known_series.get(key)
        if known is None:
            known = self._known_series[key] = self._check(name, kind, labels)
        return known

    def _check(self, name: str, kind: Kind, labels: Mapping[str, str]) -> Series:
        metric = self._catalogue.metric(name, kind)
        if labels.keys() != set(metric.label_names):
            raise MetricsError(name, f"labels {list(metric.label_names)}", list(labels))
        return self._checked_series(metric, tuple(labels[label] for label in metric.label_names))

    def _checked_series(self, metric: Metric, values: Sequence[str]) -> Series:
        labels = metric.series_labels
        if labels is None:
            raise MetricsError(
                metric.name, "label values that were configured (Catalogue.only_with_label)", list(values)
            )
        if len(values) != len(labels):
            raise MetricsError(metric.name, f"{len(labels)} label values", list(values))
        for label, value in zip(labels, values, strict=True):
            if value not in label.values:
                raise MetricsError(f"{metric.name}.{label.name}", f"one of {list(label.values)}", value)
        return metric.name, tuple(values)

    def _add(self, series: Series, amount: int | float) -> None:
        _require(series[0], amount, is_negative_allowed=False)
        self._counters[series] = self._counters.get(series, 0) + amount

    def _set(self, series: Series, value: int | float) -> None:
        _require(series[0], value, is_negative_allowed=True)
        self._gauges[series] = value

    def _add_buckets(self, series: Series, buckets: tuple[CountAndSum, ...]) -> None:
        mine = self._histograms.get(series, (EMPTY_BUCKET,) * len(buckets))
        self._histograms[series] = tuple(
            (count + more, total + additional) for (count, total), (more, additional) in zip(mine, buckets, strict=True)
        )


def _require(name: str, value: int | float, *, is_negative_allowed: bool) -> None:
    if not math.isfinite(value):
        raise MetricsError(name, "a finite number", value)
    if value < 0 and not is_negative_allowed:
        raise MetricsError(name, "a number >= 0", value)


def _require_buckets(metric: Metric, buckets: Sequence[CountAndSum]) -> None:
    if len(buckets) != len(metric.buckets) + 1:
        raise MetricsError(metric.name, f"{len(metric.buckets) + 1} buckets", len(buckets))
    for count, total in buckets:
        _require(metric.name, count, is_negative_allowed=False)
        _require(metric.name, total, is_negative_allowed=False)
