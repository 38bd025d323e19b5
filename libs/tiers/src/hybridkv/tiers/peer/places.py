"""Places of chunks in peers' memory. A slot of this tier encodes the peer and the offset."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from hybridkv.tiers.contract import Slot

Address: TypeAlias = tuple[str, int]
"""Host and port."""
PeerId: TypeAlias = int | Address
"""A listed peer: its number, the same in all processes of the engine. A hinted peer: the address of its scheduler."""

_SHIFT = 48
MAX_OFFSET = (1 << _SHIFT) - 1
_HINTED = 0x7FFF
"""Peer number in slots of hinted peers. The address of the peer follows the extents of the chunk, as extents of zero
bytes."""
_WORD_BYTES = 7
"""Number of address bytes in one extent. They are encoded in its offset, which must fit into a signed 64-bit number."""


class PeerPlace(NamedTuple):
    """Place of a chunk that a peer holds and has leased to this engine.

    Args:
        tier_slot: slot of this tier.
        peer: peer of the slot, so that queries need not decode the slot.
        num_bytes: size of the chunk.
        until_s: expiry time of the offer.
        is_leased: False after this engine has ended the lease, or has lost the connection to the peer.
    """

    tier_slot: Slot
    peer: PeerId
    num_bytes: int
    until_s: float
    is_leased: bool = True

    def slot(self, number: int) -> Slot:
        """Slot for the medium. It contains the offset in the peer's memory, so `number` is unused."""
        return self.tier_slot


def to_tier_slot(peer: PeerId, slot: Slot) -> Slot:
    """Convert a slot of a peer's memory to a slot of this tier."""
    number = peer if isinstance(peer, int) else _HINTED
    extents = tuple((number << _SHIFT | offset, num_bytes) for offset, num_bytes in slot.extents)
    return Slot(extents if isinstance(peer, int) else extents + _address_extents(peer))


def peer_of(slot: Slot) -> PeerId:
    """Peer of a slot."""
    number = slot.first_offset >> _SHIFT
    if number != _HINTED:
        return number
    words = (word for word, num_bytes in slot.extents if not num_bytes)
    text = b"".join(word.to_bytes(_WORD_BYTES, "big") for word in words).rstrip(b"\0").decode()
    host, _, port = text.rpartition(":")
    return host, int(port)


def to_peer_slot(slot: Slot) -> Slot:
    """Slot in the peer's memory, without the peer."""
    return Slot(tuple((offset & MAX_OFFSET, num_bytes) for offset, num_bytes in slot.extents if num_bytes))


def _address_extents(address: Address) -> tuple[tuple[int, int], ...]:
    text = f"{address[0]}:{address[1]}".encode()
    words = (text[at : at + _WORD_BYTES].ljust(_WORD_BYTES, b"\0") for at in range(0, len(text), _WORD_BYTES))
    return tuple((int.from_bytes(word, "big"), 0) for word in words)
