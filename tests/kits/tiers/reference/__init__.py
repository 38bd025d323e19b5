"""The executable specification of a tier."""

from kits.tiers.reference.index import ReferenceIndex
from kits.tiers.reference.medium import ReferenceMedium
from kits.tiers.reference.remote import RemoteIndex, RemoteMedium, RemoteStore

__all__ = ["ReferenceIndex", "ReferenceMedium", "RemoteIndex", "RemoteMedium", "RemoteStore"]
