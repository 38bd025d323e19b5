"""Page of a pool: a header of this library, then the bytes of one block of one group. PAGE.md lists the fields.

LMCache has no checksums: its server returns the bytes from its disk unchecked and reports success. So the header of a
page holds an identity and a checksum, and a page is used only if both match. For the server, header and payload are one
run of bytes.
"""

from __future__ import annotations

import enum
import struct

import xxhash

from hybridkv.lmcache.errors import LMCacheProtocolError

HEADER_BYTES = 64
IDENTITY_BYTES = 16
MAGIC = b"HKVPAGE1"
_FIELDS = struct.Struct("<8sQ16s16s")
"""Magic, payload size, identity, checksum; the rest of the header is zero."""
_REST = bytes(HEADER_BYTES - _FIELDS.size)
_UNSEALED = struct.Struct("<8sQ16s")
_UNIT_BYTES = 64


class PageState(enum.StrEnum):
    """Result of checking a page."""

    GOOD = "good"
    ABSENT = "absent"
    """No page was stored: the null block, or nothing written."""
    FOREIGN = "foreign"
    """A valid page with another identity or payload size."""
    CORRUPT = "corrupt"
    """The bytes differ from the sealed bytes."""


def page_bytes(payload_bytes: int) -> int:
    """Size of a page for a payload. A multiple of 64 bytes, so that every payload is aligned."""
    if payload_bytes <= 0:
        raise LMCacheProtocolError(f"a page of {payload_bytes} bytes")
    return HEADER_BYTES + -(-payload_bytes // _UNIT_BYTES) * _UNIT_BYTES


def _digest(view: memoryview, more: bytes) -> bytes:
    """XXH3-128 of a view followed by bytes."""
    digest = xxhash.xxh3_128(view)
    digest.update(more)
    return digest.digest()


def payload_of(page: memoryview, payload_bytes: int) -> memoryview:
    """Payload part of a page."""
    return page[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def seal(page: memoryview, identity: bytes, payload_bytes: int) -> None:
    """Writes the header of a page. The payload must be complete."""
    if len(identity) != IDENTITY_BYTES or HEADER_BYTES + payload_bytes > len(page):
        raise LMCacheProtocolError(f"{payload_bytes} bytes under {identity!r} do not fit a page of {len(page)}")
    unsealed = _UNSEALED.pack(MAGIC, payload_bytes, identity)
    checksum = _digest(payload_of(page, payload_bytes), unsealed)
    page[:HEADER_BYTES] = unsealed + checksum + _REST


def check(page: memoryview, identity: bytes, payload_bytes: int) -> PageState:
    """Checks that a page holds exactly the bytes sealed as `identity`."""
    magic, length, found, checksum = _FIELDS.unpack_from(page)
    if magic != MAGIC:
        return PageState.ABSENT if not any(page[:HEADER_BYTES]) else PageState.CORRUPT
    if bytes(page[_FIELDS.size : HEADER_BYTES]) != _REST or HEADER_BYTES + length > len(page):
        return PageState.CORRUPT
    if _digest(payload_of(page, length), _UNSEALED.pack(magic, length, found)) != checksum:
        return PageState.CORRUPT
    return PageState.GOOD if (found, length) == (identity, payload_bytes) else PageState.FOREIGN
