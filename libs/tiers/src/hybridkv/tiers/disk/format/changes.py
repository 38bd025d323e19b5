"""The bytes of what happened to the records since a snapshot. FORMAT.md describes them.

A snapshot and the changes behind it say as much as a snapshot that is taken now. Batches are appended in the order in
which it happened, and each one's checksum covers the one before: what is read is always a beginning of what was
written, and whoever reads it searches for what came later. Reads and writes no file.
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
    """A place was given to a record, which somebody may write from now on."""

    address: int
    payload_bytes: int


class Committed(NamedTuple):
    """The record at this address is whole, and the one most recently used."""

    address: int
    payload_bytes: int
    key: Key


class Relocated(NamedTuple):
    """The record is whole at another address too, and offered from there. It keeps its place in the order of use."""

    address: int
    new_address: int


class Gone(NamedTuple):
    """What is at this address is not offered any more, or never was."""

    address: int


class Used(NamedTuple):
    """The record at this address is the one most recently used."""

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
    """As much of a file as is whole."""

    changes: list[Change]
    end_offset: int
    """Behind the last batch that is whole."""
    seal: bytes
    """Its checksum: what the next batch's covers."""
    is_whole: bool
    """Nothing stands behind it."""


def encode_head(namespace: bytes, base: bytes) -> bytes:
    """`base`: the checksum of the snapshot that these changes follow."""
    fields = _HEAD.pack(CHANGES_MAGIC, VERSION, 0, 0, namespace, base)
    return fields + checksum(fields)


def seal_of(data: bytes) -> bytes:
    """Of a head or a batch: what the next batch's checksum covers."""
    return data[-_CHECKSUM_BYTES:]


def encode_batch(changes: Iterable[Change], seal: bytes) -> bytes:
    """`seal`: of the head or batch before."""
    parts = [_encode(change) for change in changes]
    body = b"".join(parts)
    fields = _BATCH.pack(len(body), len(parts)) + body
    return fields + checksum(seal + fields)


def decode(data: bytes, namespace: bytes, base: bytes) -> Decoded | None:
    """None when these are not the changes behind this snapshot, or of another version."""
    head = encode_head(namespace, base)
    if data[:HEAD_BYTES] != head:
        return None
    changes: list[Change] = []
    at, seal = HEAD_BYTES, seal_of(head)
    while len(data) - at >= _BATCH.size + _CHECKSUM_BYTES:
        body_bytes, count = _BATCH.unpack_from(data, at)
        stop = at + _BATCH.size + body_bytes
        found = data[stop : stop + _CHECKSUM_BYTES]
        if checksum(seal + data[at:stop]) != found:
            break
        batch = _decode_body(data, at + _BATCH.size, stop)
        if batch is None or len(batch) != count:
            break
        changes += batch
        at, seal = stop + _CHECKSUM_BYTES, found
    return Decoded(changes, at, seal, at == len(data))


def _encode(change: Change) -> bytes:
    if isinstance(change, Committed):
        return _COMMITTED.pack(_KINDS[Committed], *change[:2], len(change.key)) + change.key
    kind = _KINDS[type(change)]
    return _LAYOUTS[kind].pack(kind, *change)


def _decode_body(data: bytes, at: int, stop: int) -> list[Change] | None:
    """None when it holds what this version does not know, or what no store can have: places, sizes, keys.

    There may be millions of them, hence a branch for each kind, the most frequent ones first.
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
    except struct.error:  # it ends in the middle of one
        return None
    return changes if at == stop else None
