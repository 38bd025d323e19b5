"""Block ids of a token range, as a server expects them: one list per group, in registration order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridkv.lmcache.errors import LMCacheProtocolError
from hybridkv.lmcache.geometry import Geometry
from hybridkv.planner import TokenSpan

NULL_BLOCK = 0
"""The null block: never stored, and never read."""


def common_chunks(geometry: Geometry, tables: Mapping[int, Sequence[int]]) -> int:
    """Number of leading chunks with all blocks of every group. A group without a table has none."""
    tokens = (len(tables.get(index, ())) * group.spec.block_tokens for index, group in enumerate(geometry.groups))
    return min(tokens, default=0) // geometry.chunk_tokens


def cut_tables(
    geometry: Geometry, tables: Mapping[int, Sequence[int]], start_token: int, end_token: int
) -> list[list[int]]:
    """Blocks of each group in [start_token, end_token), in the server's order.

    Args:
        geometry: of the groups.
        tables: block ids of each group, from token 0.
        start_token: a multiple of the chunk.
        end_token: a multiple of the chunk.

    Raises:
        LMCacheProtocolError: the range is not whole chunks, or a group lacks blocks. For a short list a server stores
            nothing and only writes to its own log.
    """
    chunk = geometry.chunk_tokens
    if start_token % chunk or end_token % chunk or not 0 <= start_token < end_token:
        raise LMCacheProtocolError(f"[{start_token}, {end_token}) is not a range of whole chunks of {chunk} tokens")
    if end_token // chunk > common_chunks(geometry, tables):
        raise LMCacheProtocolError(f"a group has no blocks up to token {end_token}")
    blocks = [geometry.groups[index].spec.block_tokens for index in geometry.order]
    return [
        list(tables[index][start_token // tokens : end_token // tokens])
        for index, tokens in zip(geometry.order, blocks, strict=True)
    ]


def storable(geometry: Geometry, tables: Mapping[int, Sequence[int]], stored_tokens: int, num_tokens: int) -> TokenSpan:
    """Tokens that a request can store now: whole computed chunks with blocks of every group.

    Args:
        geometry: of the groups.
        tables: block ids of each group, from token 0.
        stored_tokens: length of the stored prefix.
        num_tokens: number of computed tokens.
    """
    chunk = geometry.chunk_tokens
    end = min(common_chunks(geometry, tables), num_tokens // chunk) * chunk
    return TokenSpan(stored_tokens, max(stored_tokens, end))
