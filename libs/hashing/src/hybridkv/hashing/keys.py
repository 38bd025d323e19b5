"""Keys of chunks: which bytes they are, for ever.

A key is the tag of its cache and group, and behind it the hash of the token prefix that the chunk ends, as it is: two
keys are the same only if two tags or two prefix hashes are. The prefix comes in as the engine's own chained block
hashes where those are stable, so no token is hashed twice; `ChunkKeys.token_hashes` makes such a chain where they are
not.
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
        fingerprint: the cache. A group is told from the others by its own fingerprint, never by its index.
        hash_block_tokens: tokens that each of the prefix hashes given to `key` adds.
        adapter: a digest of what was laid over the model, empty for the model as it is; see `for_adapter`.

    Raises:
        ValueError: the hash block is not positive, does not divide the chunk, or two groups are the same.
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
        # By index: unlike a list, a dict takes no negative one, and a look-up costs the same.
        self._groups = {
            i: (
                _group_tag(self._digest, group),
                -(-group.lookahead_tokens // hash_block_tokens) * hash_block_tokens,
            )
            for i, group in enumerate(fingerprint.groups)
        }
        """Tag and tokens of lookahead of each group."""
        if len({tag for tag, _ in self._groups.values()}) != len(self._groups):
            raise ValueError("two groups have the same kind, block and layers; their chunks would share keys")

    def for_adapter(self, digest: bytes) -> "ChunkKeys":
        """The keys of the same cache under an adapter with this content: no key of one is a key of the other.

        Args:
            digest: of all that the adapter's weights are, at least one byte.

        Raises:
            ValueError: the digest is empty.
        """
        if not digest:
            raise ValueError("the digest of an adapter must not be empty")
        return ChunkKeys(self.fingerprint, self.hash_block_tokens, digest)

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
            prefix_hashes: entry i stands for the first (i + 1) * `hash_block_tokens` tokens of the request, and so for
                their number too.
            end_token: a positive multiple of the hash block.

        Returns:
            `TAG_BYTES` bytes for cache and group, and the prefix hash that stands for all that the chunk depends on.

        Raises:
            ValueError: there is no such group, the boundary is off the hash grid, its prefix is not hashed yet, or its
                hash is empty.
        """
        try:
            tag, lookahead = self._groups[group]
        except KeyError:
            raise self._unknown(group) from None
        last, rest = divmod(end_token + lookahead, self.hash_block_tokens)
        if rest or end_token < 1 or last > len(prefix_hashes) or not prefix_hashes[last - 1]:
            raise ValueError(
                f"end_token must be a positive multiple of {self.hash_block_tokens} with all its prefix hashed "
                f"({len(prefix_hashes)} hashes, none of them empty), got {end_token}"
            )
        return tag + prefix_hashes[last - 1]

    def keys(self, group: int, prefix_hashes: Sequence[bytes], end_tokens: Iterable[int]) -> list[bytes]:
        """The keys of many boundaries of one group, in their order; much cheaper than one by one for a range.

        Raises:
            ValueError: as `key`, for the first boundary that it would refuse.
        """
        try:
            tag, lookahead = self._groups[group]
        except KeyError:
            raise self._unknown(group) from None
        block = self.hash_block_tokens
        # What is checked of the first end and the step holds for all of a range.
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
