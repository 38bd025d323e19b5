"""Who vouches for what lies in a store that many write to.

Without a secret a seal finds accidents. With one it is keyed BLAKE3 over everything, the bytes of a chunk included:
whoever does not know the secret can neither make it nor move it to another place.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from blake3 import blake3

SEAL_BYTES = 32
_LENGTH_BYTES = 8
_CONTEXT = "hybridkv 2026 seals of an object store v1"


class Seals:
    """Seals of one fleet.

    Args:
        secret: that its engines share; empty where all who may write are trusted.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest() if secret else None

    @property
    def is_keyed(self) -> bool:
        """Whether a seal proves who made it, and covers the bytes of chunks."""
        return self._key is not None

    def of(self, *parts: bytes | memoryview, views: Sequence[memoryview] = ()) -> bytes:
        """The seal of these, each with its length before it, and, where it is keyed, of a chunk's bytes, however they
        are cut into views. Where it is not, a checksum has them."""
        digest = blake3() if self._key is None else blake3(key=self._key)
        for part in parts:
            digest.update(len(part).to_bytes(_LENGTH_BYTES, "little"))
            digest.update(part)
        if self.is_keyed:
            digest.update(sum(map(len, views)).to_bytes(_LENGTH_BYTES, "little"))
            for view in views:
                digest.update(view)
        return digest.digest()

    def holds(self, seal: bytes, *parts: bytes | memoryview, views: Sequence[memoryview] = ()) -> bool:
        """Whether this is their seal."""
        return hmac.compare_digest(seal, self.of(*parts, views=views))
