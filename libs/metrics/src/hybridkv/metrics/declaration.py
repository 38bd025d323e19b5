"""What a declaration of a metric says. Sinks, the dashboard, alert rules and the reference page are made from it."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType


class MetricsError(ValueError):
    """A name, label or value that the catalogue does not allow. Says where, what was expected and what was found."""

    def __init__(self, path: str, expected: str, got: object) -> None:
        self.path = path
        self.expected = expected
        self.got = got
        super().__init__(f"{path}: expected {expected}, got {got!r}")


class Kind(enum.StrEnum):
    COUNTER = "counter"
    """Only grows."""
    GAUGE = "gauge"
    """The last value counts."""
    HISTOGRAM = "histogram"
    """Counts of observations by size."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label and its only values: known beforehand, so that the number of series is bounded."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfiguredLabel:
    """A label whose values an operator names, at most `max_values` of them. Counts and sinks want them at start:
    `Catalogue.configured`."""

    name: str
    max_values: int
    meaning: str


class Section(enum.StrEnum):
    """A row of the dashboard, in this order."""

    HITS = "Hits"
    LOADS = "Loads"
    STORES = "Stores"
    TIERS = "Tiers"
    SLOW_TIER = "Slower tiers"
    CHOICE = "Choice between stores"
    PEERS = "Peers"
    LMCACHE = "LMCache's server"


class View(enum.StrEnum):
    """What a panel shows of a metric."""

    RATE = "rate"
    """Of a counter: how much a second."""
    INCREASE = "increase"
    """Of a counter of rare events: how many in each interval shown."""
    VALUE = "value"
    """Of a gauge: its value."""
    QUANTILES = "quantiles"
    """Of a histogram: the median and the 99th percentile."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Where the dashboard shows a metric. Metrics with the same section and title share a panel.

    Args:
        section: the row.
        title: of the panel.
        by: labels that are told apart besides model and engine; None: all that the metric has.
        view: None: a counter's rate, a gauge's value, a histogram's quantiles.
    """

    section: Section
    title: str
    by: tuple[str, ...] | None = None
    view: View | None = None


_VIEWS = {
    Kind.COUNTER: (View.RATE, View.INCREASE),
    Kind.GAUGE: (View.VALUE,),
    Kind.HISTOGRAM: (View.QUANTILES,),
}
"""What can be shown of each kind; the first is the usual."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        buckets: upper bounds of a histogram, ascending, without infinity.
        panel: where the dashboard shows it.
        starts_at_zero: all its series are shown from the start. A series with labels appears with its first count
            otherwise, and Prometheus sees no increase then: for alerts that fire on one event.
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
            raise MetricsError(self.name, "buckets for a histogram and for nothing else", self.buckets)
        if list(self.buckets) != sorted(set(self.buckets)):
            raise MetricsError(self.name, "ascending buckets", self.buckets)
        for label in self.labels:
            if isinstance(label, ConfiguredLabel):
                if label.max_values < 1:
                    raise MetricsError(f"{self.name}.{label.name}", "room for one value at least", label.max_values)
            elif not label.values or len(set(label.values)) != len(label.values):
                raise MetricsError(f"{self.name}.{label.name}", "different values, at least one", label.values)
        if self.kind is Kind.COUNTER and not self.name.endswith("_total"):
            raise MetricsError(self.name, "a counter's name to end in _total", self.name)
        self._require_panel_that_fits()

    def _require_panel_that_fits(self) -> None:
        if self.panel is None:
            return
        if self.panel.view is not None and self.panel.view not in _VIEWS[self.kind]:
            raise MetricsError(f"{self.name}.panel", f"what can be shown of a {self.kind}", str(self.panel.view))
        for label in self.panel.by or ():
            if label not in self.label_names:
                raise MetricsError(f"{self.name}.panel", f"labels among {list(self.label_names)}", label)

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def view(self) -> View:
        """What its panel shows."""
        chosen = self.panel.view if self.panel is not None else None
        return chosen or _VIEWS[self.kind][0]

    @property
    def shown_labels(self) -> tuple[str, ...]:
        """Its own labels that its panel tells apart."""
        by = self.panel.by if self.panel is not None else None
        return self.label_names if by is None else by

    @property
    def series_labels(self) -> tuple[Label, ...] | None:
        """Labels with their values, None while some have yet to be configured: then there is no series."""
        fixed = tuple(label for label in self.labels if isinstance(label, Label))
        return fixed if len(fixed) == len(self.labels) else None

    def with_values(self, name: str, values: Sequence[str]) -> Metric:
        """The metric with a configured label's values; `MetricsError` when they are too many, none or not different."""
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
    """Metrics by name. Raises `MetricsError` when a name occurs twice."""

    metrics: tuple[Metric, ...]
    _by_name: Mapping[str, Metric] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {metric.name: metric for metric in self.metrics}
        if len(by_name) != len(self.metrics):
            raise MetricsError("metrics", "each name once", [metric.name for metric in self.metrics])
        object.__setattr__(self, "_by_name", MappingProxyType(by_name))

    def configured(self, name: str, values: Sequence[str]) -> Catalogue:
        """The metrics that have this configured label, and no others, with its values.

        `MetricsError` when there is none, or the values are too many, none or not different.
        """
        having = [
            metric
            for metric in self.metrics
            if any(isinstance(label, ConfiguredLabel) and label.name == name for label in metric.labels)
        ]
        if not having:
            raise MetricsError("label", "a configured label of some metric", name)
        return Catalogue(tuple(metric.with_values(name, values) for metric in having))

    def named(self, name: str) -> Metric:
        """The metric of this name; `MetricsError` when there is none."""
        metric = self._by_name.get(name)
        if metric is None:
            near = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise MetricsError("name", f"a metric of the catalogue{hint}", name)
        return metric

    def metric(self, name: str, kind: Kind) -> Metric:
        """The metric of this name; `MetricsError` when there is none or it is of another kind."""
        metric = self.named(name)
        if metric.kind is not kind:
            raise MetricsError(name, f"a {kind}", str(metric.kind))
        return metric
