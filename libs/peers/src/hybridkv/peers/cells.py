"""Cells: the grid on which two sides with different blocks meet. One is the smaller block of the two.

Cell i of a group holds tokens from i times its size. A state is one cell, 0, and lies in the block that holds the last
token before its boundary.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from hybridkv.peers.comparison import GroupPair
from hybridkv.peers.description import GroupDescription
from hybridkv.peers.ranges import Int64Array
from hybridkv.planner import GroupKind, TokenSpan


class Side(enum.StrEnum):
    """Of an agreement."""

    OURS = "ours"
    """The side that reads."""
    THEIRS = "theirs"

    def of(self, pair: GroupPair) -> GroupDescription:
        """This side's description of a group."""
        return pair.local if self is Side.OURS else pair.remote


class CellPlace(NamedTuple):
    """Where a cell lies within its blocks, counted in cells; one of the two is 0, for it is a whole block there.

    Args:
        local: within the local block.
        remote: within the remote block.
        num_tokens: of the cell that move, from its first.
    """

    local: int
    remote: int
    num_tokens: int


def cells_of(pair: GroupPair, span: TokenSpan) -> Int64Array:
    """The cells that hold a span."""
    if pair.kind is GroupKind.RECURRENT:
        return np.zeros(1, dtype=np.int64)
    return np.arange(span.start // pair.cell_tokens, -(-span.end // pair.cell_tokens), dtype=np.int64)


def ratio(pair: GroupPair, side: Side) -> int:
    """Cells in a block of one side."""
    if pair.kind is GroupKind.RECURRENT:
        return 1
    return side.of(pair).spec.block_tokens // pair.cell_tokens


def cycle(pair: GroupPair) -> int:
    """After how many cells places repeat."""
    return max(ratio(pair, Side.OURS), ratio(pair, Side.THEIRS))


def place_of(pair: GroupPair, cell: int, num_tokens: int) -> CellPlace:
    """Where a cell lies within its blocks."""
    return CellPlace(cell % ratio(pair, Side.OURS), cell % ratio(pair, Side.THEIRS), num_tokens)


def last_cell_tokens(pair: GroupPair, num_tokens: int) -> int:
    """How much of the last cell moves before a boundary: all of it, but where fewer tokens are fewer bytes."""
    rest = num_tokens % pair.cell_tokens
    return rest if rest and trims(pair, rest) else pair.cell_tokens


def trims(pair: GroupPair, num_tokens: int) -> bool:
    """Whether fewer bytes move for the first tokens of a cell than for all."""
    if pair.kind is GroupKind.RECURRENT:
        return False
    units = (pair.local.unit_tokens(each.local) for each in pair.pieces)
    return any(-(-num_tokens // unit) < -(-pair.cell_tokens // unit) for unit in units)


def table_places(pair: GroupPair, side: Side, cells: Int64Array, num_tokens: int) -> Int64Array:
    """Where the block of each cell stands in a side's block table."""
    block_tokens = side.of(pair).spec.block_tokens
    if pair.kind is GroupKind.RECURRENT:
        return np.array([(num_tokens - 1) // block_tokens], dtype=np.int64)
    return cells * pair.cell_tokens // block_tokens


def partial_blocks(pair: GroupPair, cells: Int64Array, local_ids: Int64Array, num_tokens: int) -> tuple[int, ...]:
    """The local blocks that cells do not fill from their first token to their last."""
    if pair.kind is GroupKind.RECURRENT:
        return ()
    in_block = ratio(pair, Side.OURS)
    found = []
    if cells[0] % in_block:
        found.append(int(local_ids[0]))
    if (cells[-1] + 1) % in_block or last_cell_tokens(pair, num_tokens) != pair.cell_tokens:
        found.append(int(local_ids[-1]))
    return tuple(dict.fromkeys(found))
