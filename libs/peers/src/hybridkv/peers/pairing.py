"""Which bytes of which local region come from which remote range, so that a request can go on after some tokens.

Tokens are paired by their number, never blocks by their place in a list: each side's ids come with the place in the
block table at which they begin. So windows that are clipped, prefixes that the reader has itself, and blocks of
different sizes need no case of their own. Nothing is moved where anything that a resume reads would be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybridkv.peers.cells import Side, cells_of, cycle, last_cell_tokens, partial_blocks, place_of, table_places
from hybridkv.peers.comparison import Agreement, GroupPair
from hybridkv.peers.ranges import Int64Array, Ranges, Template, joined, merged
from hybridkv.peers.refusal import Refusal
from hybridkv.peers.spans import moved_span
from hybridkv.peers.tables import BlockTables, blocks_at, lists_refused
from hybridkv.peers.templates import cell_template
from hybridkv.planner import GroupKind

MAX_RUNS = 1 << 22
"""Of one request, before neighbours are joined: two sides whose items lie in different orders have one for each item.
It bounds what either makes of the other's description."""


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
        num_runs: before neighbours were joined.
    """

    ranges: Ranges
    first_cell: int = 0
    num_cells: int = 0
    num_blocks: int = 0
    partial_blocks: tuple[int, ...] = ()
    num_runs: int = 0

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
        self._whole_cells: dict[tuple[int, int], Template] = {}

    def template(self, group_index: int, cell: int, num_tokens: int) -> Template:
        """What moves for the first tokens of a cell. Of whole cells a group has few, which are made once."""
        pair = self.agreement.groups[group_index]
        if num_tokens != pair.cell_tokens:
            return cell_template(pair, place_of(pair, cell, num_tokens))
        key = group_index, cell % cycle(pair)
        found = self._whole_cells.get(key)
        if found is None:
            found = self._whole_cells[key] = cell_template(pair, place_of(pair, cell, num_tokens))
        return found

    def chosen_templates(
        self, group_index: int, cells: Int64Array, num_tokens: int
    ) -> Iterator[tuple[Int64Array, Template]]:
        """For cells up to a boundary, each template, and the indexes of the cells that have it.

        Cells that lie alike in their blocks share one; the last may be filled in part.
        """
        pair = self.agreement.groups[group_index]
        tail_tokens = last_cell_tokens(pair, num_tokens)
        is_last = (cells == (num_tokens - 1) // pair.cell_tokens) & (tail_tokens != pair.cell_tokens)
        for part in range(cycle(pair)):
            chosen = np.flatnonzero((cells % cycle(pair) == part) & ~is_last)
            if chosen.size:
                yield chosen, self.template(group_index, part, pair.cell_tokens)
        last = np.flatnonzero(is_last)
        if last.size:
            yield last, self.template(group_index, int(cells[last[0]]), tail_tokens)

    def num_runs(self, group_index: int, cells: Int64Array, num_tokens: int) -> int:
        """Into how many runs of bytes cells fall apart. Takes no memory for them."""
        chosen = self.chosen_templates(group_index, cells, num_tokens)
        return sum(part.size * template.num_bytes.size for part, template in chosen)

    def block_ids(
        self, group_index: int, side: Side, tables: BlockTables, cells: Int64Array, num_tokens: int
    ) -> Int64Array | Refusal:
        """The block of each cell on one side. `tables` have one list for each group."""
        whose = self.agreement.ours if side is Side.OURS else self.agreement.theirs
        places = table_places(self.agreement.groups[group_index], side, cells, num_tokens)
        return blocks_at(side, tables, group_index, places, whose.num_blocks)

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
        num_groups = len(self.agreement.groups)
        refusal = lists_refused(Side.OURS, local, num_groups) or lists_refused(Side.THEIRS, remote, num_groups)
        if refusal is not None:
            return refusal
        if not 0 <= resume.num_tokens <= remote.num_tokens:
            return Refusal("num_tokens", str(resume.num_tokens), str(remote.num_tokens), "it must hold as many")
        moves: list[GroupMoves] = []
        room = MAX_RUNS
        for index in range(num_groups):
            moved = self._group_moves(index, local, remote, resume, room)
            if isinstance(moved, Refusal):
                return moved
            moves.append(moved)
            room -= moved.num_runs
        pairing = Pairing(resume.num_tokens, tuple(moves))
        if pairing.ranges.overlap:
            return Refusal("block_ids", "a block in two places", "needed: each block once")
        return pairing

    def _group_moves(
        self, index: int, local: BlockTables, remote: BlockTables, resume: Resume, room: int
    ) -> GroupMoves | Refusal:
        pair, num_tokens = self.agreement.groups[index], resume.num_tokens
        span = moved_span(pair.local.spec, pair.cell_tokens, num_tokens, resume.computed_tokens, resume.serves_blocks)
        if span.num_tokens == 0:
            return GroupMoves(joined([]))
        if refusal := _boundary_refused(index, pair, remote, resume):
            return refusal
        cells = cells_of(pair, span)
        local_ids = self.block_ids(index, Side.OURS, local, cells, num_tokens)
        if isinstance(local_ids, Refusal):
            return local_ids
        remote_ids = self.block_ids(index, Side.THEIRS, remote, cells, num_tokens)
        if isinstance(remote_ids, Refusal):
            return remote_ids
        num_runs = self.num_runs(index, cells, num_tokens)
        if num_runs > room:
            return too_many_runs(index, num_runs)
        ranges = joined(
            [
                template.at(local_ids[chosen], remote_ids[chosen])
                for chosen, template in self.chosen_templates(index, cells, num_tokens)
            ]
        )
        partial = partial_blocks(pair, cells, local_ids, num_tokens)
        return GroupMoves(merged(ranges), int(cells[0]), cells.size, np.unique(local_ids).size, partial, num_runs)


def too_many_runs(index: int, num_runs: int) -> Refusal:
    hint = "use the same KV cache layout on both sides, so that neighbours lie together"
    return Refusal(f"groups[{index}]: runs of bytes", f"{num_runs} more", f"at most {MAX_RUNS} in all", hint)


def _boundary_refused(index: int, pair: GroupPair, remote: BlockTables, resume: Resume) -> Refusal | None:
    if pair.kind is GroupKind.RECURRENT:
        if remote.num_tokens != resume.num_tokens:
            field = f"groups[{index}]: the boundary of a state"
            return Refusal(field, str(resume.num_tokens), str(remote.num_tokens), "a state is of one boundary alone")
    elif resume.computed_tokens % pair.local.spec.block_tokens:
        got = f"{resume.computed_tokens} in blocks of {pair.local.spec.block_tokens}"
        return Refusal(f"groups[{index}].computed_tokens", got, "needed: whole blocks")
    return None
