"""What every tier must pass. A test registers a tier by deriving from the class and giving `make_tier`.

So do sealed memory (`make_memory`) and the policies of eviction (`make_order`). Uses no test framework: any runner that
collects `test_*` methods of classes will do.
"""

from hybridkv.tiers.testing.conformance.changes import ChangesConformance
from hybridkv.tiers.testing.conformance.eviction import EvictionConformance, ExactEvictionConformance
from hybridkv.tiers.testing.conformance.index import IndexConformance
from hybridkv.tiers.testing.conformance.late import AskConformance, LateAnswersConformance, LateConformance
from hybridkv.tiers.testing.conformance.medium import MediumConformance
from hybridkv.tiers.testing.conformance.memory import SealedMemoryConformance
from hybridkv.tiers.testing.conformance.order import EvictionOrderConformance, LeastRecentlyUsedConformance
from hybridkv.tiers.testing.conformance.read_only import ReadOnlyConformance
from hybridkv.tiers.testing.conformance.tier import CHUNK_BYTES, Tier, TierSuite


class TierConformance(IndexConformance, AskConformance, EvictionConformance, MediumConformance):
    """What every tier promises."""


class ExactTierConformance(TierConformance, ExactEvictionConformance):
    """What a tier promises beside, that evicts chunk by chunk and none too early."""


__all__ = [
    "CHUNK_BYTES",
    "AskConformance",
    "ChangesConformance",
    "EvictionConformance",
    "EvictionOrderConformance",
    "ExactEvictionConformance",
    "ExactTierConformance",
    "IndexConformance",
    "LateAnswersConformance",
    "LateConformance",
    "LeastRecentlyUsedConformance",
    "MediumConformance",
    "ReadOnlyConformance",
    "SealedMemoryConformance",
    "Tier",
    "TierConformance",
    "TierSuite",
]
