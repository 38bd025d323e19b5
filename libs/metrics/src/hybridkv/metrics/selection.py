"""Statistics of the selection between several stores (child connectors). They merge over steps and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from hybridkv.metrics.counts import Counts
from hybridkv.metrics.declaration import Catalogue, MetricsError

_PREFIX: Final = "vllm:kv_connector_mc_"

Clamp: TypeAlias = Callable[[str, float], tuple[float, float]]
"""`TokenClamp.clamp`: takes a source and a count; returns the count, at least 0, and its distance below zero."""

WARNING_INTERVAL_S = 60.0
"""Minimum time between two warnings. A warning sums up the negative counts since the previous one."""


class TokenClamp:
    """Replaces negative counts by zero, and warns at most once per interval.

    A counter that decreases would raise in the engine's metrics loop.

    Args:
        warn: logs a sentence.
        clock: returns seconds; monotonic.
    """

    def __init__(self, warn: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._warn = warn
        self._clock = clock
        self._warned_at_s: float | None = None
        self._num_clamped = 0
        self._below_zero: float = 0

    def clamp(self, source: str, value: float) -> tuple[float, float]:
        """Return (`value`, 0) if `value` >= 0, else (0, -`value`)."""
        if value >= 0:
            return value, 0
        self._num_clamped += 1
        self._below_zero -= value
        now_s = self._clock()
        if self._warned_at_s is None or now_s - self._warned_at_s >= WARNING_INTERVAL_S:
            self._warned_at_s = now_s
            self._warn(
                f"{source} counted {value}, taken as 0; {self._num_clamped} counts were below zero since the "
                f"last such warning, {-self._below_zero} together"
            )
            self._num_clamped, self._below_zero = 0, 0
        return 0, -value


class ChildSelection(msgspec.Struct, forbid_unknown_fields=True):
    """Counts of one store. `queries` is the sum of `hits`, `misses`, `passed_over`, `unanswered` and `errors`.

    Each field but the last is the counter `vllm:kv_connector_mc_<field>_total`; see its help text.
    """

    queries: int = 0
    hits: int = 0
    hit_tokens: int = 0
    misses: int = 0
    passed_over: int = 0
    unanswered: int = 0
    errors: int = 0
    deferrals: int = 0
    timeouts: int = 0
    failures: int = 0
    load_seconds: float = 0.0
    load_bytes: int = 0
    clamped_tokens: int = 0
    pending_loads: int | None = None
    """Current number of pending loads; None if it is unknown in this process. A merge keeps the last known value."""

    def merge(self, other: ChildSelection) -> None:
        """Add the counts of `other`."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.pending_loads is not None:
            self.pending_loads = other.pending_loads


COUNTERS: Final = tuple(name for name in ChildSelection.__struct_fields__ if name != "pending_loads")
_EMPTY: Final = ChildSelection()


class SelectionStats(msgspec.Struct, forbid_unknown_fields=True):
    """Counts of all stores by name. They merge in any order, except `pending_loads`: merge in order of time."""

    children: dict[str, ChildSelection] = {}

    def child(self, name: str) -> ChildSelection:
        """Counts of one store, for the caller to increment. Adds them if the store has none."""
        counts = self.children.get(name)
        if counts is None:
            counts = self.children[name] = ChildSelection()
        return counts

    def merge(self, other: SelectionStats) -> None:
        """Add the counts of `other`, which does not change."""
        for name, counts in other.children.items():
            self.child(name).merge(counts)

    def take(self) -> SelectionStats:
        """Return all counts and reset this object."""
        taken = SelectionStats(self.children)
        self.children = {}
        return taken

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return all(counts == _EMPTY for counts in self.children.values())

    def nonzero_counts(self) -> dict[str, int | float]:
        """Nonzero counts by `<store>.<field>`, for a log line."""
        return {
            f"{name}.{field}": value
            for name, counts in self.children.items()
            for field, value in msgspec.structs.asdict(counts).items()
            if value
        }

    def to_dict(self) -> dict[str, Any]:
        """Serialize to plain dicts, strings and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self.children)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SelectionStats:
        """Inverse of `to_dict`. `MetricsError` if the data is invalid."""
        try:
            return cls(msgspec.convert(plain, dict[str, ChildSelection]))
        except msgspec.ValidationError as error:
            raise MetricsError("selection", "what SelectionStats.to_dict gave", str(error)) from error

    def counts(self, catalogue: Catalogue, clamp: Clamp) -> Counts:
        """Convert to `Counts` with the names of the catalogue. Negative counts become zero.

        The catalogue must have the names of all stores: `CATALOGUE.only_with_label("connector", names)`. `MetricsError`
        if it lacks one.
        """
        counts = Counts(catalogue)
        for name, child in self.children.items():
            clamped = 0.0
            for field in COUNTERS:
                if value := getattr(child, field):
                    value, below_zero = clamp(f"{name}.{field}", value)
                    clamped += below_zero
                    counts.add(f"{_PREFIX}{field}_total", value, connector=name)
            if clamped:
                counts.add(f"{_PREFIX}clamped_tokens_total", clamped, connector=name)
            if child.pending_loads is not None:
                counts.set(f"{_PREFIX}pending_loads", child.pending_loads, connector=name)
        return counts
