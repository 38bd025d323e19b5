"""Where chunks lie that peers hold, as entries of a ledger. Takes up nothing here but the memory to know of it."""

from __future__ import annotations

from collections.abc import Iterable

from hybridkv.tiers.contract import Key, Slot
from hybridkv.tiers.ledger import Entry, KeyState


class Known(Entry):
    """A chunk that a peer holds."""

    slot: Slot
    key: Key
    peer: int
    until_s: float
    """It is offered until then."""
    is_leased: bool
    """The peer keeps it for this side."""


class Whereabouts:
    """The `Space` of an index of peers: there is a place for whatever was heard of, and it is told before it is taken.

    `next` is (slot, peer, until_s) of the key that is taken next.
    """

    def __init__(self) -> None:
        self.next: tuple[Slot, int, float] = (Slot(()), 0, 0.0)

    def take(self, key: Key, num_bytes: int, cost: int) -> Known:
        slot, peer, until_s = self.next
        return Known(cost, KeyState.RESERVED, 0, slot, key, peer, until_s, True)

    def free(self, entry: Known) -> None:
        """Nothing to be given back."""

    def keep_only(self, entries: Iterable[Known]) -> None:
        """Nothing to be given back."""
