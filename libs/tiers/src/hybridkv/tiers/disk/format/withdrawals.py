"""Byte formats of two files that withdraw records: the epoch and the quarantine journal. See FORMAT.md.

The epoch is a number that changes whenever a namespace is cleared. Records in segments of another epoch are not
offered. The file holds the epoch twice, so that one damaged byte loses nothing. A journal entry withdraws all records
of its key with addresses below its `bound`, copies included. This module reads and writes no file.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.format.layout import END_ADDRESS, LARGEST_EPOCH, VERSION, checksum, is_place

EPOCH_MAGIC = b"\x89HKVC\r\n\n"
_EPOCH = struct.Struct("<8sHHIQ32s")
_EPOCH_COPY_BYTES = _EPOCH.size + 16


def encode_epoch(epoch: int, namespace: bytes) -> bytes:
    fields = _EPOCH.pack(EPOCH_MAGIC, VERSION, 0, 0, epoch, namespace)
    return 2 * (fields + checksum(fields))


def decode_epoch(data: bytes, namespace: bytes) -> int | None:
    """Epoch of a file. None if neither copy is valid. A copy is valid if it is undamaged, belongs to this namespace and
    version, and has an epoch of at most `LARGEST_EPOCH`."""
    for start in (0, _EPOCH_COPY_BYTES):
        epoch = _decode_epoch_copy(data[start : start + _EPOCH_COPY_BYTES], namespace)
        if epoch is not None:
            return epoch
    return None


def next_epoch(epoch: int) -> int:
    """Next epoch. 0 follows the largest epoch: epochs are only compared for equality."""
    return epoch + 1 if epoch < LARGEST_EPOCH else 0


def _decode_epoch_copy(data: bytes, namespace: bytes) -> int | None:
    if len(data) != _EPOCH_COPY_BYTES or checksum(data[: _EPOCH.size]) != data[_EPOCH.size :]:
        return None
    magic, version, _, _, epoch, owner = _EPOCH.unpack_from(data)
    is_ours = (magic, version, owner) == (EPOCH_MAGIC, VERSION, namespace) and epoch <= LARGEST_EPOCH
    return int(epoch) if is_ours else None


JOURNAL_MAGIC = b"\x89HKVQ\r\n\n"
_JOURNAL_HEAD = struct.Struct("<8sHHI32s16s")
_JOURNAL_ENTRY = struct.Struct("<16sQQ")
_SEED = 0x9A7A
JOURNAL_HEAD_BYTES = _JOURNAL_HEAD.size
JOURNAL_ENTRY_BYTES = _JOURNAL_ENTRY.size + 16


class JournalEntry(NamedTuple):
    """Withdrawal of all records of one key below an address."""

    key_digest: bytes
    bound: int
    """Records with a lower address are withdrawn; other records are not."""
    address: int
    """Address of the withdrawn record. The bytes may still be there."""


def digest_of(key: Key) -> bytes:
    """Digest of a key, 16 bytes."""
    return xxhash.xxh3_128_digest(key, _SEED)


def encode_journal_head(namespace: bytes) -> bytes:
    fields = _JOURNAL_HEAD.pack(JOURNAL_MAGIC, VERSION, 0, 0, namespace, b"")[: _JOURNAL_HEAD.size - 16]
    return fields + checksum(fields)


def encode_journal_entry(entry: JournalEntry) -> bytes:
    body = _JOURNAL_ENTRY.pack(*entry)
    return body + checksum(body)


def decode_journal(data: bytes, namespace: bytes) -> list[JournalEntry] | None:
    """All entries with a correct checksum, a bound of at most `END_ADDRESS`, and an address where a record can begin.
    None if the head is damaged, or belongs to another namespace or version."""
    if data[:JOURNAL_HEAD_BYTES] != encode_journal_head(namespace):
        return None
    found = []
    for start in range(JOURNAL_HEAD_BYTES, len(data) - JOURNAL_ENTRY_BYTES + 1, JOURNAL_ENTRY_BYTES):
        body = data[start : start + _JOURNAL_ENTRY.size]
        entry = JournalEntry(*_JOURNAL_ENTRY.unpack(body))
        is_whole = checksum(body) == data[start + _JOURNAL_ENTRY.size : start + JOURNAL_ENTRY_BYTES]
        if is_whole and entry.bound <= END_ADDRESS and is_place(entry.address):
            found.append(entry)
    return found


def num_journal_entries(data: bytes) -> int:
    """Number of entries in the file, damaged entries included."""
    return max(len(data) - JOURNAL_HEAD_BYTES, 0) // JOURNAL_ENTRY_BYTES


class Withdrawals:
    """Current withdrawals: the last one of each key, at most `max_entries`. The oldest are dropped."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[bytes, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: JournalEntry) -> int:
        """Add a withdrawal. Returns the number of dropped withdrawals, 0 or 1."""
        self._entries.pop(entry.key_digest, None)
        self._entries[entry.key_digest] = entry
        if len(self._entries) <= self._max_entries:
            return 0
        del self._entries[next(iter(self._entries))]
        return 1

    def covers(self, key: Key, address: int) -> bool:
        entry = self._entries.get(digest_of(key)) if self._entries else None
        return entry is not None and address < entry.bound

    def drop_below(self, first_address: int) -> None:
        """Drop entries that withdraw nothing at `first_address` or above."""
        kept = {key: entry for key, entry in self._entries.items() if entry.bound > first_address}
        self._entries = kept

    def all(self) -> list[JournalEntry]:
        return list(self._entries.values())
