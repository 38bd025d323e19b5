"""What happened, as a value that can be added up over steps, ranks and processes, and sent as plain data.

A histogram keeps the count and the sum of each bucket, not the observations: its size is bounded by the catalogue, and
an exporter that only knows `observe` still gets exact buckets and an exact sum. Talks to no exporter.
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
"""Name of a metric, values of its labels in their declared order."""

Bucket: TypeAlias = tuple[int, float]
"""How many observations fell into it, and their sum."""

EMPTY_BUCKET: Bucket = (0, 0.0)


class CountsData(msgspec.Struct, forbid_unknown_fields=True):
    """The plain shape of `Counts`: [name, label values, value]; for a histogram one [count, sum] a bucket."""

    counters: list[tuple[str, tuple[str, ...], int | float]] = []
    gauges: list[tuple[str, tuple[str, ...], int | float]] = []
    histograms: list[tuple[str, tuple[str, ...], tuple[Bucket, ...]]] = []


class Counts:
    """A mergeable accumulator over a catalogue.

    `MetricsError` for a name, label or value that the catalogue does not allow; the counts are then as before.
    """

    def __init__(self, catalogue: Catalogue = CATALOGUE) -> None:
        self._catalogue = catalogue
        self._counters: dict[Series, int | float] = {}
        self._gauges: dict[Series, int | float] = {}
        self._histograms: dict[Series, tuple[Bucket, ...]] = {}
        self._known_series: dict[tuple[str, Kind, tuple[tuple[str, str], ...]], Series] = {}
        """What has been checked, as it was asked for: the catalogue bounds how many there are."""

    def add(self, name: str, amount: int | float = 1, /, **labels: str) -> None:
        """Count `amount` >= 0."""
        self._add(self._series(name, Kind.COUNTER, labels), amount)

    def set(self, name: str, value: int | float, /, **labels: str) -> None:
        """The value of a gauge from now on."""
        self._set(self._series(name, Kind.GAUGE, labels), value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """One observation >= 0 for a histogram."""
        series = self._series(name, Kind.HISTOGRAM, labels)
        bounds = self._catalogue.metric(name, Kind.HISTOGRAM).buckets
        _require(name, value, is_negative_allowed=False)
        buckets = self._histograms.get(series) or (EMPTY_BUCKET,) * (len(bounds) + 1)
        place = bisect.bisect_left(bounds, value)
        count, total = buckets[place]
        self._histograms[series] = (*buckets[:place], (count + 1, total + float(value)), *buckets[place + 1 :])

    def merge(self, other: Counts) -> None:
        """Add what `other` counted, which stays as it is.

        Counters and histograms add up, in any order and grouping. A gauge takes the value of `other`: merge in order of
        time. Both must have the same catalogue.
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
        """Whether nothing was counted, set or observed."""
        return not (self._counters or self._gauges or self._histograms)

    def take(self) -> Counts:
        """Everything so far; this one starts again from nothing."""
        taken = Counts(self._catalogue)
        taken._counters, self._counters = self._counters, {}
        taken._gauges, self._gauges = self._gauges, {}
        taken._histograms, self._histograms = self._histograms, {}
        return taken

    def totals(self) -> dict[str, int | float]:
        """Each counter and gauge that occurred, summed over its labels: for a line in the log."""
        totals: dict[str, int | float] = {}
        for (name, _), value in [*self._counters.items(), *self._gauges.items()]:
            totals[name] = totals.get(name, 0) + value
        return totals

    def data(self) -> CountsData:
        """What was counted, series by series."""
        return CountsData(
            [(name, values, amount) for (name, values), amount in self._counters.items()],
            [(name, values, value) for (name, values), value in self._gauges.items()],
            [(name, values, buckets) for (name, values), buckets in self._histograms.items()],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, as `CountsData` describes them."""
        plain: dict[str, Any] = msgspec.to_builtins(self.data())
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], catalogue: Catalogue = CATALOGUE) -> Counts:
        """The counts that `to_dict` described; {} is no counts."""
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
        asked = (name, kind, tuple(labels.items()))
        known = self._known_series.get(asked)
        if known is None:
            known = self._known_series[asked] = self._check(name, kind, labels)
        return known

    def _check(self, name: str, kind: Kind, labels: Mapping[str, str]) -> Series:
        metric = self._catalogue.metric(name, kind)
        if labels.keys() != set(metric.label_names):
            raise MetricsError(name, f"labels {list(metric.label_names)}", list(labels))
        return self._checked_series(metric, tuple(labels[label] for label in metric.label_names))

    def _checked_series(self, metric: Metric, values: Sequence[str]) -> Series:
        labels = metric.series_labels
        if labels is None:
            raise MetricsError(metric.name, "label values that were configured (Catalogue.configured)", list(values))
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

    def _add_buckets(self, series: Series, buckets: tuple[Bucket, ...]) -> None:
        mine = self._histograms.get(series, (EMPTY_BUCKET,) * len(buckets))
        self._histograms[series] = tuple(
            (count + more, total + additional) for (count, total), (more, additional) in zip(mine, buckets, strict=True)
        )


def _require(name: str, value: int | float, *, is_negative_allowed: bool) -> None:
    if not math.isfinite(value):
        raise MetricsError(name, "a finite number", value)
    if value < 0 and not is_negative_allowed:
        raise MetricsError(name, "a number >= 0", value)


def _require_buckets(metric: Metric, buckets: Sequence[Bucket]) -> None:
    if len(buckets) != len(metric.buckets) + 1:
        raise MetricsError(metric.name, f"{len(metric.buckets) + 1} buckets", len(buckets))
    for count, total in buckets:
        _require(metric.name, count, is_negative_allowed=False)
        _require(metric.name, total, is_negative_allowed=False)
