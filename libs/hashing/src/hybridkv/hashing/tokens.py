"""A chain of prefix hashes over token ids, for where the engine has no stable one of its own.

Token ids become bytes in one pass over all the new ones, then each block costs one BLAKE3 call. It hashes nothing
twice: a prompt that grew by a block costs a block, and a comparison of the tokens before it.
(`array` turns a list into bytes three times as fast as numpy.)
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
    """The BLAKE3 key of a chain: chains of other caches, or of other block sizes, share no hash."""
    message = len(identity).to_bytes(8, "little") + identity + block_tokens.to_bytes(8, "little")
    return blake3(message, derive_key_context=_CONTEXT).digest()


class TokenHashes:
    """A chain of prefix hashes over token ids, made as far as it is asked for and kept.

    A hash is keyed BLAKE3 of its parent (zeros for the first), the block's token ids as 32-bit little-endian numbers
    and, where there is any, the extra content behind its 64-bit length. The key binds `block_tokens`.

    Args:
        block_tokens: tokens that each hash adds.
        extra: `extra(start, end)` gives bytes that belong to those tokens besides their ids (adapter, cache salt,
            multimodal input), b"" for none. It is called once for every block; None where no token has any. Of a token
            that stays it must stay.
        identity: what the tokens are read by; `ChunkKeys.token_hashes` gives the fingerprint's digest.

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

    def upto(self, token_ids: Sequence[int], unchanged_tokens: int = 0) -> list[bytes]:
        """The hash of every full block of `token_ids`.

        Tokens may have come since the last call, and others may have gone or changed: those that were hashed are
        compared, which costs some nanoseconds a token, and hashes of blocks that are not the same are made anew.

        Args:
            token_ids: of the request, from its beginning.
            unchanged_tokens: that many are known to be, with their extra content, those of the last call; when that is
                all that was hashed nothing is compared.

        Returns:
            The kept list itself: later calls extend it and cut it.

        Raises:
            OverflowError: a token id is negative or does not fit 32 bits. The blocks of this call are not hashed.
        """
        hashes, block = self._hashes, self.block_tokens
        full = len(token_ids) // block
        same = min(full, len(hashes))
        if unchanged_tokens < same * block:
            same = min(same, self._hashed.unchanged_blocks(token_ids))
        if same < len(hashes):
            del hashes[same:]
            self._hashed.cut(same)
        if full == same:
            return hashes
        done = same
        new = token_ids[done * block : full * block]
        data = _token_bytes(new)
        parent = hashes[-1] if hashes else bytes(HASH_BYTES)
        hasher = blake3(key=self._key)
        # One hasher for all blocks, by its bound methods: making one costs more than hashing a block.
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
