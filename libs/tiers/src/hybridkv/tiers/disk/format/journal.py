"""The bytes of the quarantine journal: which records may never be offered again. FORMAT.md describes them.

An entry withdraws every record of a key below an address, so also copies of it that lie elsewhere. Reads and writes no
file.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.checksum import VERSION, checksum
from hybridkv.tiers.disk.format.layout import END_ADDRESS, is_place

JOURNAL_MAGIC = b"\x89HKVQ\r\n\n"
_HEAD = struct.Struct("<8sHHI32s16s")
_BODY = struct.Struct("<16sQQ")
_SEED = 0x9A7A
HEAD_BYTES = _HEAD.size
ENTRY_BYTES = _BODY.size + 16


class Withdrawal(NamedTuple):
    """Records of one key that may not be offered."""

    key_digest: bytes
    bound: int
    """Records with an address below it are withdrawn; whatever is stored later is not."""
    address: int
    """Of the record that was meant, in whose segment it may still lie."""


def digest_of(key: Key) -> bytes:
    """16 bytes that stand for a key."""
    return xxhash.xxh3_128_digest(key, _SEED)


def encode_head(namespace: bytes) -> bytes:
    fields = _HEAD.pack(JOURNAL_MAGIC, VERSION, 0, 0, namespace, b"")[: _HEAD.size - 16]
    return fields + checksum(fields)


def encode_entry(entry: Withdrawal) -> bytes:
    body = _BODY.pack(*entry)
    return body + checksum(body)


def decode(data: bytes, namespace: bytes) -> list[Withdrawal] | None:
    """Every entry that is whole and can be; None when the file is not this namespace's journal of this version."""
    if data[:HEAD_BYTES] != encode_head(namespace):
        return None
    found = []
    for start in range(HEAD_BYTES, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        body = data[start : start + _BODY.size]
        entry = Withdrawal(*_BODY.unpack(body))
        is_whole = checksum(body) == data[start + _BODY.size : start + ENTRY_BYTES]
        if is_whole and entry.bound <= END_ADDRESS and is_place(entry.address):
            found.append(entry)
    return found


def num_entries(data: bytes) -> int:
    """For how many there are bytes, whole or not."""
    return max(len(data) - HEAD_BYTES, 0) // ENTRY_BYTES
