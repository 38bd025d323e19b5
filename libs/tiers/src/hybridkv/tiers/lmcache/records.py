"""A chunk as a server sees it: one chunk of one group that is stored whole, under words that are its key's.

A server derives its own key from the name of a cache and from the words that it takes for tokens. So the name says
whose content it is and how many bytes a page has, and the words say which chunk. What a page says of itself is compared
when it comes back, and is the whole key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from hybridkv.lmcache.geometry import Geometry, PageGroup, one_record
from hybridkv.lmcache.keys import cache_name, page_identity, words_of
from hybridkv.lmcache.operations import Prefix
from hybridkv.tiers.contract import Key

_WORDS_BYTES = 32
_GROUP = _BLOCK = 0


def groups_of(num_bytes: int) -> Callable[[int], tuple[PageGroup]]:
    """What a cache of chunks of so many bytes has, at a server with some chunk.

    What is returned raises `LMCacheConfigurationError` for a server whose chunk has too few words.
    """
    one = one_record(num_bytes)

    def groups(chunk_tokens: int) -> tuple[PageGroup]:
        prefix_of("", 1, b"", chunk_tokens)
        return one(chunk_tokens)

    return groups


def cache_of(namespace: bytes, num_bytes: int, chunk_tokens: int) -> str:
    """The name of the cache of chunks of so many bytes, at a server with this chunk."""
    return cache_name(namespace, Geometry(groups_of(num_bytes)(chunk_tokens), chunk_tokens).digest())


def prefix_of(model: str, world_size: int, key: Key, chunk_tokens: int) -> Prefix:
    """What a server is asked for.

    Raises:
        LMCacheConfigurationError: its chunk has too few words.
    """
    digest = hashlib.blake2b(key, digest_size=_WORDS_BYTES, person=b"hybridkv chunk 1").digest()
    return Prefix(model, world_size, words_of([digest], chunk_tokens))


def identity_of(key: Key) -> bytes:
    """What its page says that it is."""
    return page_identity(key, _GROUP, _BLOCK)
