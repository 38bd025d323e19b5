"""Which bytes of which local region come from which remote range, so that a request can go on after some tokens.

Tokens are paired by their number, never blocks by their place in a list: each side's ids come with the place in the
block table at which they begin. So windows that are clipped, prefixes that the reader has itself, and blocks of
different sizes need no case of their own. Nothing is moved where anything that a resume reads would be missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridkv.peers.comparison import Agreement, GroupPair, Refusal
from hybridkv.peers.ranges import Int64Array, Ranges, Template, joined, merged
from hybridkv.peers.spans import moved_span
from hybridkv.peers.tables import BlockTables, blocks_at, lists_refused
from hybridkv.peers.templates import Cells, cell_template, trims
from hybridkv.planner import GroupKind, TokenSpan


@dataclass(frozen=True, slots=True)
class Resume:
    """At which boundary a request goes on, and what its engine has without being given it.

    Args:
        num_tokens: the boundary.
        computed_tokens: of them, those that the engine holds itself: whole blocks of every group but RECURRENT ones.
        serves_blocks: see `moved_span`; False for an engine that caches no prefixes.
    """

    num_tokens: int
    computed_tokens: int = 0
    serves_blocks: bool = True


@dataclass(frozen=True, slots=True)
class GroupMoves:
    """What moves of one group.

    Args:
        ranges: merged.
        first_cell: the first cell that moves, counted from token 0; 0 for a state.
        num_cells: how many do; 1 for a state.
        num_blocks: local blocks that are written.
        partial_blocks: those of them that are not written from their first byte to their last, by all remote ranks
            together. An engine that does not zero what a load overwrites must zero these.
    """

    ranges: Ranges
    first_cell: int = 0
    num_cells: int = 0
    num_blocks: int = 0
    partial_blocks: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.ranges.total_bytes


@dataclass(frozen=True, slots=True)
class Pairing:
    """What one rank reads from one remote rank for one request.

    Args:
        num_tokens: after which the request goes on.
        groups: in the engine's order.
    """

    num_tokens: int
    groups: tuple[GroupMoves, ...]

    @property
    def ranges(self) -> Ranges:
        """Of all groups, group after group."""
        return joined([group.ranges for group in self.groups])

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    @property
    def num_descriptors(self) -> int:
        return sum(len(group.ranges) for group in self.groups)


class Exchange:
    """An agreement, and what it takes to pair requests under it quickly. Made once for each remote rank."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._whole_cells: dict[tuple[int, int, int], Template] = {}

    def template(self, group_index: int, cells: Cells) -> Template:
        """What moves for a cell. Of whole cells a group has few, which are made once."""
        pair = self.agreement.groups[group_index]
        if cells.num_tokens != pair.cell_tokens:
            return cell_template(pair, cells)
        key = group_index, cells.local, cells.remote
        found = self._whole_cells.get(key)
        if found is None:
            found = self._whole_cells[key] = cell_template(pair, cells)
        return found

    def pair(self, local: BlockTables, remote: BlockTables, resume: Resume) -> Pairing | Refusal:
        """The ranges that let a request go on.

        Args:
            local: what the request has been given here; how many tokens it holds does not matter.
            remote: what the other side holds for it, as it said.
            resume: where it goes on.

        Returns:
            A pairing, in which nothing moves where all tokens are computed. A refusal where a list is not as it should
            be, or what a resume reads is not there: both come from another process.
        """
        groups = self.agreement.groups
        refusal = lists_refused("ours", local, len(groups)) or lists_refused("theirs", remote, len(groups))
        if refusal is not None:
            return refusal
        if not 0 <= resume.num_tokens <= remote.num_tokens:
            return Refusal("num_tokens", str(resume.num_tokens), str(remote.num_tokens), "it must hold as many")
        moves = []
        for index in range(len(groups)):
            moved = self._group_moves(index, local, remote, resume)
            if isinstance(moved, Refusal):
                return moved
            moves.append(moved)
        pairing = Pairing(resume.num_tokens, tuple(moves))
        if pairing.ranges.overlap:
            return Refusal("block_ids", "a block in two places", "needed: each block once")
        return pairing

    def _group_moves(
        self, index: int, local: BlockTables, remote: BlockTables, resume: Resume
    ) -> GroupMoves | Refusal:
        pair, (ours, theirs) = self.agreement.groups[index], (self.agreement.ours, self.agreement.theirs)
        span = moved_span(
            pair.local.spec, pair.cell_tokens, resume.num_tokens, resume.computed_tokens, resume.serves_blocks
        )
        if span.num_tokens == 0:
            return GroupMoves(joined([]))
        if refusal := _boundary_refused(index, pair, remote, resume):
            return refusal
        cells = cells_of(pair, span)
        local_ids = blocks_at("ours", local, index, _places(pair, span, cells, local=True), ours.num_blocks)
        if isinstance(local_ids, Refusal):
            return local_ids
        remote_ids = blocks_at("theirs", remote, index, _places(pair, span, cells, local=False), theirs.num_blocks)
        if isinstance(remote_ids, Refusal):
            return remote_ids
        ranges = merged(joined(self._cell_ranges(index, cells, (local_ids, remote_ids), resume.num_tokens)))
        partial = _partial_blocks(pair, cells, local_ids, resume.num_tokens)
        return GroupMoves(ranges, int(cells[0]), cells.size, np.unique(local_ids).size, partial)

    def _cell_ranges(
        self, index: int, cells: Int64Array, ids: tuple[Int64Array, Int64Array], num_tokens: int
    ) -> list[Ranges]:
        """Template after template: cells that lie alike in their blocks share one; the last may be filled in part."""
        pair, (local_ids, remote_ids) = self.agreement.groups[index], ids
        tail_tokens = last_cell_tokens(pair, num_tokens)
        whole = cells.size - (tail_tokens != pair.cell_tokens)
        found = []
        ratio = max(ratios(pair))
        for place in range(ratio):
            chosen = np.flatnonzero(cells[:whole] % ratio == place)
            if chosen.size:
                template = self.template(index, place_of(pair, place, pair.cell_tokens))
                found.append(template.at(local_ids[chosen], remote_ids[chosen]))
        if whole < cells.size:
            template = self.template(index, place_of(pair, int(cells[-1]), tail_tokens))
            found.append(template.at(local_ids[-1:], remote_ids[-1:]))
        return found


def cells_of(pair: GroupPair, span: TokenSpan) -> Int64Array:
    """The cells that hold a span, counted from token 0. A state is cell 0."""
    if pair.kind is GroupKind.RECURRENT:
        return np.zeros(1, dtype=np.int64)
    return np.arange(span.start // pair.cell_tokens, -(-span.end // pair.cell_tokens), dtype=np.int64)


def ratios(pair: GroupPair) -> tuple[int, int]:
    """Cells in a local and in a remote block; one of the two is 1. A state is whole on both sides."""
    if pair.kind is GroupKind.RECURRENT:
        return 1, 1
    return pair.local.spec.block_tokens // pair.cell_tokens, pair.remote.spec.block_tokens // pair.cell_tokens


def place_of(pair: GroupPair, cell: int, num_tokens: int) -> Cells:
    """Where a cell lies within its blocks."""
    local_ratio, remote_ratio = ratios(pair)
    return Cells(cell % local_ratio, cell % remote_ratio, num_tokens)


def last_cell_tokens(pair: GroupPair, num_tokens: int) -> int:
    """How much of the last cell moves: no more than is filled, where that is fewer bytes than the whole cell."""
    rest = num_tokens % pair.cell_tokens
    return rest if rest and trims(pair, rest) else pair.cell_tokens


def _places(pair: GroupPair, span: TokenSpan, cells: Int64Array, local: bool) -> Int64Array:
    """Where the block of each cell stands in a side's table."""
    block_tokens = (pair.local if local else pair.remote).spec.block_tokens
    if pair.kind is GroupKind.RECURRENT:
        return np.array([span.start // block_tokens], dtype=np.int64)
    return cells * pair.cell_tokens // block_tokens


def _boundary_refused(index: int, pair: GroupPair, remote: BlockTables, resume: Resume) -> Refusal | None:
    if pair.kind is GroupKind.RECURRENT:
        if remote.num_tokens != resume.num_tokens:
            field = f"groups[{index}]: the boundary of a state"
            return Refusal(field, str(resume.num_tokens), str(remote.num_tokens), "a state is of one boundary alone")
    elif resume.computed_tokens % pair.local.spec.block_tokens:
        got = f"{resume.computed_tokens} in blocks of {pair.local.spec.block_tokens}"
        return Refusal(f"groups[{index}].computed_tokens", got, "needed: whole blocks")
    return None


def _partial_blocks(pair: GroupPair, cells: Int64Array, local_ids: Int64Array, num_tokens: int) -> tuple[int, ...]:
    ratio, _ = ratios(pair)
    if pair.kind is GroupKind.RECURRENT:
        return ()
    found = []
    if cells[0] % ratio:
        found.append(int(local_ids[0]))
    if (cells[-1] + 1) % ratio or last_cell_tokens(pair, num_tokens) != pair.cell_tokens:
        found.append(int(local_ids[-1]))
    return tuple(dict.fromkeys(found))
