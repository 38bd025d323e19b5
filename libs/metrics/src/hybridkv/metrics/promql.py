"""Queries as values, rendered in Prometheus' language. What they name must be declared; nothing here asks a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hybridkv.metrics.declaration import Catalogue, ConfiguredLabel, Kind, Metric
from hybridkv.metrics.errors import MetricsError

ENGINE_LABELS = ("model_name", "engine")
"""vLLM's own labels. Every query tells engines apart."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How much a counter grows a second, summed over what `by` does not name.

    Args:
        metric: a counter.
        where: own labels, each with the values that count; {}: all.
        by: own labels that are told apart besides those of the engine.
    """

    metric: str
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Increase:
    """How much a counter grows in the window; otherwise as `Rate`."""

    metric: str
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A gauge's value, summed over what `by` does not name."""

    metric: str
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of a histogram's observations in the window."""

    quantile: float
    metric: str
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ratio:
    """One query divided by the sum of others with the same labels. Not a number where those are 0."""

    part: Query
    whole: tuple[Query, ...]


Query: TypeAlias = Rate | Increase | Value | Quantile | Ratio


def metrics_of(query: Query) -> tuple[str, ...]:
    """The metrics that a query reads."""
    if isinstance(query, Ratio):
        return (*metrics_of(query.part), *(name for whole in query.whole for name in metrics_of(whole)))
    return (query.metric,)


@dataclass(frozen=True, slots=True)
class Renderer:
    """Writes queries over a catalogue.

    Args:
        catalogue: what may be named.
        window: the time over which rates and increases are taken: "5m", or a variable.
        matchers: for every query, by label, in Prometheus' own words: {"engine": '=~"$engine"'}. A matcher for a label
            that a metric lacks is left out.
    """

    catalogue: Catalogue
    window: str
    matchers: Mapping[str, str] = field(default_factory=dict)

    def render(self, query: Query) -> str:
        """The query in Prometheus' language.

        Raises:
            MetricsError: it names a metric, label or value that is not declared, or asks a metric of another kind.
        """
        if isinstance(query, Ratio):
            whole = " + ".join(self.render(part) for part in query.whole)
            return f"{self.render(query.part)} / {f'({whole})' if len(query.whole) > 1 else whole}"
        match query:
            case Rate() | Increase():
                series = self._series(query, Kind.COUNTER)
                function = "rate" if isinstance(query, Rate) else "increase"
                return f"sum by ({self._by(query)}) ({function}({series}[{self.window}]))"
            case Value():
                return f"sum by ({self._by(query)}) ({self._series(query, Kind.GAUGE)})"
            case Quantile():
                series = self._series(query, Kind.HISTOGRAM, "_bucket")
                rates = f"sum by ({self._by(query)}, le) (rate({series}[{self.window}]))"
                return f"histogram_quantile({query.quantile:g}, {rates})"

    def _series(self, query: Rate | Increase | Value | Quantile, kind: Kind, suffix: str = "") -> str:
        metric = self.catalogue.metric(query.metric, kind)
        labels = (*ENGINE_LABELS, *metric.label_names)
        selectors = [f"{label}{text}" for label, text in self.matchers.items() if label in labels]
        for label, values in query.where.items():
            _require_values(metric, label, values)
            selectors.append(f'{label}=~"{"|".join(values)}"' if len(values) > 1 else f'{label}="{values[0]}"')
        return f"{metric.name}{suffix}{{{', '.join(selectors)}}}" if selectors else f"{metric.name}{suffix}"

    def _by(self, query: Rate | Increase | Value | Quantile) -> str:
        metric = self.catalogue.named(query.metric)
        for label in query.by:
            if label not in metric.label_names:
                raise MetricsError(f"{metric.name}.by", f"labels among {list(metric.label_names)}", label)
        return ", ".join((*ENGINE_LABELS, *query.by))


def _require_values(metric: Metric, label: str, values: Sequence[str]) -> None:
    declared = next((own for own in metric.labels if own.name == label), None)
    if declared is None:
        raise MetricsError(f"{metric.name}.where", f"labels among {list(metric.label_names)}", label)
    if not values:
        raise MetricsError(f"{metric.name}.where.{label}", "one value at least", list(values))
    if not isinstance(declared, ConfiguredLabel):
        for value in values:
            if value not in declared.values:
                raise MetricsError(f"{metric.name}.where.{label}", f"values among {list(declared.values)}", value)
