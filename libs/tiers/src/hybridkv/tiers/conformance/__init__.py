"""What every tier must pass. A test registers a tier by deriving from the class and giving `make_tier`.

Uses no test framework: any runner that collects `test_*` methods of classes will do. Nothing in the library imports it.
"""

from hybridkv.tiers.conformance.eviction import EvictionConformance, ExactEvictionConformance
from hybridkv.tiers.conformance.index import IndexConformance
from hybridkv.tiers.conformance.medium import MediumConformance
from hybridkv.tiers.conformance.tier import CHUNK_BYTES, Tier, TierSuite


class TierConformance(IndexConformance, EvictionConformance, MediumConformance):
    """What every tier promises."""


class ExactTierConformance(TierConformance, ExactEvictionConformance):
    """What a tier promises beside, that evicts chunk by chunk and none too early."""


__all__ = [
    "CHUNK_BYTES",
    "EvictionConformance",
    "ExactEvictionConformance",
    "ExactTierConformance",
    "IndexConformance",
    "MediumConformance",
    "Tier",
    "TierConformance",
    "TierSuite",
]
