"""One page of a pool: a header of ours, and behind it the bytes of one block of one group. PAGE.md has every field.

LMCache keeps no checksum: its server gives back what its disk gives it, and says that it succeeded. So each page says
what it is and what its bytes come to, and is believed only where both are true. To the server header and bytes are one
run of bytes.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable

import xxhash

from hybridkv.lmcache.errors import LMCacheProtocolError

HEADER_BYTES = 64
IDENTITY_BYTES = 16
MAGIC = b"HKVPAGE1"
_FIELDS = struct.Struct("<8sQ16s16s")
"""Magic, bytes behind the header, identity, checksum; the rest of the header is zero."""
_REST = bytes(HEADER_BYTES - _FIELDS.size)
_UNSEALED = struct.Struct("<8sQ16s")
_UNIT_BYTES = 64

Digest = Callable[[memoryview, bytes], bytes]
"""16 bytes over a view and what follows it."""


class PageState(enum.StrEnum):
    """What a page turned out to be."""

    GOOD = "good"
    ABSENT = "absent"
    """No page of ours was ever stored there: the null block, or nothing."""
    FOREIGN = "foreign"
    """A good page of something else."""
    CORRUPT = "corrupt"
    """Not the bytes that were sealed."""


def page_bytes(payload_bytes: int) -> int:
    """The size of a page that holds so many bytes: whole units, so that bytes behind each header are aligned."""
    if payload_bytes <= 0:
        raise LMCacheProtocolError(f"a page of {payload_bytes} bytes")
    return HEADER_BYTES + -(-payload_bytes // _UNIT_BYTES) * _UNIT_BYTES


def xxh3_128(view: memoryview, more: bytes) -> bytes:
    """The digest of pages."""
    digest = xxhash.xxh3_128(view)
    digest.update(more)
    return digest.digest()


def payload_of(page: memoryview, payload_bytes: int) -> memoryview:
    """Where the bytes go."""
    return page[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def seal(page: memoryview, identity: bytes, payload_bytes: int, digest: Digest = xxh3_128) -> None:
    """Write the header of a page whose bytes are in place."""
    if len(identity) != IDENTITY_BYTES or HEADER_BYTES + payload_bytes > len(page):
        raise LMCacheProtocolError(f"{payload_bytes} bytes under {identity!r} do not fit a page of {len(page)}")
    said = _UNSEALED.pack(MAGIC, payload_bytes, identity)
    checksum = digest(payload_of(page, payload_bytes), said)
    page[:HEADER_BYTES] = said + checksum + _REST


def blank(page: memoryview) -> None:
    """Make a page say that it is none. Done before a server is asked to write it, so that what it leaves out shows."""
    page[:HEADER_BYTES] = bytes(HEADER_BYTES)


def check(page: memoryview, identity: bytes, payload_bytes: int, digest: Digest = xxh3_128) -> PageState:
    """Whether a page holds exactly the bytes that were sealed as `identity`."""
    magic, length, found, checksum = _FIELDS.unpack_from(page)
    if magic != MAGIC:
        return PageState.ABSENT if not any(page[:HEADER_BYTES]) else PageState.CORRUPT
    if bytes(page[_FIELDS.size : HEADER_BYTES]) != _REST or HEADER_BYTES + length > len(page):
        return PageState.CORRUPT
    if digest(payload_of(page, length), _UNSEALED.pack(magic, length, found)) != checksum:
        return PageState.CORRUPT
    return PageState.GOOD if (found, length) == (identity, payload_bytes) else PageState.FOREIGN
