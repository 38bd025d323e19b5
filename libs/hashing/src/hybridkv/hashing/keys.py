"""Keys of chunks: permanent identity of their bytes.

A key is the tag of the cache and group, followed by the hash of a token prefix. The prefix ends with the chunk, or with
the group's lookahead tokens after the chunk. Two keys are equal only if their tags and prefix hashes are equal. The
prefix hashes are the engine's own chained block hashes if those are stable, so that no token is hashed twice; otherwise
`ChunkKeys.token_hashes` makes a chain.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add

from blake3 import blake3

from hybridkv.hashing.fingerprint import Fingerprint, GroupFingerprint, group_digest
from hybridkv.hashing.tokens import ExtraBytes, TokenHashes

TAG_BYTES = 16
_GROUP_CONTEXT = "hybridkv 2026 group of a cache v3"
_ADAPTER_CONTEXT = "hybridkv 2026 adapter over a cache v1"


class ChunkKeys:
    """Derives the keys of one cache.

    Args:
        fingerprint: fingerprint of the cache. Groups are identified by their own fingerprints, not by their indexes.
        hash_block_tokens: tokens per prefix hash.
        adapter: digest of the adapter; empty for the base model. See `for_adapter`.

    Raises:
        ValueError: `hash_block_tokens` is not positive or does not divide the chunk, or two groups are equal.
    """

    def __init__(self, fingerprint: Fingerprint, hash_block_tokens: int, adapter: bytes = b"") -> None:
        if hash_block_tokens <= 0 or fingerprint.chunk_tokens % hash_block_tokens:
            raise ValueError(
                f"hash_block_tokens must be positive and divide the chunk of {fingerprint.chunk_tokens} tokens, "
                f"got {hash_block_tokens}"
            )
        self.fingerprint = fingerprint
        self.hash_block_tokens = hash_block_tokens
        self._digest = fingerprint.digest()
        if adapter:
            self._digest = blake3(self._digest + adapter, derive_key_context=_ADAPTER_CONTEXT).digest()
        # A dict by index, because a list accepts negative indexes. A lookup costs the same.
        self._groups = {
            i: (
                _group_tag(self._digest, group),
                -(-group.lookahead_tokens // hash_block_tokens) * hash_block_tokens,
            )
            for i, group in enumerate(fingerprint.groups)
        }
        """Tag and lookahead tokens of each group."""
        if len({tag for tag, _ in self._groups.values()}) != len(self._groups):
            raise ValueError("two groups have the same kind, block and layers; their chunks would share keys")

    def for_adapter(self, digest: bytes) -> "ChunkKeys":
        """`ChunkKeys` of the same cache with an adapter. Its keys differ from all keys of the base model.

        Args:
            digest: digest of the adapter's weights, at least one byte.

        Raises:
            ValueError: the digest is empty.
        """
        if not digest:
            raise ValueError("the digest of an adapter must not be empty")
        return ChunkKeys(self.fingerprint, self.hash_block_tokens, digest)

    def token_hashes(self, extra: ExtraBytes | None = None) -> TokenHashes:
        """Prefix hashes of a request, for engines without stable block hashes. Valid for this cache only.

        Args:
            extra: other inputs of tokens besides their ids; see `TokenHashes`.
        """
        return TokenHashes(self.hash_block_tokens, extra, self._digest)

    def key(self, group: int, prefix_hashes: Sequence[bytes], end_token: int) -> bytes:
        """Key of a group's part of the chunk that ends at `end_token`.

        Args:
            group: index into the fingerprint's groups.
            prefix_hashes: entry i is the chained hash of the first (i + 1) * `hash_block_tokens` tokens.
            end_token: a positive multiple of `hash_block_tokens`.

        Returns:
            The tag of cache and group (`TAG_BYTES` bytes), followed by the hash of the prefix with the lookahead.

        Raises:
            ValueError: there is no such group, `end_token` is not a multiple, or the hash of its prefix with the
                lookahead is missing or empty.
        """
        try:
            tag, lookahead = self._groups[group]
        except KeyError:
            raise self._unknown(group) from None
        last, rest = divmod(end_token + lookahead, self.hash_block_tokens)
        if rest or end_token < 1 or last > len(prefix_hashes) or not prefix_hashes[last - 1]:
            raise ValueError(
                f"end_token must be a positive multiple of {self.hash_block_tokens}, and the hash of its prefix and "
                f"lookahead must be one of the {len(prefix_hashes)} hashes and not empty, got {end_token}"
            )
        return tag + prefix_hashes[last - 1]

    def keys(self, group: int, prefix_hashes: Sequence[bytes], end_tokens: Iterable[int]) -> list[bytes]:
        """Keys of many boundaries of one group, in order. For a range, much cheaper than calls of `key`.

        Raises:
            ValueError: like `key`, for the first invalid boundary.
        """
        try:
            tag, lookahead = self._groups[group]
        except KeyError:
            raise self._unknown(group) from None
        block = self.hash_block_tokens
        # In a range, the checks of the first end and of the step hold for all ends.
        if isinstance(end_tokens, range) and end_tokens.start > 0 and end_tokens.step > 0:
            start, step, count = end_tokens.start, end_tokens.step, len(end_tokens)
            if start % block == step % block == 0:
                first = (start + lookahead) // block - 1
                prefixes = prefix_hashes[first : first + count * step // block : step // block]
                if len(prefixes) == count and all(prefixes):
                    return list(map(add, repeat(tag), prefixes))
        return [self.key(group, prefix_hashes, end_token) for end_token in end_tokens]

    def _unknown(self, group: int) -> ValueError:
        return ValueError(f"group must be an index into the {len(self._groups)} groups of the fingerprint, got {group}")


def _group_tag(fingerprint_digest: bytes, group: GroupFingerprint) -> bytes:
    return blake3(fingerprint_digest + group_digest(group), derive_key_context=_GROUP_CONTEXT).digest(TAG_BYTES)
