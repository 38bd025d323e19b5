"""What a choice between several stores comes to, store by store: a value that merges over steps and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from hybridkv.metrics.counts import Counts
from hybridkv.metrics.declaration import Catalogue, MetricsError

_PREFIX: Final = "vllm:kv_connector_mc_"

Clamp: TypeAlias = Callable[[str, float], tuple[float, float]]
"""Takes a store's name and a count; gives the count from zero on, and how far below zero it was."""


class ChildSelection(msgspec.Struct, forbid_unknown_fields=True):
    """One store. `queries` is the sum of `hits`, `misses`, `passed_over`, `unanswered` and `errors`.

    Each field but the last is the counter `vllm:kv_connector_mc_<field>_total`, whose help says what it counts.
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
    """Now; None: not known here. The last one that is known counts."""

    def merge(self, other: ChildSelection) -> None:
        """Add what `other` counted."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.pending_loads is not None:
            self.pending_loads = other.pending_loads


COUNTERS: Final = tuple(name for name in ChildSelection.__struct_fields__ if name != "pending_loads")
_EMPTY: Final = ChildSelection()


class SelectionStats(msgspec.Struct, forbid_unknown_fields=True):
    """All stores by name. Merge in order of time, because of `pending_loads`; the rest adds up in any order."""

    children: dict[str, ChildSelection] = {}

    def child(self, name: str) -> ChildSelection:
        """A store's counts, to be counted up."""
        counts = self.children.get(name)
        if counts is None:
            counts = self.children[name] = ChildSelection()
        return counts

    def merge(self, other: SelectionStats) -> None:
        """Add what `other` counted, which stays as it is."""
        for name, counts in other.children.items():
            self.child(name).merge(counts)

    def take(self) -> SelectionStats:
        """Everything so far; this one starts again from nothing."""
        taken = SelectionStats(self.children)
        self.children = {}
        return taken

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return all(counts == _EMPTY for counts in self.children.values())

    def totals(self) -> dict[str, int | float]:
        """What is not zero, as `<store>.<field>`: for a line in the log."""
        return {
            f"{name}.{field}": value
            for name, counts in self.children.items()
            for field, value in msgspec.structs.asdict(counts).items()
            if value
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, strings and numbers."""
        plain: dict[str, Any] = msgspec.to_builtins(self.children)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SelectionStats:
        """What `to_dict` described; `MetricsError` when it did not."""
        try:
            return cls(msgspec.convert(plain, dict[str, ChildSelection]))
        except msgspec.ValidationError as error:
            raise MetricsError("selection", "what SelectionStats.to_dict gave", str(error)) from error

    def counts(self, catalogue: Catalogue, clamp: Clamp) -> Counts:
        """The same under the catalogue's names, nothing below zero.

        `MetricsError` for a store that the catalogue (`CATALOGUE.configured("connector", names)`) does not name.
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
