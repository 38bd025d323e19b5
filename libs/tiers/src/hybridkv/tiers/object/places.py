"""Places of chunks in packs."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.tiers.contract import Slot
from hybridkv.tiers.object.format.record import HEADER_BYTES


class ObjectSlot(Slot, frozen=True, array_like=True, gc=False):
    """A place in a pack. Its one extent begins at a number that no other slot of the index has."""

    pack: str = ""
    """The object's name, without its rank."""
    offset: int = 0
    """Of the chunk's header in the object."""


class PackPlace(NamedTuple):
    """Of a chunk, on every rank.

    Args:
        pack: the object's name, without its rank.
        offset: of the chunk's header in it.
        num_bytes: of the chunk.
        source: the prefix of the manifest that named it; empty where this engine stored it.
    """

    pack: str
    offset: int
    num_bytes: int
    source: bytes = b""

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + HEADER_BYTES + self.num_bytes

    def slot(self, number: int) -> ObjectSlot:
        """As `RemotePlace` says."""
        return ObjectSlot(((number, self.num_bytes),), self.pack, self.offset)
