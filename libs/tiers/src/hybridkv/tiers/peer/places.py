"""How a slot names a peer beside a place: the index knows who holds a chunk, and a rank's medium has to."""

from __future__ import annotations

from hybridkv.tiers.contract import Slot

_SHIFT = 48
MAX_OFFSET = (1 << _SHIFT) - 1


def at_peer(peer: int, slot: Slot) -> Slot:
    """A place in a peer's memory, as a slot of this side's tier."""
    return Slot(tuple((peer << _SHIFT | offset, num_bytes) for offset, num_bytes in slot.extents))


def peer_of(slot: Slot) -> int:
    """Whose memory it is."""
    return slot.first_offset >> _SHIFT


def there(slot: Slot) -> Slot:
    """The place as that peer calls it."""
    return Slot(tuple((offset & MAX_OFFSET, num_bytes) for offset, num_bytes in slot.extents))
