"""Every metric of hybridkv, declared once, as data. Sinks, dashboards and the reference page are made from this."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from hybridkv.metrics.errors import MetricsError


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


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `buckets` are the upper bounds of a histogram, ascending, without infinity."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[Label | ConfiguredLabel, ...] = ()
    buckets: tuple[float, ...] = ()

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

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

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

    def metric(self, name: str, kind: Kind) -> Metric:
        """The metric of this name; `MetricsError` when there is none or it is of another kind."""
        metric = self._by_name.get(name)
        if metric is None:
            near = difflib.get_close_matches(name, self._by_name, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise MetricsError("name", f"a metric of the catalogue{hint}", name)
        if metric.kind is not kind:
            raise MetricsError(name, f"a {kind}", str(metric.kind))
        return metric


_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_GROUP_KINDS = ("full", "window", "chunked", "recurrent")
_FAILURES = ("missing", "wrong_key", "checksum", "io", "busy", "closed", "injected")
_DIRECTION = Label("direction", ("promote", "cascade"))
_TIER = Label("tier", ("ram", "disk", "peer", "object"))

MAX_CHILDREN = 16
"""Stores below one engine that can be told apart."""
_CONNECTOR = ConfiguredLabel("connector", MAX_CHILDREN, "the stores in `connectors`")


def _of_child(name: str, kind: Kind, unit: str, meaning: str) -> Metric:
    return Metric(f"vllm:kv_connector_mc_{name}", kind, unit, meaning, (_CONNECTOR,))


CATALOGUE = Catalogue(
    (
        Metric(
            "vllm:hybridkv_lookups_total",
            Kind.COUNTER,
            "lookups",
            "Requests that were looked up in the tiers, by answer and by the kind of group that limited it.",
            (
                Label("result", ("hit", "pending", "miss")),
                Label("limiting_kind", ("", *_GROUP_KINDS)),
            ),
        ),
        Metric(
            "vllm:hybridkv_hit_tokens_total",
            Kind.COUNTER,
            "tokens",
            "Tokens that lookups found in the tiers beyond what GPU memory held.",
        ),
        Metric(
            "vllm:hybridkv_stores_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that were to be stored, by kind of group and by what became of them.",
            (
                Label("kind", _GROUP_KINDS),
                Label("outcome", ("stored", "present", "dropped_no_room", "dropped_not_aligned", "failed")),
            ),
        ),
        Metric("vllm:hybridkv_store_bytes_total", Kind.COUNTER, "bytes", "Bytes that were stored in the tiers."),
        Metric(
            "vllm:hybridkv_loads_total",
            Kind.COUNTER,
            "loads",
            "Loads from the tiers into GPU memory, by outcome. A failed load is a recompute.",
            (Label("outcome", ("loaded", "failed")),),
        ),
        Metric("vllm:hybridkv_load_bytes_total", Kind.COUNTER, "bytes", "Bytes that were loaded from the tiers."),
        Metric(
            "vllm:hybridkv_load_failures_total",
            Kind.COUNTER,
            "loads",
            "Failed loads, by the reason that the tier gave.",
            (Label("reason", ("timeout", *_FAILURES)),),
        ),
        Metric(
            "vllm:hybridkv_wait_timeouts_total",
            Kind.COUNTER,
            "waits",
            "Requests that stopped waiting: for chunks that were being stored (lookup) or for the slow tier (load).",
            (Label("wait", ("lookup", "load")),),
        ),
        Metric(
            "vllm:hybridkv_moves_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that moved between the tiers, or were to, by direction and by what became of them.",
            (
                _DIRECTION,
                Label("result", ("done", "failed", "dropped_busy", "dropped_no_room", "dropped_open")),
            ),
        ),
        Metric(
            "vllm:hybridkv_move_bytes_total",
            Kind.COUNTER,
            "bytes",
            "Bytes that moved between the tiers.",
            (_DIRECTION,),
        ),
        Metric(
            "vllm:hybridkv_move_failures_total",
            Kind.COUNTER,
            "chunks",
            "Failed moves between the tiers, by the reason that the slow tier gave.",
            (Label("reason", _FAILURES),),
        ),
        Metric(
            "vllm:hybridkv_move_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one chunk between the tiers, with waiting in the queue.",
            (_DIRECTION,),
            buckets=(*_SECONDS, 30.0, 100.0),
        ),
        Metric(
            "vllm:hybridkv_breaker_openings_total",
            Kind.COUNTER,
            "openings",
            "Times that the slow tier was left alone because it did not answer.",
        ),
        Metric(
            "vllm:hybridkv_breaker_open",
            Kind.GAUGE,
            "state",
            "1 while the slow tier is left alone or only probed, else 0.",
        ),
        Metric(
            "vllm:hybridkv_evictions_total",
            Kind.COUNTER,
            "chunks",
            "Chunks that gave way to newer ones.",
            (_TIER,),
        ),
        Metric(
            "vllm:hybridkv_load_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one load job on its copy thread, without waiting in the queue.",
            buckets=_SECONDS,
        ),
        Metric(
            "vllm:hybridkv_store_seconds",
            Kind.HISTOGRAM,
            "seconds",
            "Time of one store job on its copy thread, without waiting in the queue.",
            buckets=_SECONDS,
        ),
        Metric(
            "vllm:hybridkv_tier_used_bytes",
            Kind.GAUGE,
            "bytes",
            "Space of the tier that is not free.",
            (_TIER,),
        ),
        Metric(
            "vllm:hybridkv_tier_capacity_bytes",
            Kind.GAUGE,
            "bytes",
            "Space of the tier.",
            (_TIER,),
        ),
        _of_child(
            "queries_total",
            Kind.COUNTER,
            "requests",
            "Admitted requests, each of which is a hit, a miss, passed over, unanswered or an error of the store.",
        ),
        _of_child("hits_total", Kind.COUNTER, "requests", "Requests that the store was chosen to load."),
        _of_child("hit_tokens_total", Kind.COUNTER, "tokens", "Tokens that the store was chosen to load."),
        _of_child("misses_total", Kind.COUNTER, "requests", "Requests for which the store had nothing."),
        _of_child(
            "passed_over_total",
            Kind.COUNTER,
            "requests",
            "Requests for which the store had tokens that were not loaded: another scored higher, or computing did.",
        ),
        _of_child(
            "unanswered_total",
            Kind.COUNTER,
            "requests",
            "Requests that were admitted before the store had answered, because another had or the time was over.",
        ),
        _of_child(
            "errors_total",
            Kind.COUNTER,
            "requests",
            "Requests for which the store raised when asked, or was not asked because its load for them had failed.",
        ),
        _of_child(
            "deferrals_total", Kind.COUNTER, "lookups", "Lookups that were put off because the store needed more time."
        ),
        _of_child("timeouts_total", Kind.COUNTER, "requests", "Requests that waited for the store in vain."),
        _of_child("failures_total", Kind.COUNTER, "loads", "Loads of the store that failed."),
        _of_child(
            "load_seconds_total",
            Kind.COUNTER,
            "seconds",
            "Time from the start to the end of the store's loads that worked.",
        ),
        _of_child(
            "load_bytes_total", Kind.COUNTER, "bytes", "Engine memory that the store's loads filled, over all ranks."
        ),
        _of_child("pending_loads", Kind.GAUGE, "loads", "Loads of the store that have begun and not ended."),
        _of_child(
            "clamped_tokens_total",
            Kind.COUNTER,
            "tokens",
            "How far below zero counts of the store were before they were taken as zero. More than 0 is a bug in it.",
        ),
    )
)
