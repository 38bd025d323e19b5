"""The blocks of a request on one side: which block holds a token, whatever was clipped off the list."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from hybridkv.peers.cells import Side
from hybridkv.peers.description import MAX_BLOCKS, NULL_BLOCK
from hybridkv.peers.ranges import Int64Array
from hybridkv.peers.refusal import Refusal
from hybridkv.planner import GroupSpec, clip_blocks


class BlockTables(msgspec.Struct, frozen=True):
    """The blocks of one request on one side. What came from another process is looked at by `lists_refused`.

    Args:
        num_tokens: that the blocks hold: a state is the one after exactly so many.
        first_blocks: for every group, where its ids begin in the group's block table.
        block_ids: for every group, in the order of the table; `NULL_BLOCK` where there is none.
    """

    num_tokens: int
    first_blocks: tuple[int, ...]
    block_ids: tuple[tuple[int, ...], ...]

    @staticmethod
    def whole(num_tokens: int, block_ids: Sequence[Sequence[int]]) -> BlockTables:
        """Of tables that are given from token 0."""
        return BlockTables(num_tokens, (0,) * len(block_ids), tuple(map(tuple, block_ids)))


def offered(groups: Sequence[GroupSpec], block_ids: Sequence[Sequence[int]], num_tokens: int) -> BlockTables:
    """What a producer says of a request: of every group the blocks that are read when it goes on after `num_tokens`.

    Args:
        groups: of this engine.
        block_ids: whole tables, from token 0.
        num_tokens: that they hold.

    Raises:
        ValueError: a table is too short for that many tokens.
    """
    clipped = clip_blocks(groups, block_ids, num_tokens)
    return BlockTables(num_tokens, clipped.first_blocks, clipped.block_ids)


def lists_refused(side: Side, tables: BlockTables, num_groups: int) -> Refusal | None:
    """Why tables cannot be those of so many groups; None where they can."""
    for field in ("first_blocks", "block_ids"):
        if len(getattr(tables, field)) != num_groups:
            got = f"{len(getattr(tables, field))} lists"
            return _lacks(side, field, got, f"one for each of {num_groups} groups")
    for index, first in enumerate(tables.first_blocks):
        if not 0 <= first <= MAX_BLOCKS:
            return _lacks(side, f"first_blocks[{index}]", str(first), "the place of a block")
    return None


def blocks_at(
    side: Side, tables: BlockTables, group_index: int, places: Int64Array, num_blocks: int
) -> Int64Array | Refusal:
    """The blocks at some places of a group's table, or why one of them is not there.

    Args:
        side: whose tables they are.
        tables: whose lists were looked at.
        group_index: of which group.
        places: ascending; one at least.
        num_blocks: ids are below it.
    """
    first, ids = tables.first_blocks[group_index], tables.block_ids[group_index]
    path = f"block_ids[{group_index}]"
    if places[0] < first or places[-1] >= first + len(ids):
        got = f"blocks {first} to {first + len(ids)} of the table"
        return _lacks(side, path, got, f"blocks {places[0]} to {places[-1] + 1}")
    wanted = ids[int(places[0]) - first : int(places[-1]) - first + 1]
    if not all(type(each) is int and 0 <= each < num_blocks for each in wanted):
        return _lacks(side, path, "an id outside of the pool", f"ids below {num_blocks}")
    if NULL_BLOCK in wanted:
        return _lacks(side, path, "no block", f"block {places[0] + wanted.index(NULL_BLOCK)} of the table")
    found: Int64Array = np.array(wanted, dtype=np.int64)[places - places[0]]
    return found


def _lacks(side: Side, field: str, got: str, expected: str) -> Refusal:
    """A refusal for what one side's lists lack; the other column says what was needed."""
    needed = f"needed: {expected}"
    return Refusal(field, got, needed) if side is Side.OURS else Refusal(field, needed, got)
