"""The executable specification of a tier."""

from hybridkv.tiers.testing.reference.index import ReferenceIndex
from hybridkv.tiers.testing.reference.medium import ReferenceMedium

__all__ = ["ReferenceIndex", "ReferenceMedium"]
