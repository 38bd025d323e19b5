"""Page identities, cache names, and the words that a server hashes in place of token ids.

A server hashes the 32-bit words of each chunk together with the hash of the chunk before it. The server does not
interpret the words. This library sends digests in place of token ids, because a digest also identifies the adapter,
images and weights. So the server never gets the prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.page import IDENTITY_BYTES

WORD_BYTES = 4
PAGE_FORMAT = 1


def prefix_words(digests: Iterable[bytes], chunk_tokens: int) -> bytes:
    """Words for the server: for each digest one chunk, the digest padded with zeros to `chunk_tokens` words.

    Raises:
        LMCacheConfigurationError: the chunk has fewer words than a digest.
    """
    chunk_bytes = chunk_tokens * WORD_BYTES
    chunks = []
    for digest in digests:
        if len(digest) > chunk_bytes:
            expected = f"at least {-(-len(digest) // WORD_BYTES)} tokens"
            raise LMCacheConfigurationError(
                "chunk_size", expected, chunk_tokens, "start the server with a larger --chunk-size"
            )
        chunks.append(digest.ljust(chunk_bytes, b"\0"))
    return b"".join(chunks)


def page_identity(digest: bytes, group: int, block: int) -> bytes:
    """Identity of the page of one block. `digest` identifies the prefix up to the end of the block's chunk, and `block`
    is the index of the block in this chunk."""
    content = len(digest).to_bytes(2, "little") + digest + group.to_bytes(4, "little") + block.to_bytes(8, "little")
    return hashlib.blake2b(content, digest_size=IDENTITY_BYTES, person=b"hybridkv page 1").digest()


def cache_name(fingerprint: bytes, geometry: bytes) -> str:
    """Name of a cache at a server. Equal only for equal content and layout.

    The name has only letters, digits and "-", because servers use it in file names.
    """
    content = len(fingerprint).to_bytes(2, "little") + fingerprint + geometry
    digest = hashlib.blake2b(content, digest_size=20, person=b"hybridkv cache 1").hexdigest()
    return f"hybridkv-{PAGE_FORMAT}-{digest}"
