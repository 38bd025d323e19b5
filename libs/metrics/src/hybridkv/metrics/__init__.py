"""Names and mergeable counts of everything that hybridkv measures."""

from hybridkv.metrics.catalogue import CATALOGUE, DISK_ERRORS, Catalogue, Kind, Label, Metric
from hybridkv.metrics.counts import Counts
from hybridkv.metrics.errors import MetricsError
from hybridkv.metrics.prometheus import PrometheusSink

__all__ = [
    "CATALOGUE",
    "DISK_ERRORS",
    "Catalogue",
    "Counts",
    "Kind",
    "Label",
    "Metric",
    "MetricsError",
    "PrometheusSink",
]
