"""The executable specification of a tier."""

from hybridkv.tiers.testing.reference.index import ReferenceIndex
from hybridkv.tiers.testing.reference.medium import ReferenceMedium
from hybridkv.tiers.testing.reference.remote import RemoteIndex, RemoteMedium, RemoteStore

__all__ = ["ReferenceIndex", "ReferenceMedium", "RemoteIndex", "RemoteMedium", "RemoteStore"]
