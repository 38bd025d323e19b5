"""The tokens that a chain of hashes was made of, to see which of its hashes still hold.

A request may be rolled back and grow again between two looks at it, to the same length and even to the same last
tokens. Nothing but the tokens themselves tells, so they are kept and compared. It hashes nothing.
"""

from collections.abc import Iterable, Sequence


class HashedTokens:
    """A copy of the tokens of whole blocks.

    Args:
        block_tokens: tokens in a block.
    """

    __slots__ = ("_block_tokens", "_tokens")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._tokens: list[int] = []

    def add(self, token_ids: Iterable[int]) -> None:
        """Whole blocks behind those that are there."""
        self._tokens.extend(token_ids)

    def cut(self, num_blocks: int) -> None:
        """Only this many blocks are left."""
        del self._tokens[num_blocks * self._block_tokens :]

    def unchanged_blocks(self, token_ids: Sequence[int]) -> int:
        """How many blocks from the beginning have the same tokens as those of a request now.

        Costs one comparison of lists, as Python compares them: some nanoseconds a token.
        """
        kept, size = self._tokens, self._block_tokens
        now = token_ids[: len(kept)]
        if not isinstance(now, list):
            now = list(now)
        if now == kept:
            return len(kept) // size
        same = next((i for i, (old, new) in enumerate(zip(kept, now, strict=False)) if old != new), len(now))
        return same // size
