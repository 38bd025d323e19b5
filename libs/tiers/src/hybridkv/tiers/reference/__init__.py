"""The executable specification of a tier."""

from hybridkv.tiers.reference.index import ReferenceIndex
from hybridkv.tiers.reference.medium import ReferenceMedium

__all__ = ["ReferenceIndex", "ReferenceMedium"]
