"""Metrics of hybridkv: their declarations, counts that merge, and export to Prometheus."""

from hybridkv.metrics.catalogue import CATALOGUE, DISK_ERRORS, MAX_CHILDREN
from hybridkv.metrics.counts import Counts
from hybridkv.metrics.declaration import (
    Catalogue,
    ConfiguredLabel,
    Kind,
    Label,
    Metric,
    MetricsError,
    Panel,
    Section,
    View,
)
from hybridkv.metrics.lmcache_catalogue import LMCACHE_FAILURES
from hybridkv.metrics.peer_catalogue import PEER_FAILURES
from hybridkv.metrics.prometheus import PrometheusSink
from hybridkv.metrics.reuse import ReuseEstimator, ReuseReport
from hybridkv.metrics.selection import ChildSelection, SelectionStats, TokenClamp

__all__ = [
    "CATALOGUE",
    "DISK_ERRORS",
    "LMCACHE_FAILURES",
    "MAX_CHILDREN",
    "PEER_FAILURES",
    "Catalogue",
    "ChildSelection",
    "ConfiguredLabel",
    "Counts",
    "Kind",
    "Label",
    "Metric",
    "MetricsError",
    "Panel",
    "PrometheusSink",
    "ReuseEstimator",
    "ReuseReport",
    "Section",
    "SelectionStats",
    "TokenClamp",
    "View",
]
