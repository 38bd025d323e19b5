"""Chain of prefix hashes over token ids, for engines without stable block hashes.

New token ids are converted to bytes in one pass; each block then costs one BLAKE3 call. A prompt that grew by a block
costs one hash, and a comparison of the earlier tokens. (`array` converts a list three times as fast as numpy.)
"""

import sys
from array import array
from collections.abc import Callable, Sequence

from blake3 import blake3

from hybridkv.hashing.hashed_tokens import HashedTokens

HASH_BYTES = 32
_CONTEXT = "hybridkv 2026 token prefix v2"
_TYPECODE = next(code for code in "IL" if array(code).itemsize == 4)

ExtraBytes = Callable[[int, int], bytes]


def chain_key(identity: bytes, block_tokens: int) -> bytes:
    """BLAKE3 key of a chain. Chains of other caches or other block sizes have no hash in common."""
    message = len(identity).to_bytes(8, "little") + identity + block_tokens.to_bytes(8, "little")
    return blake3(message, derive_key_context=_CONTEXT).digest()


class TokenHashes:
    """Chain of prefix hashes over the token ids of a request. Keeps the hashes.

    A hash is the keyed BLAKE3 of its parent (zeros for the first), the token ids of the block as 32-bit little-endian
    numbers and, if present, the 64-bit length of the extra content and that content. The BLAKE3 key is derived from
    `identity` and `block_tokens`.

    Args:
        block_tokens: tokens per hash.
        extra: `extra(start, end)` returns the other inputs of these tokens as bytes (adapter, cache salt, multimodal
            input), or b"". Called each time a block is hashed; its result must not change for unchanged tokens. None
            if no token has other inputs.
        identity: bytes that separate chains of different caches; `ChunkKeys.token_hashes` passes a digest of the
            fingerprint and the adapter.

    Raises:
        ValueError: `block_tokens` is not positive.
    """

    def __init__(self, block_tokens: int, extra: ExtraBytes | None = None, identity: bytes = b"") -> None:
        if block_tokens <= 0:
            raise ValueError(f"block_tokens must be positive, got {block_tokens}")
        self.block_tokens = block_tokens
        self._extra = extra
        self._key = chain_key(identity, block_tokens)
        self._hashes: list[bytes] = []
        self._hashed = HashedTokens(block_tokens)

    def prefix_hashes(self, token_ids: Sequence[int], unchanged_tokens: int = 0) -> list[bytes]:
        """Hashes of all full blocks of `token_ids`.

        Tokens can be added, removed or changed between calls. The hashed tokens are compared, which takes some
        nanoseconds per token, and changed blocks are hashed again.

        Args:
            token_ids: all tokens of the request.
            unchanged_tokens: number of leading tokens that, with their extra content, are known to be unchanged since
                the last call. If it covers all hashed tokens, there is no comparison.

        Returns:
            The internal list: later calls extend or cut it.

        Raises:
            OverflowError: a token id is negative or does not fit into 32 bits. No block of this call is hashed.
        """
        hashes, block = self._hashes, self.block_tokens
        full = len(token_ids) // block
        same = min(full, len(hashes))
        if unchanged_tokens < same * block:
            same = min(same, self._hashed.unchanged_blocks(token_ids))
        if same < len(hashes):
            del hashes[same:]
            self._hashed.truncate(same)
        if full == same:
            return hashes
        done = same
        new = token_ids[done * block : full * block]
        data = _token_bytes(new)
        parent = hashes[-1] if hashes else bytes(HASH_BYTES)
        hasher = blake3(key=self._key)
        # One hasher for all blocks: creating one costs more than hashing a block.
        update, digest, reset = hasher.update, hasher.digest, hasher.reset
        extra, width = self._extra, 4 * block
        for at in range(0, len(data), width):
            update(parent + data[at : at + width])
            if extra is not None:
                start = done * block + at // 4
                if content := extra(start, start + block):
                    update(len(content).to_bytes(8, "little") + content)
            parent = digest()
            reset()
            hashes.append(parent)
        self._hashed.add(new)
        return hashes


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    numbers = array(_TYPECODE, token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
