"""Bytes that a request moves, as a formula of the group table. `pairing` must give the same result.

A group moves the blocks of the tokens that a resume reads and the reader has not computed: FULL all, WINDOW those of
the window, rounded up to blocks, RECURRENT one state, SCRATCH none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.peers.cells import moved_span
from hybridkv.peers.description import Description
from hybridkv.planner import GroupKind, GroupSpec


class GroupBytes(NamedTuple):
    """Row of the group table.

    Args:
        spec: spec of the group.
        block_bytes: content bytes of one block, all layers.
    """

    spec: GroupSpec
    block_bytes: int


def group_table(description: Description) -> tuple[GroupBytes, ...]:
    """Group table of one rank."""
    return tuple(GroupBytes(group.spec, group.block_bytes) for group in description.groups)


def moved_bytes(table: Sequence[GroupBytes], num_tokens: int, computed_tokens: int = 0) -> int:
    """Bytes that one request moves, for equal block sizes and whole blocks."""
    return sum(row.block_bytes * moved_blocks(row.spec, num_tokens, computed_tokens) for row in table)


def moved_blocks(spec: GroupSpec, num_tokens: int, computed_tokens: int = 0) -> int:
    """Blocks of a group that one request moves."""
    span = moved_span(spec, num_tokens, computed_tokens)
    if span.num_tokens == 0:
        return 0
    return -(-span.end // spec.block_tokens) - span.start // spec.block_tokens


def full_attention_bytes(table: Sequence[GroupBytes], num_tokens: int, computed_tokens: int = 0) -> int:
    """Bytes that one request would move if every group used full attention."""
    return sum(
        row.block_bytes * max(0, -(-num_tokens // row.spec.block_tokens) - computed_tokens // row.spec.block_tokens)
        for row in table
        if row.spec.kind is not GroupKind.SCRATCH
    )
