"""Where chunks lie in packs, as entries of a ledger: what was heard of, and what is on its way there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.ledger import Entry, KeyState
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


class Known(Entry):
    """A chunk that lies in the store, or is to."""

    key: Key
    number: int
    place: PackPlace
    is_over: bool
    """It was believed for long enough: nobody who comes now is offered it."""

    @property
    def slot(self) -> Slot:
        pack, offset, num_bytes, _ = self.place
        return ObjectSlot(((self.number, num_bytes),), pack, offset)


class Shelves:
    """The `Space` of an index of objects: there is a place for everything, and it is told before it is taken.

    `next` is that of the key that is taken next.
    """

    def __init__(self) -> None:
        self.next = PackPlace("", 0, 0)
        self._number = 0

    def take(self, key: Key, num_bytes: int, cost: int) -> Known:
        number, self._number = self._number, self._number + num_bytes
        return Known(cost, KeyState.RESERVED, 0, key, number, self.next, False)

    def free(self, entry: Known) -> None:
        """Nothing to be given back."""

    def keep_only(self, entries: Iterable[Known]) -> None:
        """Nothing to be given back."""
