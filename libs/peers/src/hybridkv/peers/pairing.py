"""Pairing of local and remote byte ranges, so that a request can resume at a token boundary.

Pairing goes by token number, not by position in a block list: each list of ids comes with the block-table index of its
first id. So clipped windows, locally computed prefixes and different block sizes need no special cases. Nothing moves
if any byte that the resume reads is missing.

The axes of two pieces may be ordered differently. Runs of bytes are as long as possible: a page with the same layout on
both sides is one run; a page with heads before tokens on one side and tokens before heads on the other side has one run
per item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridkv.peers.cells import CellPlace, Side, cells_of, cycle, last_cell_tokens, moved_span, place_of, table_places
from hybridkv.peers.comparison import Agreement, GroupPair, PiecePair
from hybridkv.peers.description import Piece
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.ranges import Int64Array, Ranges, Template, joined, merged, template
from hybridkv.peers.tables import BlockTables, blocks_at, lists_refused
from hybridkv.planner import GroupKind

MAX_RUNS = 1 << 22
"""Maximum runs of one request, before runs of different cells are merged. Sides with different item orders have one run
per item.
This limit bounds the memory that this side allocates because of a peer's description."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume point of a request, and the prefix that its engine already has.

    Args:
        num_tokens: the resume point.
        computed_tokens: tokens of the prefix that the engine has; whole blocks of every group that is not RECURRENT.
    """

    num_tokens: int
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GroupMoves:
    """Moves of one group.

    Args:
        ranges: byte ranges, merged.
        first_cell: first moved cell, counted from token 0; 0 for a state.
        num_cells: number of moved cells; 1 for a state.
        num_runs: number of runs before runs of different cells are merged.
    """

    ranges: Ranges
    first_cell: int = 0
    num_cells: int = 0
    num_runs: int = 0

    @property
    def num_bytes(self) -> int:
        return self.ranges.total_bytes


@dataclass(frozen=True, slots=True)
class Pairing:
    """Moves from one remote rank to one local rank for one request.

    Args:
        num_tokens: resume point.
        groups: moves of each group, in the engine's order.
    """

    num_tokens: int
    groups: tuple[GroupMoves, ...]

    @property
    def ranges(self) -> Ranges:
        """Ranges of all groups, in group order."""
        return joined([group.ranges for group in self.groups])

    @property
    def num_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)


class Exchange:
    """Agreement with one remote rank, with cached templates. Create one object per remote rank."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._whole_cells: dict[tuple[int, int], Template] = {}

    def template(self, group_index: int, cell: int, num_tokens: int) -> Template:
        """Template for the first `num_tokens` tokens of a cell. Templates of whole cells are cached."""
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
        """Yields (positions in `cells`, template): each template, with the positions of the cells that use it.

        Cells at equal positions within their blocks share a template; the last cell may be partial.
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
        """Number of byte runs of the cells, computed without building them."""
        chosen = self.chosen_templates(group_index, cells, num_tokens)
        return sum(part.size * template.num_bytes.size for part, template in chosen)

    def block_ids(
        self, group_index: int, side: Side, tables: BlockTables, cells: Int64Array, num_tokens: int
    ) -> Int64Array | Incompatibility:
        """Block id of each cell on one side, or a refusal if a block is missing or invalid.

        `tables` must have one list per group.
        """
        description = self.agreement.ours if side is Side.OURS else self.agreement.theirs
        places = table_places(self.agreement.groups[group_index], side, cells, num_tokens)
        return blocks_at(side, tables, group_index, places, description.num_blocks)

    def pair(self, local: BlockTables, remote: BlockTables, resume: Resume) -> Pairing | Incompatibility:
        """Pairs the byte ranges that one request needs to resume.

        Args:
            local: blocks allocated here; its `num_tokens` is ignored.
            remote: blocks that the other side holds, as received.
            resume: the resume point.

        Returns:
            A pairing, empty if all tokens are computed. A refusal if a list is invalid, if the peer has fewer tokens or
            a state of another boundary, if the computed tokens are not whole blocks, if a block that the resume reads
            is missing or a local block occurs twice, or if there are more than `MAX_RUNS` runs.
        """
        num_groups = len(self.agreement.groups)
        refusal = lists_refused(Side.OURS, local, num_groups) or lists_refused(Side.THEIRS, remote, num_groups)
        if refusal is not None:
            return refusal
        if not 0 <= resume.num_tokens <= remote.num_tokens:
            hint = "the peer has fewer tokens"
            return Incompatibility("num_tokens", str(resume.num_tokens), str(remote.num_tokens), hint)
        moves: list[GroupMoves] = []
        room = MAX_RUNS
        for index in range(num_groups):
            moved = self._group_moves(index, local, remote, resume, room)
            if isinstance(moved, Incompatibility):
                return moved
            moves.append(moved)
            room -= moved.num_runs
        pairing = Pairing(resume.num_tokens, tuple(moves))
        if pairing.ranges.overlap:
            return Incompatibility("block_ids", "a block that occurs twice", "needed: each block once")
        return pairing

    def _group_moves(
        self, index: int, local: BlockTables, remote: BlockTables, resume: Resume, room: int
    ) -> GroupMoves | Incompatibility:
        pair, num_tokens = self.agreement.groups[index], resume.num_tokens
        span = moved_span(pair.local.spec, num_tokens, resume.computed_tokens)
        if span.num_tokens == 0:
            return GroupMoves(joined([]))
        if refusal := _boundary_refused(index, pair, remote, resume):
            return refusal
        cells = cells_of(pair, span)
        local_ids = self.block_ids(index, Side.OURS, local, cells, num_tokens)
        if isinstance(local_ids, Incompatibility):
            return local_ids
        remote_ids = self.block_ids(index, Side.THEIRS, remote, cells, num_tokens)
        if isinstance(remote_ids, Incompatibility):
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
        return GroupMoves(merged(ranges), int(cells[0]), cells.size, num_runs)


def too_many_runs(index: int, num_runs: int) -> Incompatibility:
    hint = "use the same KV cache layout on both sides, so that runs can be merged"
    return Incompatibility(f"groups[{index}]: runs of bytes", f"{num_runs} more", f"at most {MAX_RUNS} in all", hint)


def _boundary_refused(index: int, pair: GroupPair, remote: BlockTables, resume: Resume) -> Incompatibility | None:
    if pair.kind is GroupKind.RECURRENT:
        if remote.num_tokens != resume.num_tokens:
            field = f"groups[{index}]: the boundary of a state"
            hint = "a state is valid at one boundary only"
            return Incompatibility(field, str(resume.num_tokens), str(remote.num_tokens), hint)
    elif resume.computed_tokens % pair.local.spec.block_tokens:
        got = f"{resume.computed_tokens} in blocks of {pair.local.spec.block_tokens}"
        return Incompatibility(f"groups[{index}].computed_tokens", got, "needed: whole blocks")
    return None


# Runs of bytes of one cell.


def cell_template(pair: GroupPair, place: CellPlace) -> Template:
    """Template for one cell of a group."""
    local, remote, sizes = [], [], []
    for each in pair.pieces:
        if each.heads:
            ours, theirs, num_bytes = _piece_runs(pair, each, place)
            local.append(_placed(each.local, ours))
            remote.append(_placed(each.remote, theirs))
            sizes.append(num_bytes)
    return template(local, remote, sizes)


def _units(pair: GroupPair, each: PiecePair, num_tokens: int) -> int:
    return -(-num_tokens // pair.local.unit_tokens(each.local))


def _placed(piece: Piece, offsets: Int64Array) -> Int64Array:
    places = np.empty((3, offsets.size), dtype=np.int64)
    places[0], places[1], places[2] = piece.region, piece.offset_bytes + offsets, piece.block_stride_bytes
    return places


class _Dim(NamedTuple):
    size: int
    local_stride: int
    remote_stride: int


def _piece_runs(pair: GroupPair, each: PiecePair, place: CellPlace) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Runs of one piece: offsets in the local block, offsets in the remote block, and sizes, in bytes."""
    mine, yours = each.local, each.remote
    dims = [
        _Dim(mine.rows.count, mine.rows.stride_bytes, yours.rows.stride_bytes),
        _Dim(each.heads, mine.heads.stride_bytes, yours.heads.stride_bytes),
    ]
    run, dims = _collapsed(mine.item_bytes, dims)
    if pair.kind is GroupKind.RECURRENT:
        local = remote = np.zeros(1, dtype=np.int64)
        sizes = np.array([run], dtype=np.int64)
    else:
        whole, wanted = _units(pair, each, pair.cell_tokens), _units(pair, each, place.num_tokens)
        ours, theirs = (
            _unit_offsets(mine, place.local * whole, wanted),
            _unit_offsets(yours, place.remote * whole, wanted),
        )
        starts = np.flatnonzero(np.concatenate(([True], (np.diff(ours) != run) | (np.diff(theirs) != run))))
        local, remote = ours[starts], theirs[starts]
        sizes = np.diff(np.append(starts, wanted)) * run
        if sizes.size == 1:
            run, dims = _collapsed(int(sizes[0]), dims)
            sizes = np.array([run], dtype=np.int64)
    for dim in dims:
        steps = np.arange(dim.size, dtype=np.int64)[:, None]
        local = (local[None, :] + steps * dim.local_stride).reshape(-1)
        remote = (remote[None, :] + steps * dim.remote_stride).reshape(-1)
        sizes = np.tile(sizes, dim.size)
    first_local = each.local_head * mine.heads.stride_bytes
    first_remote = each.remote_head * yours.heads.stride_bytes
    return local + first_local, remote + first_remote, sizes


def _collapsed(run: int, dims: Sequence[_Dim]) -> tuple[int, list[_Dim]]:
    """Extends the run over each dimension without a gap on both sides. Returns the run and the other dimensions."""
    left = [dim for dim in dims if dim.size > 1]
    while (inner := next((dim for dim in left if dim.local_stride == dim.remote_stride == run), None)) is not None:
        left.remove(inner)
        run *= inner.size
    return run, left


def _unit_offsets(piece: Piece, first: int, count: int) -> Int64Array:
    """Offsets of units [first, first + count) of a block, counted over its kernel blocks."""
    kernel, within = np.divmod(np.arange(first, first + count, dtype=np.int64), piece.units.count)
    offsets: Int64Array = kernel * piece.kernels.stride_bytes + within * piece.units.stride_bytes
    return offsets
