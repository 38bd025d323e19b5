"""Mark of the current epoch: one object, overwritten when a new epoch begins."""

from __future__ import annotations

import struct

from hybridkv.tiers.object.format.seals import SEAL_BYTES, Seals

MAGIC = b"hkvepoc1"
_HEAD = struct.Struct("<8sQ")
"""Magic, epoch."""
EPOCH_MARK_BYTES = _HEAD.size + SEAL_BYTES


def encode_epoch(seals: Seals, name: str, epoch: int) -> bytes:
    """Encode a mark.

    Args:
        seals: seals of the fleet.
        name: name of the object; the mark is valid only under this name.
        epoch: at least 0.
    """
    head = _HEAD.pack(MAGIC, epoch)
    return head + seals.of(name.encode(), head)


def decode_epoch(seals: Seals, name: str, data: bytes) -> int | None:
    """Decode a mark. None if this fleet did not write it under this name."""
    head, seal = data[: _HEAD.size], data[_HEAD.size :]
    if len(data) != EPOCH_MARK_BYTES or not seals.is_valid(seal, name.encode(), head):
        return None
    magic, epoch = _HEAD.unpack(head)
    return int(epoch) if magic == MAGIC else None


def parse_epoch(data: bytes) -> int | None:
    """Epoch of a mark, without a check of its seal. None if the bytes are no mark."""
    if len(data) != EPOCH_MARK_BYTES:
        return None
    magic, epoch = _HEAD.unpack(data[: _HEAD.size])
    return int(epoch) if magic == MAGIC else None
