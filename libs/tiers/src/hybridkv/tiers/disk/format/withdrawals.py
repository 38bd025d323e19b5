"""Bytes of the two files that say which records may never be offered: the epoch and the quarantine journal.

The epoch counts how often a namespace was cleared: segments of another epoch hold nothing. It is kept twice, so that
one damaged byte loses nothing. An entry of the journal withdraws every record of a key below an address, so also copies
of it elsewhere. FORMAT.md describes the bytes. Reads and writes no file.
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
    """None when neither copy is whole, of this namespace and version, and an epoch that can be."""
    for start in (0, _EPOCH_COPY_BYTES):
        epoch = _decode_epoch_copy(data[start : start + _EPOCH_COPY_BYTES], namespace)
        if epoch is not None:
            return epoch
    return None


def next_epoch(epoch: int) -> int:
    """The next one. Only which one it is counts, not which is higher, so behind the largest they begin anew."""
    return epoch + 1 if epoch < LARGEST_EPOCH else 0


def _decode_epoch_copy(data: bytes, namespace: bytes) -> int | None:
    if len(data) != _EPOCH_COPY_BYTES or checksum(data[: _EPOCH.size]) != data[_EPOCH.size :]:
        return None
    magic, version, _, _, epoch, owner = _EPOCH.unpack_from(data)
    is_ours = (magic, version, owner) == (EPOCH_MAGIC, VERSION, namespace) and epoch <= LARGEST_EPOCH
    return int(epoch) if is_ours else None


JOURNAL_MAGIC = b"\x89HKVQ\r\n\n"
_JOURNAL_HEAD = struct.Struct("<8sHHI32s16s")
_WITHDRAWAL = struct.Struct("<16sQQ")
_SEED = 0x9A7A
JOURNAL_HEAD_BYTES = _JOURNAL_HEAD.size
WITHDRAWAL_BYTES = _WITHDRAWAL.size + 16


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


def encode_journal_head(namespace: bytes) -> bytes:
    fields = _JOURNAL_HEAD.pack(JOURNAL_MAGIC, VERSION, 0, 0, namespace, b"")[: _JOURNAL_HEAD.size - 16]
    return fields + checksum(fields)


def encode_withdrawal(entry: Withdrawal) -> bytes:
    body = _WITHDRAWAL.pack(*entry)
    return body + checksum(body)


def decode_journal(data: bytes, namespace: bytes) -> list[Withdrawal] | None:
    """Every entry that is whole and can be; None when the file is not this namespace's journal of this version."""
    if data[:JOURNAL_HEAD_BYTES] != encode_journal_head(namespace):
        return None
    found = []
    for start in range(JOURNAL_HEAD_BYTES, len(data) - WITHDRAWAL_BYTES + 1, WITHDRAWAL_BYTES):
        body = data[start : start + _WITHDRAWAL.size]
        entry = Withdrawal(*_WITHDRAWAL.unpack(body))
        is_whole = checksum(body) == data[start + _WITHDRAWAL.size : start + WITHDRAWAL_BYTES]
        if is_whole and entry.bound <= END_ADDRESS and is_place(entry.address):
            found.append(entry)
    return found


def num_journal_entries(data: bytes) -> int:
    """For how many there are bytes, whole or not."""
    return max(len(data) - JOURNAL_HEAD_BYTES, 0) // WITHDRAWAL_BYTES


class Withdrawals:
    """Those in force, the last one of each key, at most `max_entries`: the oldest are forgotten."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[bytes, Withdrawal] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Withdrawal) -> int:
        """How many had to be forgotten for it."""
        self._entries.pop(entry.key_digest, None)
        self._entries[entry.key_digest] = entry
        if len(self._entries) <= self._max_entries:
            return 0
        del self._entries[next(iter(self._entries))]
        return 1

    def covers(self, key: Key, address: int) -> bool:
        entry = self._entries.get(digest_of(key)) if self._entries else None
        return entry is not None and address < entry.bound

    def keep(self, first_address: int) -> None:
        """Forget those that can withdraw nothing that lies at `first_address` or behind it."""
        kept = {key: entry for key, entry in self._entries.items() if entry.bound > first_address}
        self._entries = kept

    def all(self) -> list[Withdrawal]:
        return list(self._entries.values())
