"""Keys of chunks: which bytes they are, for ever.

A key is a keyed BLAKE3 digest of the token prefix that the chunk ends, under a secret-free key that stands for the
fingerprint and the group. The prefix comes in as the engine's own chained block hashes where those are stable, so no
token is hashed twice; `TokenHashes` makes such a chain where they are not.
"""

from collections.abc import Callable, Sequence

import msgspec
from blake3 import blake3

from hybridkv.hashing.fingerprint import Fingerprint, GroupFingerprint

KEY_BYTES = 32
_GROUP_CONTEXT = "hybridkv 2026 group of a cache v1"
_TOKENS_CONTEXT = "hybridkv 2026 token prefix v1"


class ChunkKeys:
    """Derives the keys of one cache.

    Args:
        fingerprint: the cache. A group is told from the others by its own fingerprint, never by its index.
        hash_block_tokens: tokens that each of the prefix hashes given to `key` adds.

    Raises:
        ValueError: the hash block is not positive, does not divide the chunk, or two groups are the same.
    """

    def __init__(self, fingerprint: Fingerprint, hash_block_tokens: int) -> None:
        if hash_block_tokens <= 0 or fingerprint.chunk_tokens % hash_block_tokens:
            raise ValueError(
                f"hash_block_tokens must be positive and divide the chunk of {fingerprint.chunk_tokens} tokens, "
                f"got {hash_block_tokens}"
            )
        self.fingerprint = fingerprint
        self.hash_block_tokens = hash_block_tokens
        digest = fingerprint.digest()
        self._hashers = [blake3(key=_group_key(digest, group)) for group in fingerprint.groups]
        if len({hasher.digest() for hasher in self._hashers}) != len(self._hashers):
            raise ValueError("two groups have the same kind, block and layers; their chunks would share keys")
        self._lookahead = [
            -(-group.lookahead_tokens // hash_block_tokens) * hash_block_tokens for group in fingerprint.groups
        ]

    def key(self, group: int, prefix_hashes: Sequence[bytes], end_token: int) -> bytes:
        """The key of a group's part of the chunk that ends at `end_token`.

        Args:
            group: index into the fingerprint's groups.
            prefix_hashes: entry i stands for the first (i + 1) * `hash_block_tokens` tokens of the request.
            end_token: a positive multiple of the hash block.

        Returns:
            `KEY_BYTES` bytes.

        Raises:
            ValueError: the boundary is off the hash grid, or its prefix is not hashed yet.
        """
        last, rest = divmod(end_token + self._lookahead[group], self.hash_block_tokens)
        if rest or last < 1 or last > len(prefix_hashes):
            raise ValueError(
                f"end_token must be a multiple of {self.hash_block_tokens} with all its prefix hashed "
                f"({len(prefix_hashes)} hashes), got {end_token}"
            )
        hasher = self._hashers[group].copy()
        hasher.update(end_token.to_bytes(8, "little"))
        hasher.update(prefix_hashes[last - 1])
        return hasher.digest(KEY_BYTES)


class TokenHashes:
    """A chain of prefix hashes over token ids, made as far as it is asked for and kept.

    Args:
        block_tokens: tokens that each hash adds.
        extra: `extra(start, end)` gives bytes that belong to those tokens besides their ids (adapter, cache salt,
            multimodal input), b"" for none.
    """

    def __init__(self, block_tokens: int, extra: Callable[[int, int], bytes] = lambda start, end: b"") -> None:
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        self._block_tokens = block_tokens
        self._extra = extra
        self._hashes: list[bytes] = []

    def upto(self, token_ids: Sequence[int]) -> list[bytes]:
        """The hash of every full block of `token_ids`, which may have grown since the last call but not changed.

        Raises:
            OverflowError: a token id is negative or does not fit 32 bits.
        """
        for start in range(len(self._hashes) * self._block_tokens, len(token_ids), self._block_tokens):
            end = start + self._block_tokens
            if end > len(token_ids):
                break
            hasher = blake3(derive_key_context=_TOKENS_CONTEXT)
            hasher.update(self._hashes[-1] if self._hashes else bytes(KEY_BYTES))
            hasher.update(b"".join(token.to_bytes(4, "little") for token in token_ids[start:end]))
            extra = self._extra(start, end)
            hasher.update(len(extra).to_bytes(8, "little"))
            hasher.update(extra)
            self._hashes.append(hasher.digest())
        return self._hashes


def _group_key(fingerprint_digest: bytes, group: GroupFingerprint) -> bytes:
    return blake3(fingerprint_digest + group_digest(group), derive_key_context=_GROUP_CONTEXT).digest()


def group_digest(group: GroupFingerprint) -> bytes:
    """32 bytes that stand for a group's kind, block and layers."""
    return blake3(msgspec.msgpack.encode(group, order="sorted")).digest()
