"""Common parts of all formats of a store: file names, pages, addresses, version and checksum. See FORMAT.md.

Opens, reads and writes no file. A change of any byte in a format needs a new VERSION and new golden files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

PAGE_BYTES = 4096
"""Alignment of every header, record and write. Enough for O_DIRECT on any device."""

SEGMENT_HEAD_BYTES = 2 * PAGE_BYTES
"""Size of the header page and the seal page of a segment. The first record follows these pages."""

ADDRESS_BITS = 32
LARGEST_SEGMENT_BYTES = 1 << ADDRESS_BITS
"""Largest segment size. Address of a record: segment number times this, plus the offset in the segment file. Addresses
do not depend on the configured segment size, so a store keeps its records when the capacity changes."""

LARGEST_NUMBER = (1 << 31) - 1
"""Largest segment number: addresses fit into 63 bits. One new segment a second reaches this number in 68 years."""
LARGEST_FIRST_NUMBER = LARGEST_NUMBER >> 1
"""Highest number of the first new segment of an index, so that numbers do not run out while the index runs."""

LARGEST_EPOCH = (1 << 63) - 1
LARGEST_KEY_BYTES = 256

END_ADDRESS = (LARGEST_NUMBER + 1) << ADDRESS_BITS
"""Upper bound of addresses, exclusive."""
_PLACES = END_ADDRESS - PAGE_BYTES
"""Mask of the bits that may be set in an address: a record begins at a page."""
_OFFSETS = LARGEST_SEGMENT_BYTES - 1
_LAST_PAGE = LARGEST_SEGMENT_BYTES - PAGE_BYTES


def round_up(num_bytes: int, step: int = PAGE_BYTES) -> int:
    return -(-num_bytes // step) * step


def record_bytes(payload_bytes: int) -> int:
    """Size of a record in its segment: a header page, and the payload in whole pages."""
    return PAGE_BYTES + round_up(payload_bytes)


def address_of(number: int, offset: int) -> int:
    return (number << ADDRESS_BITS) + offset


def is_place(address: int) -> bool:
    """True if a record can begin there: at a page, after the head of a segment."""
    return address | _PLACES == _PLACES and address & _OFFSETS >= SEGMENT_HEAD_BYTES


def is_place_of(address: int, payload_bytes: int) -> bool:
    """True if a record of this size can begin there in a segment of the largest size."""
    return is_place(address) and 0 < payload_bytes <= _LAST_PAGE - (address & _OFFSETS)


def is_segment_size(segment_bytes: int) -> bool:
    """True if a segment can have this size."""
    smallest = SEGMENT_HEAD_BYTES + record_bytes(1)
    return smallest <= segment_bytes <= LARGEST_SEGMENT_BYTES and not segment_bytes % PAGE_BYTES


def number_of(address: int) -> int:
    return address >> ADDRESS_BITS


def offset_of(address: int) -> int:
    return address & _OFFSETS


VERSION = 1
CHECKSUM_BYTES = 16

Bytes: TypeAlias = bytes | bytearray | memoryview


def checksum(data: Bytes) -> bytes:
    """XXH3-128, seed 0, in canonical (big-endian) byte order."""
    return xxhash.xxh3_128_digest(data)


def checksum_of(views: Sequence[memoryview]) -> bytes:
    """XXH3-128 of the concatenated views."""
    if len(views) == 1:
        return checksum(views[0])
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    return digest.digest()


LOCK_NAME = "LOCK"
FINGERPRINT_NAME = "namespace.json"
EPOCH_NAME = "epoch"
SNAPSHOT_NAME = "snapshot"
CHANGES_NAME = "changes"
JOURNAL_NAME = "quarantine"
WRITTEN_NAMES = (FINGERPRINT_NAME, EPOCH_NAME, SNAPSHOT_NAME, CHANGES_NAME, JOURNAL_NAME)
"""Files that are created or replaced under a temporary name and then renamed."""

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_SEGMENT = re.compile(r"segment-([0-9]{10})")
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,5})")


def is_namespace(name: str) -> bool:
    return _NAMESPACE.fullmatch(name) is not None


def is_namespace_file(name: str) -> bool:
    """True for the name of a file of a namespace, also for its temporary name."""
    return name == LOCK_NAME or name.removesuffix(".new") in WRITTEN_NAMES


def segment_name(number: int) -> str:
    return f"segment-{number:010d}"


def segment_number(name: str) -> int | None:
    """Number in a segment's file name; None for another name or a number that is too large."""
    found = _SEGMENT.fullmatch(name)
    number = int(found[1]) if found else LARGEST_NUMBER + 1
    return number if number <= LARGEST_NUMBER else None


def rank_name(rank: int) -> str:
    return f"rank-{rank}"


def rank_number(name: str) -> int | None:
    found = _RANK.fullmatch(name)
    return int(found[1]) if found else None
