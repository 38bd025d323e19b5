"""Suites that every tier must pass. A test derives from the class and defines `make_tier`.

Sealed memory (`make_memory`) has a suite too. Uses no test framework: any runner that collects `test_*` methods of
classes will do.
"""

from kits.tiers.conformance.changes import ChangesConformance
from kits.tiers.conformance.eviction import EvictionConformance, ExactEvictionConformance, LeafFirstConformance
from kits.tiers.conformance.index import IndexConformance
from kits.tiers.conformance.late import AskConformance, LateAnswersConformance, LateConformance
from kits.tiers.conformance.medium import MediumConformance
from kits.tiers.conformance.memory import SealedMemoryConformance
from kits.tiers.conformance.read_only import ReadOnlyConformance
from kits.tiers.conformance.tier import CHUNK_BYTES, Tier, TierSuite


class TierConformance(IndexConformance, AskConformance, EvictionConformance, MediumConformance):
    """Contract of every tier."""


class ExactTierConformance(TierConformance, ExactEvictionConformance):
    """Contract of a tier that also evicts chunk by chunk and none too early."""


__all__ = [
    "CHUNK_BYTES",
    "AskConformance",
    "ChangesConformance",
    "EvictionConformance",
    "ExactEvictionConformance",
    "ExactTierConformance",
    "IndexConformance",
    "LateAnswersConformance",
    "LateConformance",
    "LeafFirstConformance",
    "MediumConformance",
    "ReadOnlyConformance",
    "SealedMemoryConformance",
    "Tier",
    "TierConformance",
    "TierSuite",
]
