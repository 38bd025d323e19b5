"""Names: digests as the words that a server hashes, identities of pages, and the name that a cache goes by.

A server derives its keys from words of 32 bits, a chunk at a time, each after what came before it. What the words mean
is ours: tokens do not say which adapter, which image and which weights made the bytes, digests do, and a prompt stays
where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from hybridkv.lmcache.errors import LMCacheConfigurationError
from hybridkv.lmcache.page import IDENTITY_BYTES

WORD_BYTES = 4
PAGE_FORMAT = 1


def words_of(digests: Iterable[bytes], chunk_tokens: int) -> bytes:
    """One chunk of words for each digest, the digest first and zeros behind it.

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
    """What the page of one block says that it is: `digest` names the prefix that its chunk ends."""
    said = len(digest).to_bytes(2, "little") + digest + group.to_bytes(4, "little") + block.to_bytes(8, "little")
    return hashlib.blake2b(said, digest_size=IDENTITY_BYTES, person=b"hybridkv page 1").digest()


def cache_name(fingerprint: bytes, geometry: bytes) -> str:
    """The name under which a server keeps a cache: equal where both content and layout are, and for no other client.

    Letters, digits and "-" alone: servers put it into names of files.
    """
    said = len(fingerprint).to_bytes(2, "little") + fingerprint + geometry
    digest = hashlib.blake2b(said, digest_size=20, person=b"hybridkv cache 1").hexdigest()
    return f"hybridkv-{PAGE_FORMAT}-{digest}"
