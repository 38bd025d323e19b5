"""Block tables of a request on one side. The list of a group may lack blocks at the front."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from hybridkv.peers.cells import Side
from hybridkv.peers.description import MAX_BLOCKS, NULL_BLOCK
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.ranges import Int64Array
from hybridkv.planner import GroupKind, GroupSpec, clip_blocks

MAX_READER_BLOCK_TOKENS = 256
"""Block size of a reader, in tokens, up to which a producer offers all blocks of a window that the reader needs. A
reader fills whole blocks, so with larger blocks than the producer's it needs tokens before the window. A larger value
costs host copies of more blocks, also for readers with small blocks."""


class BlockTables(msgspec.Struct, frozen=True):
    """Blocks of one request on one side. `lists_refused` and `blocks_at` check tables from another process.

    Args:
        num_tokens: tokens in the blocks; a state is the state after exactly this many tokens.
        first_blocks: for each group, the block-table index of its first id.
        block_ids: for each group, ids in table order; `NULL_BLOCK` for a missing block.
    """

    num_tokens: int
    first_blocks: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]

    @staticmethod
    def whole(num_tokens: int, block_ids: Sequence[Sequence[int]]) -> BlockTables:
        """Block tables that begin at token 0."""
        return BlockTables(num_tokens, (0,) * len(block_ids), tuple(map(tuple, block_ids)))


def offered(groups: Sequence[GroupSpec], block_ids: Sequence[Sequence[int]], num_tokens: int) -> BlockTables:
    """Block tables that a producer offers: for each group, the blocks that a resume at `num_tokens` reads, with blocks
    of up to `MAX_READER_BLOCK_TOKENS` tokens on the reader.

    Args:
        groups: groups of this engine.
        block_ids: for each group, the whole table from token 0; `NULL_BLOCK` for a block that the engine has freed.
        num_tokens: number of tokens in the tables.

    Returns:
        Tables that may begin with freed blocks.

    Raises:
        ValueError: a table is too short for `num_tokens`.
    """
    clipped = clip_blocks([_for_larger_blocks(group) for group in groups], block_ids, num_tokens)
    return BlockTables(num_tokens, clipped.first_blocks, clipped.block_ids)


def _for_larger_blocks(group: GroupSpec) -> GroupSpec:
    """The group with a larger window: it also has the tokens that blocks of `MAX_READER_BLOCK_TOKENS` need."""
    if group.kind is not GroupKind.WINDOW:
        return group
    assert group.window_tokens is not None
    return msgspec.structs.replace(group, window_tokens=group.window_tokens + MAX_READER_BLOCK_TOKENS - 1)


def lists_refused(side: Side, tables: BlockTables, num_groups: int) -> Incompatibility | None:
    """Checks that block tables have `num_groups` lists with valid first indexes. Returns None, or the first error. Does
    not check the ids."""
    for field in ("first_blocks", "block_ids"):
        if len(getattr(tables, field)) != num_groups:
            got = f"{len(getattr(tables, field))} lists"
            return _lacks(side, field, got, f"one for each of {num_groups} groups")
    for index, first in enumerate(tables.first_blocks):
        if not 0 <= first <= MAX_BLOCKS:
            return _lacks(side, f"first_blocks[{index}]", str(first), "a block-table index")
    return None


def blocks_at(
    side: Side, tables: BlockTables, group_index: int, places: Int64Array, num_blocks: int
) -> Int64Array | Incompatibility:
    """Block ids at some indexes of a group's table, or a refusal if an id is missing or invalid.

    Args:
        side: side of the tables.
        tables: checked by `lists_refused`.
        group_index: index of the group.
        places: table indexes, ascending; at least one.
        num_blocks: number of blocks in the pool; valid ids are smaller.
    """
    first, ids = tables.first_blocks[group_index], tables.block_ids[group_index]
    path = f"block_ids[{group_index}]"
    if places[0] < first or places[-1] >= first + len(ids):
        got = f"blocks {first} to {first + len(ids)} of the table"
        return _lacks(side, path, got, f"blocks {places[0]} to {places[-1] + 1}")
    wanted = ids[int(places[0]) - first : int(places[-1]) - first + 1]
    if not all(type(each) is int and 0 <= each < num_blocks for each in wanted):
        return _lacks(side, path, "an id outside the pool", f"ids below {num_blocks}")
    if NULL_BLOCK in wanted:
        return _lacks(side, path, "no block", f"block {places[0] + wanted.index(NULL_BLOCK)} of the table")
    found: Int64Array = np.array(wanted, dtype=np.int64)[places - places[0]]
    return found


def _lacks(side: Side, field: str, got: str, expected: str) -> Incompatibility:
    """Incompatibility for an invalid table of one side. The column of the other side shows the expected value."""
    needed = f"needed: {expected}"
    return Incompatibility(field, got, needed) if side is Side.OURS else Incompatibility(field, needed, got)
