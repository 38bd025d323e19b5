"""What tells whether bytes are those that were written, and the version that all formats of a store share.

Changing a byte of any format changes VERSION and adds golden files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import xxhash

VERSION = 1
CHECKSUM_BYTES = 16

Bytes: TypeAlias = bytes | bytearray | memoryview


def checksum(data: Bytes) -> bytes:
    """XXH3-128, seed 0, in its canonical (big-endian) byte order."""
    return xxhash.xxh3_128_digest(data)


def checksum_of(views: Sequence[memoryview]) -> bytes:
    """XXH3-128 of the concatenation."""
    if len(views) == 1:
        return checksum(views[0])
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    return digest.digest()
