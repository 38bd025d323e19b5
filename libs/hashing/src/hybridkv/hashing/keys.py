"""Keys of chunks: which bytes they are, for ever.

A key is a keyed BLAKE3 digest of the token prefix that the chunk ends, under a secret-free key that stands for the
fingerprint and the group. The prefix comes in as the engine's own chained block hashes where those are stable, so no
token is hashed twice; `ChunkKeys.token_hashes` makes such a chain where they are not.
"""

from collections.abc import Iterable, Sequence
from operator import add

import msgspec
from blake3 import blake3

from hybridkv.hashing.fingerprint import Fingerprint, GroupFingerprint
from hybridkv.hashing.tokens import ExtraBytes, TokenHashes

KEY_BYTES = 32
MAX_KEPT_HEADS = 16384
"""Ends of chunks whose part of the hashed message is kept for the next request: about 1 MB."""
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
        self._kept_heads: list[bytes] = []
        self._kept_size = 0
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
        messages: Iterable[bytes] | None = None
        if isinstance(end_tokens, range):
            messages = self._messages(group, prefix_hashes, end_tokens)
        if messages is None:
            messages = [self._message(group, prefix_hashes, end_token) for end_token in end_tokens]
        hasher = self._hashers[group].copy()
        # One hasher for all keys, by its bound methods: its three calls are most of what a key costs.
        update, digest, reset = hasher.update, hasher.digest, hasher.reset
        found: list[bytes] = []
        keep = found.append
        for message in messages:
            update(message)
            keep(digest())
            reset()
        return found

    def _messages(self, group: int, prefix_hashes: Sequence[bytes], ends: range) -> Iterable[bytes] | None:
        """`_message` of each end in one pass, or None if the ends or their hashes are not so regular that one will do.

        What is checked of the first end and the step holds for all between."""
        block, lookahead = self.hash_block_tokens, self._lookahead[group]
        if not ends or ends[0] < 1 or ends[0] % block or ends.step < 1 or ends.step % block:
            return None
        first, last = (ends[0] + lookahead) // block - 1, (ends[-1] + lookahead) // block
        prefixes = prefix_hashes[first : last : ends.step // block]
        sizes = set(map(len, prefixes))
        if len(prefixes) < len(ends) or len(sizes) != 1:
            return None
        return map(add, self._heads(ends, sizes.pop()), prefixes)

    def _heads(self, ends: range, size: int) -> Sequence[bytes]:
        """What stands before the prefix hash of `size` bytes in the message of each end; kept for ends of chunks."""
        chunk = self.fingerprint.chunk_tokens
        first, last = ends[0] // chunk - 1, ends[-1] // chunk
        if ends[0] % chunk or ends.step != chunk or last > MAX_KEPT_HEADS:
            return [_head(end_token, size) for end_token in ends]
        if size != self._kept_size:
            self._kept_heads, self._kept_size = [], size
        kept = self._kept_heads
        if len(kept) < last:
            stop = min(MAX_KEPT_HEADS, 2 * last)
            kept += [_head(end_token, size) for end_token in range((len(kept) + 1) * chunk, stop * chunk + 1, chunk)]
        return kept[first:last]

    def last_hash(self, group: int, prefix_hashes: Sequence[bytes], end_token: int) -> bytes | None:
        """The prefix hash that `key` would derive the key of this boundary from, None if there is none yet."""
        last = (end_token + self._lookahead[group]) // self.hash_block_tokens
        return prefix_hashes[last - 1] if 0 < last <= len(prefix_hashes) else None

    def _message(self, group: int, prefix_hashes: Sequence[bytes], end_token: int) -> bytes:
        last, rest = divmod(end_token + self._lookahead[group], self.hash_block_tokens)
        if rest or end_token < 1 or last > len(prefix_hashes):
            raise ValueError(
                f"end_token must be a positive multiple of {self.hash_block_tokens} with all its prefix hashed "
                f"({len(prefix_hashes)} hashes), got {end_token}"
            )
        prefix = prefix_hashes[last - 1]
        return _head(end_token, len(prefix)) + prefix


def _head(end_token: int, prefix_bytes: int) -> bytes:
    return end_token.to_bytes(8, "little") + prefix_bytes.to_bytes(8, "little")


def _group_key(fingerprint_digest: bytes, group: GroupFingerprint) -> bytes:
    return blake3(fingerprint_digest + group_digest(group), derive_key_context=_GROUP_CONTEXT).digest()


def group_digest(group: GroupFingerprint) -> bytes:
    """32 bytes that stand for a group's kind, block and layers."""
    return blake3(msgspec.msgpack.encode(group, order="sorted")).digest()
