"""Declaration of metrics. Sinks read it. The dashboard and the table of the reference page are generated from it.

People write the alert rules. A test checks that the rules name only declared metrics.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType


class MetricsError(ValueError):
    """Invalid name, label or value. The text has its place, the expected value and the actual value."""

    def __init__(self, path: str, expected: str, got: object) -> None:
        self.path = path
        self.expected = expected
        self.got = got
        super().__init__(f"{path}: expected {expected}, got {got!r}")


class Kind(enum.StrEnum):
    COUNTER = "counter"
    """Sum that only increases."""
    GAUGE = "gauge"
    """Last value."""
    HISTOGRAM = "histogram"
    """Number and sum of observations per bucket."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label and all its values. So the number of series is bounded."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfiguredLabel:
    """A label with at most `max_values` values. The operator configures them; `Catalogue.only_with_label` sets them."""

    name: str
    max_values: int
    meaning: str


class Section(enum.StrEnum):
    """Rows of the dashboard, in their order."""

    HITS = "Hits"
    LOADS = "Loads"
    STORES = "Stores"
    TIERS = "Tiers"
    SLOW_TIER = "Slower tiers"
    CHOICE = "Choice between stores"
    PEERS = "Peers"
    LMCACHE = "LMCache's server"


class View(enum.StrEnum):
    """How a panel calculates the values that it shows."""

    RATE = "rate"
    """Counter: increase per second."""
    INCREASE = "increase"
    """Counter of rare events: increase per interval."""
    VALUE = "value"
    """Gauge: its value."""
    QUANTILES = "quantiles"
    """Histogram: median and 99th percentile."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Dashboard panel of a metric, with a series for each model, engine and value of its labels. Metrics with the same
    section and title share a panel.

    Args:
        section: row of the dashboard.
        title: title of the panel.
        view: None: rate of a counter, value of a gauge, quantiles of a histogram.
    """

    section: Section
    title: str
    view: View | None = None


_VIEWS = {
    Kind.COUNTER: (View.RATE, View.INCREASE),
    Kind.GAUGE: (View.VALUE,),
    Kind.HISTOGRAM: (View.QUANTILES,),
}
"""Allowed views of each kind; the first is the default."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of one metric. Raises `MetricsError` if it is inconsistent.

    Args:
        buckets: upper bounds of a histogram, ascending, without infinity.
        panel: panel of the metric on the dashboard.
        starts_at_zero: counters and histograms: export all series from the start, for alerts on a single event.
            Otherwise a series with labels appears with its first count, and Prometheus sees no increase.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[Label | ConfiguredLabel, ...] = ()
    buckets: tuple[float, ...] = ()
    panel: Panel | None = None
    starts_at_zero: bool = False

    def __post_init__(self) -> None:
        if (self.kind is Kind.HISTOGRAM) != bool(self.buckets):
            raise MetricsError(self.name, "buckets if the metric is a histogram, else none", self.buckets)
        if list(self.buckets) != sorted(set(self.buckets)):
            raise MetricsError(self.name, "ascending buckets", self.buckets)
        for label in self.labels:
            if isinstance(label, ConfiguredLabel):
                if label.max_values < 1:
                    raise MetricsError(f"{self.name}.{label.name}", "max_values >= 1", label.max_values)
            elif not label.values or len(set(label.values)) != len(label.values):
                raise MetricsError(f"{self.name}.{label.name}", "different values, at least one", label.values)
        if self.kind is Kind.COUNTER and not self.name.endswith("_total"):
            raise MetricsError(self.name, "a counter's name to end in _total", self.name)
        if self.view not in _VIEWS[self.kind]:
            raise MetricsError(f"{self.name}.panel", f"a view of a {self.kind}", str(self.view))

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def view(self) -> View:
        """View of the metric's panel."""
        chosen = self.panel.view if self.panel is not None else None
        return chosen or _VIEWS[self.kind][0]

    @property
    def series_labels(self) -> tuple[Label, ...] | None:
        """Labels with their values. None if a label is not configured yet; the metric has no series then."""
        fixed = tuple(label for label in self.labels if isinstance(label, Label))
        return fixed if len(fixed) == len(self.labels) else None

    def with_values(self, name: str, values: Sequence[str]) -> Metric:
        """Copy with the values of a configured label; equal if the metric does not have the label. `MetricsError` if
        the values are too many, none or not unique."""
        labels: list[Label | ConfiguredLabel] = []
        for label in self.labels:
            if isinstance(label, ConfiguredLabel) and label.name == name:
                if len(values) > label.max_values:
                    raise MetricsError(f"{self.name}.{name}", f"at most {label.max_values} values", list(values))
                labels.append(Label(name, tuple(values)))
            else:
                labels.append(label)
        return replace(self, labels=tuple(labels))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Metrics by name. Raises `MetricsError` if a name occurs twice."""

    metrics: tuple[Metric, ...]
    _by_name: Mapping[str, Metric] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {metric.name: metric for metric in self.metrics}
        if len(by_name) != len(self.metrics):
            raise MetricsError("metrics", "each name once", [metric.name for metric in self.metrics])
        object.__setattr__(self, "_by_name", MappingProxyType(by_name))

    def only_with_label(self, name: str, values: Sequence[str]) -> Catalogue:
        """Catalogue of only the metrics that have this configured label, with its values.

        `MetricsError` if no metric has it, or the values are too many, none or not unique.
        """
        selected = [
            metric
            for metric in self.metrics
            if any(isinstance(label, ConfiguredLabel) and label.name == name for label in metric.labels)
        ]
        if not selected:
            raise MetricsError("label", "a configured label of some metric", name)
        return Catalogue(tuple(metric.with_values(name, values) for metric in selected))

    def named(self, name: str) -> Metric:
        """The metric of this name. `MetricsError` if there is none."""
        metric = self._by_name.get(name)
        if metric is None:
            similar = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else ""
            raise MetricsError("name", f"a metric of the catalogue{hint}", name)
        return metric

    def metric(self, name: str, kind: Kind) -> Metric:
        """The metric of this name and kind. `MetricsError` if there is none, or it has another kind."""
        metric = self.named(name)
        if metric.kind is not kind:
            raise MetricsError(name, f"a {kind}", str(metric.kind))
        return metric
