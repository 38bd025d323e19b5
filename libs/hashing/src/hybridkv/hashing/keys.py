"""Keys of chunks: which bytes they are, for ever.

A key is a keyed BLAKE3 digest of the token prefix that the chunk ends, under a secret-free key that stands for the
fingerprint and the group. The prefix comes in as the engine's own chained block hashes where those are stable, so no
token is hashed twice; `ChunkKeys.token_hashes` makes such a chain where they are not.
"""

from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3

from hybridkv.hashing.fingerprint import Fingerprint, GroupFingerprint
from hybridkv.hashing.tokens import ExtraBytes, TokenHashes

KEY_BYTES = 32
_GROUP_CONTEXT = "hybridkv 2026 group of a cache v1"


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
        self._digest = fingerprint.digest()
        self._hashers = [blake3(key=_group_key(self._digest, group)) for group in fingerprint.groups]
        if len({hasher.digest() for hasher in self._hashers}) != len(self._hashers):
            raise ValueError("two groups have the same kind, block and layers; their chunks would share keys")
        self._lookahead = [
            -(-group.lookahead_tokens // hash_block_tokens) * hash_block_tokens for group in fingerprint.groups
        ]

    def token_hashes(self, extra: ExtraBytes | None = None) -> TokenHashes:
        """Prefix hashes of a request, for an engine whose own do not survive its process. They are this cache's alone.

        Args:
            extra: content of tokens besides their ids, as `TokenHashes` takes it.
        """
        return TokenHashes(self.hash_block_tokens, extra, self._digest)

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
        hasher = self._hashers[group].copy()
        hasher.update(self._message(group, prefix_hashes, end_token))
        return hasher.digest(KEY_BYTES)

    def keys(self, group: int, prefix_hashes: Sequence[bytes], end_tokens: Iterable[int]) -> list[bytes]:
        """The keys of many boundaries of one group, in their order; cheaper than one by one.

        Raises:
            ValueError: as `key`, for the first boundary that it would refuse.
        """
        hasher = self._hashers[group].copy()
        update, digest, reset = hasher.update, hasher.digest, hasher.reset
        found = []
        for end_token in end_tokens:
            update(self._message(group, prefix_hashes, end_token))
            found.append(digest(KEY_BYTES))
            reset()
        return found

    def _message(self, group: int, prefix_hashes: Sequence[bytes], end_token: int) -> bytes:
        last, rest = divmod(end_token + self._lookahead[group], self.hash_block_tokens)
        if rest or end_token < 1 or last > len(prefix_hashes):
            raise ValueError(
                f"end_token must be a positive multiple of {self.hash_block_tokens} with all its prefix hashed "
                f"({len(prefix_hashes)} hashes), got {end_token}"
            )
        prefix = prefix_hashes[last - 1]
        return end_token.to_bytes(8, "little") + len(prefix).to_bytes(8, "little") + prefix


def _group_key(fingerprint_digest: bytes, group: GroupFingerprint) -> bytes:
    return blake3(fingerprint_digest + group_digest(group), derive_key_context=_GROUP_CONTEXT).digest()


def group_digest(group: GroupFingerprint) -> bytes:
    """32 bytes that stand for a group's kind, block and layers."""
    return blake3(msgspec.msgpack.encode(group, order="sorted")).digest()
