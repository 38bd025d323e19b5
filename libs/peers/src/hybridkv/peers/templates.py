"""Byte runs that two pieces have in common, although their axes may be ordered differently.

Runs are as long as possible: a page with the same layout on both sides is one run; a page with heads before tokens on
one side and after them on the other has one run per item.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridkv.peers.cells import CellPlace
from hybridkv.peers.comparison import GroupPair, PiecePair
from hybridkv.peers.description import Piece
from hybridkv.peers.ranges import Int64Array, Template, template
from hybridkv.planner import GroupKind


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
    """Offsets within the local and the remote block, and sizes of the runs."""
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
    """Extends the run by each dimension that repeats it without a gap on both sides."""
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
