"""Copy of the tokens of a hash chain, to find the hashes that are still valid. Does not hash.

Between two reads, a request can be rolled back and grow again to the same length, even with the same last tokens. Only
a comparison of all tokens detects that.
"""

from collections.abc import Iterable, Sequence


class HashedTokens:
    """Tokens of hashed blocks. `block_tokens` is the number of tokens per block."""

    __slots__ = ("_block_tokens", "_tokens")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._tokens: list[int] = []

    def add(self, token_ids: Iterable[int]) -> None:
        """Append the tokens of whole blocks."""
        self._tokens.extend(token_ids)

    def truncate(self, num_blocks: int) -> None:
        """Keep only the first `num_blocks` blocks."""
        del self._tokens[num_blocks * self._block_tokens :]

    def unchanged_blocks(self, token_ids: Sequence[int]) -> int:
        """Number of leading blocks that equal the request's current tokens.

        Compares two lists: some nanoseconds per token.
        """
        kept, size = self._tokens, self._block_tokens
        now = token_ids[: len(kept)]
        if not isinstance(now, list):
            now = list(now)
        if now == kept:
            return len(kept) // size
        same = next((i for i, (old, new) in enumerate(zip(kept, now, strict=False)) if old != new), len(now))
        return same // size
