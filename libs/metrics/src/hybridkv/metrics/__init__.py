"""Names and mergeable counts of everything that hybridkv measures."""

from hybridkv.metrics.catalogue import CATALOGUE, MAX_CHILDREN, Catalogue, ConfiguredLabel, Kind, Label, Metric
from hybridkv.metrics.clamp import TokenClamp
from hybridkv.metrics.counts import Counts
from hybridkv.metrics.errors import MetricsError
from hybridkv.metrics.prometheus import PrometheusSink
from hybridkv.metrics.selection import ChildSelection, SelectionStats

__all__ = [
    "CATALOGUE",
    "MAX_CHILDREN",
    "Catalogue",
    "ChildSelection",
    "ConfiguredLabel",
    "Counts",
    "Kind",
    "Label",
    "Metric",
    "MetricsError",
    "PrometheusSink",
    "SelectionStats",
    "TokenClamp",
]
