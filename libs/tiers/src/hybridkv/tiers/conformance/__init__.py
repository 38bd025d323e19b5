"""What every tier must pass. A test registers a tier by deriving from both classes and giving `make_tier`.

Uses no test framework: any runner that collects `test_*` methods of classes will do. Nothing in the library imports it.
"""

from hybridkv.tiers.conformance.eviction import EvictionConformance
from hybridkv.tiers.conformance.index import IndexConformance
from hybridkv.tiers.conformance.medium import MediumConformance
from hybridkv.tiers.conformance.tier import CHUNK_BYTES, Tier, TierSuite


class TierConformance(IndexConformance, EvictionConformance, MediumConformance):
    """The whole suite."""


__all__ = [
    "CHUNK_BYTES",
    "EvictionConformance",
    "IndexConformance",
    "MediumConformance",
    "Tier",
    "TierConformance",
    "TierSuite",
]
