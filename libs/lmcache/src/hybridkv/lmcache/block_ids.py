"""Which pages a range of tokens takes, as a server wants to be told: one list a group, in the order of registration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridkv.lmcache.errors import LMCacheProtocolError
from hybridkv.lmcache.geometry import Geometry
from hybridkv.planner import TokenSpan, common_block_count, slice_group_blocks

NULL_BLOCK = 0
"""Stands for nothing: never stored as something, and what is written there nobody reads."""


def common_chunks(geometry: Geometry, tables: Mapping[int, Sequence[int]]) -> int:
    """Chunks, from the first, of which every group has every block. A group that is not named has none."""
    blocks = {index: group.spec.block_tokens for index, group in enumerate(geometry.groups)}
    lengths = {index: len(table) for index, table in tables.items() if index in blocks}
    return common_block_count(lengths, blocks, geometry.chunk_tokens)


def cut_tables(
    geometry: Geometry, tables: Mapping[int, Sequence[int]], start_token: int, end_token: int
) -> list[list[int]]:
    """The blocks of each group that [start_token, end_token) completes, in the server's order.

    Args:
        geometry: of the groups.
        tables: block ids of each group, from token 0.
        start_token: a multiple of the chunk.
        end_token: another.

    Raises:
        LMCacheProtocolError: the range is no whole chunks, or a group has not all of them. A server takes a short list
            for a reason to store nothing, and says that it did so in its log alone.
    """
    chunk = geometry.chunk_tokens
    if start_token % chunk or end_token % chunk or not 0 <= start_token < end_token:
        raise LMCacheProtocolError(f"[{start_token}, {end_token}) is no run of chunks of {chunk} tokens")
    if end_token // chunk > common_chunks(geometry, tables):
        raise LMCacheProtocolError(f"a group has no blocks up to token {end_token}")
    return [
        list(tables[index][slice_group_blocks(start_token, end_token, 1, geometry.groups[index].spec.block_tokens)])
        for index in geometry.order
    ]


def storable(geometry: Geometry, tables: Mapping[int, Sequence[int]], stored_tokens: int, num_tokens: int) -> TokenSpan:
    """The tokens that a request can store now: whole chunks that every group has, of those that were computed.

    Args:
        geometry: of the groups.
        tables: block ids of each group, from token 0.
        stored_tokens: before which everything is stored.
        num_tokens: that were computed.
    """
    chunk = geometry.chunk_tokens
    end = min(common_chunks(geometry, tables), num_tokens // chunk) * chunk
    return TokenSpan(stored_tokens, max(stored_tokens, end))
