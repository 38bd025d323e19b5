"""The bytes of the epoch file: how often a namespace was cleared. Kept twice, so that one damaged byte forgets nothing.

Segments of another epoch hold nothing. FORMAT.md describes the bytes. Reads and writes no file.
"""

from __future__ import annotations

import struct

from hybridkv.tiers.disk.format.checksum import VERSION, checksum
from hybridkv.tiers.disk.format.layout import LARGEST_EPOCH

EPOCH_MAGIC = b"\x89HKVC\r\n\n"
_FIELDS = struct.Struct("<8sHHIQ32s")
_COPY_BYTES = _FIELDS.size + 16


def encode(epoch: int, namespace: bytes) -> bytes:
    fields = _FIELDS.pack(EPOCH_MAGIC, VERSION, 0, 0, epoch, namespace)
    return 2 * (fields + checksum(fields))


def decode(data: bytes, namespace: bytes) -> int | None:
    """None when neither copy is whole, of this namespace and version, and an epoch that can be."""
    for start in (0, _COPY_BYTES):
        epoch = _decode_copy(data[start : start + _COPY_BYTES], namespace)
        if epoch is not None:
            return epoch
    return None


def after(epoch: int) -> int:
    """The next one. Only which one it is counts, not which is higher, so behind the largest they begin anew."""
    return epoch + 1 if epoch < LARGEST_EPOCH else 0


def _decode_copy(data: bytes, namespace: bytes) -> int | None:
    if len(data) != _COPY_BYTES or checksum(data[: _FIELDS.size]) != data[_FIELDS.size :]:
        return None
    magic, version, _, _, epoch, owner = _FIELDS.unpack_from(data)
    is_ours = (magic, version, owner) == (EPOCH_MAGIC, VERSION, namespace) and epoch <= LARGEST_EPOCH
    return int(epoch) if is_ours else None
