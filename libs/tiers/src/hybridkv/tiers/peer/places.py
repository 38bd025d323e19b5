"""Places of chunks in peers' memory. A slot of this tier encodes the peer and the offset."""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.tiers.contract import Slot

_SHIFT = 48
MAX_OFFSET = (1 << _SHIFT) - 1


class PeerPlace(NamedTuple):
    """A chunk that a peer holds, and leased to this engine.

    Args:
        tier_slot: slot of this tier.
        num_bytes: of the chunk.
        until_s: expiry time of the offer.
        is_leased: the peer keeps it for this engine.
    """

    tier_slot: Slot
    num_bytes: int
    until_s: float
    is_leased: bool = True

    @property
    def peer(self) -> int:
        return peer_of(self.tier_slot)

    def slot(self, number: int) -> Slot:
        """Slot for the medium. It holds the offset in the peer's memory, so `number` is unused."""
        return self.tier_slot


def to_tier_slot(peer: int, slot: Slot) -> Slot:
    """Convert a slot of a peer's memory to a slot of this tier."""
    return Slot(tuple((peer << _SHIFT | offset, num_bytes) for offset, num_bytes in slot.extents))


def peer_of(slot: Slot) -> int:
    """Peer number of a slot."""
    return slot.first_offset >> _SHIFT


def to_peer_slot(slot: Slot) -> Slot:
    """Slot in the peer's memory, without the peer number."""
    return Slot(tuple((offset & MAX_OFFSET, num_bytes) for offset, num_bytes in slot.extents))
