"""What is believed of chunks at a server, as entries of a ledger. Takes up nothing but the memory to know of it."""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.ledger import Entry, KeyState


class Known(Entry):
    """A chunk that a server holds, or is given."""

    key: Key
    place: int
    num_bytes: int
    is_over: bool
    """It was believed for long enough: nobody who comes now is offered it."""

    @property
    def slot(self) -> Slot:
        return Slot(((self.place, self.num_bytes),))


class Names:
    """The `Space` of an index of a server: a place is a number, of which no two chunks have the same. What lies there
    is found by its key."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, key: Key, num_bytes: int, cost: int) -> Known:
        place, self._next = self._next, self._next + num_bytes
        return Known(cost, KeyState.RESERVED, 0, key, place, num_bytes, False)

    def free(self, entry: Known) -> None:
        """Nothing to be given back."""

    def keep_only(self, entries: Iterable[Known]) -> None:
        """Nothing to be given back."""
