"""Byte format of the file of changes: changes to the records since a snapshot. See FORMAT.md.

A snapshot plus all later changes lists the same records as a snapshot taken now; the LRU order may differ, because the
change log may drop uses. Batches are appended in order, and the checksum of a batch covers the checksum of the previous
batch. So a reader accepts only the batches before the first damaged batch, and searches the segments for later records.
Reads and writes no file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.layout import LARGEST_KEY_BYTES, VERSION, checksum, is_place, is_place_of

CHANGES_MAGIC = b"\x89HKVL\r\n\n"
_HEAD = struct.Struct("<8sHHI32s16s")
_BATCH = struct.Struct("<II")
_PLACE = struct.Struct("<BQ")
_TWO_NUMBERS = struct.Struct("<BQQ")
_COMMITTED = struct.Struct("<BQQH")
_CHECKSUM_BYTES = 16
HEAD_BYTES = _HEAD.size + _CHECKSUM_BYTES


class Reserved(NamedTuple):
    """The index assigned this address to a new record or a copy, which may be written from now on."""

    address: int
    payload_bytes: int


class Committed(NamedTuple):
    """The record at this address is whole, and becomes the most recently used record."""

    address: int
    payload_bytes: int
    key: Key


class Relocated(NamedTuple):
    """The record was copied to `new_address` and is offered from there. Its place in the LRU order does not change."""

    address: int
    new_address: int


class Gone(NamedTuple):
    """The record at this address is not offered any more, or was never offered."""

    address: int


class Used(NamedTuple):
    """The record at this address becomes the most recently used record."""

    address: int


Change: TypeAlias = Reserved | Committed | Relocated | Gone | Used

_RESERVED, _COMMITTED_KIND, _RELOCATED, _GONE, _USED = range(1, 6)
_KINDS: dict[type[Change], int] = {
    Reserved: _RESERVED,
    Committed: _COMMITTED_KIND,
    Relocated: _RELOCATED,
    Gone: _GONE,
    Used: _USED,
}
_LAYOUTS = {1: _TWO_NUMBERS, 2: _COMMITTED, 3: _TWO_NUMBERS, 4: _PLACE, 5: _PLACE}


class Decoded(NamedTuple):
    """Changes of all batches before the first damaged batch of a file."""

    changes: list[Change]
    end_offset: int
    """End of the last whole batch."""
    last_checksum: bytes
    """Checksum of the last whole batch, or of the head if there is none. The checksum of the next batch covers it."""
    is_whole: bool
    """True if no damaged bytes follow."""


def encode_head(namespace: bytes, base: bytes) -> bytes:
    """Head of the file. `base`: checksum of the snapshot before these changes."""
    fields = _HEAD.pack(CHANGES_MAGIC, VERSION, 0, 0, namespace, base)
    return fields + checksum(fields)


def checksum_of(data: bytes) -> bytes:
    """Checksum of a head or a batch. The checksum of the next batch covers this checksum."""
    return data[-_CHECKSUM_BYTES:]


def encode_batch(changes: Iterable[Change], last_checksum: bytes) -> bytes:
    """Bytes of one batch. `last_checksum`: checksum of the previous head or batch."""
    parts = [_encode(change) for change in changes]
    body = b"".join(parts)
    fields = _BATCH.pack(len(body), len(parts)) + body
    return fields + checksum(last_checksum + fields)


def decode(data: bytes, namespace: bytes, base: bytes) -> Decoded | None:
    """Changes of a file. None if the head is damaged, belongs to another namespace or snapshot, or has another
    version."""
    head = encode_head(namespace, base)
    if data[:HEAD_BYTES] != head:
        return None
    changes: list[Change] = []
    at, last_checksum = HEAD_BYTES, checksum_of(head)
    while len(data) - at >= _BATCH.size + _CHECKSUM_BYTES:
        body_bytes, count = _BATCH.unpack_from(data, at)
        stop = at + _BATCH.size + body_bytes
        found = data[stop : stop + _CHECKSUM_BYTES]
        if checksum(last_checksum + data[at:stop]) != found:
            break
        batch = _decode_body(data, at + _BATCH.size, stop)
        if batch is None or len(batch) != count:
            break
        changes += batch
        at, last_checksum = stop + _CHECKSUM_BYTES, found
    return Decoded(changes, at, last_checksum, at == len(data))


def _encode(change: Change) -> bytes:
    if isinstance(change, Committed):
        return _COMMITTED.pack(_KINDS[Committed], *change[:2], len(change.key)) + change.key
    kind = _KINDS[type(change)]
    return _LAYOUTS[kind].pack(kind, *change)


def _decode_body(data: bytes, at: int, stop: int) -> list[Change] | None:
    """Changes of one batch. None if the body holds an unknown kind, or an impossible place, size or key.

    A file may have millions of changes. So there is one branch for each kind, frequent kinds first.
    """
    changes: list[Change] = []
    add = changes.append
    try:
        while at < stop:
            kind = data[at]
            if kind == _COMMITTED_KIND:
                _, address, payload_bytes, key_bytes = _COMMITTED.unpack_from(data, at)
                at += _COMMITTED.size + key_bytes
                is_possible = is_place_of(address, payload_bytes) and 0 < key_bytes <= LARGEST_KEY_BYTES
                add(Committed(address, payload_bytes, data[at - key_bytes : at]))
            elif kind == _RESERVED:
                _, address, payload_bytes = _TWO_NUMBERS.unpack_from(data, at)
                at += _TWO_NUMBERS.size
                is_possible = is_place_of(address, payload_bytes)
                add(Reserved(address, payload_bytes))
            elif kind == _USED:
                _, address = _PLACE.unpack_from(data, at)
                at += _PLACE.size
                is_possible = is_place(address)
                add(Used(address))
            elif kind == _GONE:
                _, address = _PLACE.unpack_from(data, at)
                at += _PLACE.size
                is_possible = is_place(address)
                add(Gone(address))
            elif kind == _RELOCATED:
                _, address, new_address = _TWO_NUMBERS.unpack_from(data, at)
                at += _TWO_NUMBERS.size
                is_possible = is_place(address) and is_place(new_address)
                add(Relocated(address, new_address))
            else:
                return None
            if not is_possible:
                return None
    except struct.error:  # the data ends within a change
        return None
    return changes if at == stop else None
