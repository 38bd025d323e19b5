"""Seals: authentication of objects in a shared store.

Without a secret, a seal detects accidental changes of headers, manifests and epoch marks. With a secret, a seal is
keyed BLAKE3 and also covers the bytes of chunks: an attacker without the secret cannot create a seal, or move an object
to another name.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from blake3 import blake3

SEAL_BYTES = 32
_LENGTH_BYTES = 8
_CONTEXT = "hybridkv 2026 seals of an object store v1"


class Seals:
    """Creates and checks the seals of one fleet.

    Args:
        secret: secret that all engines share; empty if every writer is trusted.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = blake3(secret, derive_key_context=_CONTEXT).digest() if secret else None

    @property
    def is_keyed(self) -> bool:
        """True if seals are keyed, and so cover the bytes of chunks."""
        return self._key is not None

    def of(self, *parts: bytes | memoryview, views: Sequence[memoryview] = ()) -> bytes:
        """Seal of these parts, each preceded by its length. A keyed seal also covers the bytes of `views`, for any
        split into views; otherwise only the chunk's checksum covers these bytes."""
        digest = blake3() if self._key is None else blake3(key=self._key)
        for part in parts:
            digest.update(len(part).to_bytes(_LENGTH_BYTES, "little"))
            digest.update(part)
        if self.is_keyed:
            digest.update(sum(map(len, views)).to_bytes(_LENGTH_BYTES, "little"))
            for view in views:
                digest.update(view)
        return digest.digest()

    def is_valid(self, seal: bytes, *parts: bytes | memoryview, views: Sequence[memoryview] = ()) -> bool:
        """True if a seal matches. Compares in constant time."""
        return hmac.compare_digest(seal, self.of(*parts, views=views))
