"""Statistics of HybridMultiConnector: selection counts and the children's statistics, as vLLM's KVConnectorStats.

The API process rebuilds a child's statistics with the child's class, and the data include the name of that class.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from hybridkv.connectors.vllm.multi.children import Child, ChildClass
from hybridkv.metrics import CATALOGUE, PrometheusSink, SelectionStats, TokenClamp

logger = logging.getLogger("vllm.hybridkv.multi")

_SELECTION = "selection"
_CHILDREN = "children"


class MultiStats(KVConnectorStats):
    """Selection counts and children's statistics. `to_dict` returns plain values, `build` rebuilds the objects.

    `data` is {"selection": SelectionStats, "children": {name: (class of the connector, its KVConnectorStats)}}.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data if data is not None else {_SELECTION: SelectionStats(), _CHILDREN: {}})

    @classmethod
    def collect(cls, selection: SelectionStats | None, children: Sequence[Child]) -> MultiStats | None:
        """Collects the counts of one half since the last call; None if there are none."""
        of_children = {}
        for child in children:
            stats = child.connector.get_kv_connector_stats()
            if stats is not None:
                of_children[child.name] = (_name_of(type(child.connector)), stats)
        if selection is None and not of_children:
            return None
        return cls({_SELECTION: selection or SelectionStats(), _CHILDREN: of_children})

    @classmethod
    def build(cls, data: dict[str, Any] | None) -> MultiStats:
        """Rebuilds statistics from `to_dict`; empty for None. Omits a child whose class rebuilds no statistics."""
        if data is None:
            return cls()
        children = {}
        for name, (connector, plain) in data[_CHILDREN].items():
            stats = (
                plain if isinstance(plain, KVConnectorStats) else _class_of(connector).build_kv_connector_stats(plain)
            )
            if stats is not None:
                children[name] = (connector, stats)
        selection = data[_SELECTION]
        if not isinstance(selection, SelectionStats):
            selection = SelectionStats.from_dict(selection)
        return cls({_SELECTION: selection, _CHILDREN: children})

    @property
    def selection(self) -> SelectionStats:
        found: SelectionStats = self.data[_SELECTION]
        return found

    @property
    def children(self) -> dict[str, tuple[str, KVConnectorStats]]:
        found: dict[str, tuple[str, KVConnectorStats]] = self.data[_CHILDREN]
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            _SELECTION: self.selection.to_dict(),
            _CHILDREN: {name: [connector, stats.to_dict()] for name, (connector, stats) in self.children.items()},
        }

    def reset(self) -> None:
        self.data = {_SELECTION: SelectionStats(), _CHILDREN: {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        if not isinstance(other, MultiStats):
            raise TypeError(f"expected MultiStats, got {type(other).__name__}")
        self.selection.merge(other.selection)
        for name, (connector, theirs) in other.children.items():
            mine = self.children.get(name)
            self.children[name] = (connector, mine[1].aggregate(theirs) if mine is not None else theirs)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Totals for the periodic log line. The child's name is a prefix of each key."""
        reduced = self.selection.nonzero_counts()
        for name, (_, stats) in self.children.items():
            reduced |= {f"{name}.{key}": value for key, value in stats.reduce().items()}
        return reduced

    def is_empty(self) -> bool:
        return self.selection.is_empty() and all(stats.is_empty() for _, stats in self.children.values())


def _name_of(connector_class: type) -> str:
    return f"{connector_class.__module__}:{connector_class.__qualname__}"


def _class_of(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


class MultiPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the selection, and of the children with one more label: `connector`, the child's name.

    Children of one class share one metrics object. Each engine index in it identifies a pair of an engine and a child,
    so that children do not overwrite each other's gauges.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        classes: Sequence[ChildClass],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._places = {child.config.name: place for place, child in enumerate(classes)}
        self._catalogue = CATALOGUE.only_with_label("connector", list(self._places))
        self._clamp = TokenClamp(logger.warning, time.monotonic)
        self._sink = PrometheusSink(
            self._catalogue, self._counter_cls, self._gauge_cls, self._histogram_cls, labelnames, per_engine_labelvalues
        )
        self._children: dict[str, KVConnectorPromMetrics] = {}
        for connector_class in dict.fromkeys(child.connector_class for child in classes):
            of_class = [child for child in classes if child.connector_class is connector_class]
            labelvalues = {
                self._index(engine, child.config.name): [*values, child.config.name]
                for engine, values in per_engine_labelvalues.items()
                for child in of_class
            }
            metrics = connector_class.build_prom_metrics(
                of_class[0].vllm_config, metric_types, [*labelnames, "connector"], labelvalues
            )
            if metrics is not None:
                self._children |= {child.config.name: metrics for child in of_class}

    def _index(self, engine: int, name: str) -> int:
        return engine * len(self._places) + self._places[name]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data: Mapping[str, Any] = transfer_stats_data
        selection = SelectionStats.from_dict(data[_SELECTION])
        self._sink.observe(selection.counts(self._catalogue, self._clamp.clamp).to_dict(), engine_idx)
        for name, (_, plain) in data[_CHILDREN].items():
            if name in self._children:
                self._children[name].observe(plain, self._index(engine_idx, name))
