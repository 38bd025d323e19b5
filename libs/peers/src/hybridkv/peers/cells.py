"""Cells: the common grid of two sides with different block sizes. A cell is the smaller of the two blocks.

Cell i of a group starts at token i times the cell size. A state is one cell, 0, in the block of the last token before
its boundary.

A read fills the reader's blocks from `planner.load_start` on. Cells move whole. Only the last cell is cut at the
boundary, if this saves bytes.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np

from hybridkv.peers.comparison import GroupPair
from hybridkv.peers.description import GroupDescription
from hybridkv.peers.ranges import Int64Array
from hybridkv.planner import GroupKind, GroupSpec, TokenSpan, resume_start


class Side(enum.StrEnum):
    """Side of an agreement."""

    OURS = "ours"
    """The reader."""
    THEIRS = "theirs"
    """The producer."""

    def of(self, pair: GroupPair) -> GroupDescription:
        """Description of the group on this side."""
        return pair.local if self is Side.OURS else pair.remote


class CellPlace(NamedTuple):
    """Position of a cell within its blocks, in cells. On at least one side the cell is a whole block: position 0.

    Args:
        local: position within the local block.
        remote: position within the remote block.
        num_tokens: number of tokens that move, from the start of the cell.
    """

    local: int
    remote: int
    num_tokens: int


def moved_span(group: GroupSpec, num_tokens: int, computed_tokens: int) -> TokenSpan:
    """Tokens that a group must read from a peer to resume at `num_tokens`. Begins at a block, except for a state.

    The span includes the tokens of its first block that the resume does not read. Another request may hit this block,
    or a part of it: in this engine, in an engine to which this one hands the block over, or in a chunk that is stored.

    Args:
        group: spec of the group on the reader.
        num_tokens: resume point. A state must be at exactly this boundary.
        computed_tokens: tokens of the prefix that the reader has; whole blocks.

    Returns:
        A span that ends at `num_tokens`, or an empty span.
    """
    start = resume_start(group, num_tokens)
    if num_tokens <= computed_tokens or group.kind is GroupKind.SCRATCH or start >= num_tokens:
        return TokenSpan(num_tokens, num_tokens)
    if group.kind is GroupKind.RECURRENT:
        return TokenSpan(start, num_tokens)
    return TokenSpan(max(computed_tokens, start // group.block_tokens * group.block_tokens), num_tokens)


def cells_of(pair: GroupPair, span: TokenSpan) -> Int64Array:
    """Cells that contain a span."""
    if pair.kind is GroupKind.RECURRENT:
        return np.zeros(1, dtype=np.int64)
    return np.arange(span.start // pair.cell_tokens, -(-span.end // pair.cell_tokens), dtype=np.int64)


def cells_per_block(pair: GroupPair, side: Side) -> int:
    """Number of cells in a block of one side."""
    if pair.kind is GroupKind.RECURRENT:
        return 1
    return side.of(pair).spec.block_tokens // pair.cell_tokens


def cycle(pair: GroupPair) -> int:
    """Number of cells after which the positions of cells in their blocks repeat."""
    return max(cells_per_block(pair, Side.OURS), cells_per_block(pair, Side.THEIRS))


def place_of(pair: GroupPair, cell: int, num_tokens: int) -> CellPlace:
    """Position of a cell within its blocks."""
    return CellPlace(cell % cells_per_block(pair, Side.OURS), cell % cells_per_block(pair, Side.THEIRS), num_tokens)


def last_cell_tokens(pair: GroupPair, num_tokens: int) -> int:
    """Tokens of the last cell that move: the tokens before the boundary if this saves bytes, else the whole cell."""
    rest = num_tokens % pair.cell_tokens
    return rest if rest and trims(pair, rest) else pair.cell_tokens


def trims(pair: GroupPair, num_tokens: int) -> bool:
    """True if the first `num_tokens` tokens of a cell have fewer bytes than the whole cell."""
    if pair.kind is GroupKind.RECURRENT:
        return False
    units = (pair.local.unit_tokens(each.local) for each in pair.pieces)
    return any(-(-num_tokens // unit) < -(-pair.cell_tokens // unit) for unit in units)


def table_places(pair: GroupPair, side: Side, cells: Int64Array, num_tokens: int) -> Int64Array:
    """Block-table index of each cell on one side."""
    block_tokens = side.of(pair).spec.block_tokens
    if pair.kind is GroupKind.RECURRENT:
        return np.array([(num_tokens - 1) // block_tokens], dtype=np.int64)
    return cells * pair.cell_tokens // block_tokens
