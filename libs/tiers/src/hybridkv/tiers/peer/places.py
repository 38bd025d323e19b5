"""Places of chunks in peers' memory.

A slot of this tier names the peer beside the offset, because a rank's medium needs both.
"""

from __future__ import annotations

from typing import NamedTuple

from hybridkv.tiers.contract import Slot

_SHIFT = 48
MAX_OFFSET = (1 << _SHIFT) - 1


class PeerPlace(NamedTuple):
    """A chunk that a peer holds, and leased to this engine.

    Args:
        at_peer: its slot here.
        num_bytes: of the chunk.
        until_s: it is offered until then.
        is_leased: the peer keeps it for this engine.
    """

    at_peer: Slot
    num_bytes: int
    until_s: float
    is_leased: bool = True

    @property
    def peer(self) -> int:
        return peer_of(self.at_peer)

    def slot(self, number: int) -> Slot:
        """As `RemotePlace` says. The offset in the peer's memory is needed, so it is not this number."""
        return self.at_peer


def at_peer(peer: int, slot: Slot) -> Slot:
    """A slot of a peer's memory, as a slot of this tier."""
    return Slot(tuple((peer << _SHIFT | offset, num_bytes) for offset, num_bytes in slot.extents))


def peer_of(slot: Slot) -> int:
    """The peer that a slot names."""
    return slot.first_offset >> _SHIFT


def there(slot: Slot) -> Slot:
    """The same slot without the peer."""
    return Slot(tuple((offset & MAX_OFFSET, num_bytes) for offset, num_bytes in slot.extents))
