"""The mark that says which epoch of a cache is current. It is one object, written over when another epoch begins."""

from __future__ import annotations

import struct

from hybridkv.tiers.object.format.seals import SEAL_BYTES, Seals

MAGIC = b"hkvepoc1"
_HEAD = struct.Struct("<8sQ")
"""Magic, epoch."""
EPOCH_MARK_BYTES = _HEAD.size + SEAL_BYTES


def encode_epoch(seals: Seals, name: str, epoch: int) -> bytes:
    """The bytes of a mark.

    Args:
        seals: of the fleet.
        name: of the object; the mark is valid under this name alone.
        epoch: at least 0.
    """
    head = _HEAD.pack(MAGIC, epoch)
    return head + seals.of(name.encode(), head)


def decode_epoch(seals: Seals, name: str, data: bytes) -> int | None:
    """The epoch of a mark. None where this fleet did not write it under this name."""
    head, seal = data[: _HEAD.size], data[_HEAD.size :]
    if len(data) != EPOCH_MARK_BYTES or not seals.holds(seal, name.encode(), head):
        return None
    magic, epoch = _HEAD.unpack(head)
    return int(epoch) if magic == MAGIC else None
