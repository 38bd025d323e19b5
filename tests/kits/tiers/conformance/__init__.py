"""What every tier must pass. A test registers a tier by deriving from the class and giving `make_tier`.

So do sealed memory (`make_memory`) and the policies of eviction (`make_order`). Uses no test framework: any runner that
collects `test_*` methods of classes will do.
"""

from kits.tiers.conformance.changes import ChangesConformance
from kits.tiers.conformance.eviction import EvictionConformance, ExactEvictionConformance, LeafFirstConformance
from kits.tiers.conformance.index import IndexConformance
from kits.tiers.conformance.late import AskConformance, LateAnswersConformance, LateConformance
from kits.tiers.conformance.medium import MediumConformance
from kits.tiers.conformance.memory import SealedMemoryConformance
from kits.tiers.conformance.order import EvictionPolicyConformance, LeastRecentlyUsedConformance
from kits.tiers.conformance.read_only import ReadOnlyConformance
from kits.tiers.conformance.tier import CHUNK_BYTES, Tier, TierSuite


class TierConformance(IndexConformance, AskConformance, EvictionConformance, MediumConformance):
    """What every tier promises."""


class ExactTierConformance(TierConformance, ExactEvictionConformance):
    """What a tier promises beside, that evicts chunk by chunk and none too early."""


__all__ = [
    "CHUNK_BYTES",
    "AskConformance",
    "ChangesConformance",
    "EvictionConformance",
    "EvictionPolicyConformance",
    "ExactEvictionConformance",
    "ExactTierConformance",
    "IndexConformance",
    "LateAnswersConformance",
    "LateConformance",
    "LeafFirstConformance",
    "LeastRecentlyUsedConformance",
    "MediumConformance",
    "ReadOnlyConformance",
    "SealedMemoryConformance",
    "Tier",
    "TierConformance",
    "TierSuite",
]
