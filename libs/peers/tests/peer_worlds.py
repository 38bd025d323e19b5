"""Pairs of engines for property tests: kinds, blocks, layouts, ranks and block tables of both sides."""

from __future__ import annotations

import dataclasses
import itertools
import math

import msgspec
from hypothesis import strategies as st

from hybridkv.peers.description import (
    NULL_BLOCK,
    PROTOCOL,
    Axis,
    Description,
    GroupDescription,
    LayerDescription,
    Piece,
)
from hybridkv.peers.ranks import head_share
from hybridkv.planner import GroupKind, GroupSpec, read_blocks


@dataclasses.dataclass(frozen=True)
class PieceShape:
    """The properties of a piece that both sides share."""

    item_bytes: int
    rows: int
    total_heads: int
    own_heads: int


@dataclasses.dataclass(frozen=True)
class GroupShape:
    kind: GroupKind
    window_tokens: int | None
    align_tokens: int | None
    unit_tokens: int
    blocks: tuple[int, int]
    """Tokens per block, of ours and of theirs."""
    pieces: tuple[PieceShape, ...]

    def spec(self, side: int) -> GroupSpec:
        return GroupSpec(self.kind, self.blocks[side], self.window_tokens, self.align_tokens)


@dataclasses.dataclass(frozen=True)
class World:
    shapes: tuple[GroupShape, ...]
    ours: tuple[Description, ...]
    theirs: tuple[Description, ...]
    """All ranks of each side."""
    num_tokens: int
    computed_tokens: int
    tables: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
    """For each side, for each group, from token 0."""


HEADS = (0, 1, 2, 4)


@st.composite
def shapes(draw: st.DrawFn, same_ranks: bool) -> GroupShape:
    kind = draw(st.sampled_from([*GroupKind]))
    block = draw(st.sampled_from([2, 3, 4, 6]))
    ratio = draw(st.sampled_from([1, 1, 2, 3, 4]))
    is_cut = ratio > 1
    unit = draw(st.sampled_from([u for u in (1, 2, block) if block % u == 0]))
    blocks = (block, block * ratio)[:: draw(st.sampled_from([1, -1]))] if is_cut else (block, block)
    pieces = draw(
        st.lists(
            st.builds(
                PieceShape,
                item_bytes=st.integers(1, 3),
                rows=st.integers(1, 2),
                total_heads=st.sampled_from(HEADS if same_ranks else HEADS[1:]),
                own_heads=st.integers(1, 2),
            ),
            min_size=1,
            max_size=3,
        )
    )
    return GroupShape(
        kind=kind,
        window_tokens=draw(st.integers(1, 20)) if kind is GroupKind.WINDOW else None,
        align_tokens=draw(st.integers(1, 20)) if kind is GroupKind.CHUNKED else None,
        unit_tokens=unit,
        blocks=(blocks[0], blocks[1]),
        pieces=tuple(pieces),
    )


@st.composite
def layouts(
    draw: st.DrawFn, group_shapes: tuple[GroupShape, ...], side: int, tp_size: int, num_blocks: int
) -> tuple[Description, ...]:
    """All ranks of a side, in one layout."""
    packed = draw(st.booleans())
    orders = list(itertools.permutations(("rows", "heads", "tokens")))
    choices = {
        (g, p): (
            draw(st.sampled_from(orders)),
            draw(st.booleans()),
            draw(st.integers(0, 2)),
            draw(st.sampled_from([1, 2])),
        )
        for g, shape in enumerate(group_shapes)
        for p in range(len(shape.pieces))
    }
    return tuple(rank_of(group_shapes, side, (tp_size, rank), num_blocks, packed, choices) for rank in range(tp_size))


Choice = tuple[tuple[str, ...], bool, int, int]
"""Layout of a piece: axes from the outermost, whether heads lie outside of blocks, bytes of padding, kernel blocks."""


def rank_of(
    group_shapes: tuple[GroupShape, ...],
    side: int,
    ranks: tuple[int, int],
    num_blocks: int,
    packed: bool,
    choices: dict[tuple[int, int], Choice],
) -> Description:
    tp_size, rank = ranks
    built: list[list[tuple[Piece, int]]] = []
    for g, shape in enumerate(group_shapes):
        pieces = []
        for p, piece in enumerate(shape.pieces if shape.kind is not GroupKind.SCRATCH else ()):
            heads = head_share(piece.total_heads, tp_size, rank).num_heads if piece.total_heads else piece.own_heads
            units = 1 if shape.kind is GroupKind.RECURRENT else shape.blocks[side] // shape.unit_tokens
            order, heads_outside, pad, kernels = choices[g, p]
            kernels = kernels if units % kernels == 0 and shape.kind is not GroupKind.RECURRENT else 1
            pieces.append(
                _piece(piece, heads, (kernels, units // kernels), order, heads_outside and not packed, pad, num_blocks)
            )
        built.append(pieces)
    # Groups share memory, as a block belongs to one group at a time; heads outside of blocks have memory of their own.
    overlaid = [[size for piece, size in pieces if not _heads_outside(piece)] for pieces in built]
    if packed:
        strides = [max(sum(sizes) for sizes in overlaid) + 1]
    else:
        strides = [max((sizes[p] for sizes in overlaid if p < len(sizes)), default=1) for p in range(3)]
    regions = [stride * num_blocks for stride in strides]
    groups = []
    for shape, pieces in zip(group_shapes, built, strict=True):
        placed, at, place = [], 0, 0
        for piece, size in pieces:
            if _heads_outside(piece):
                placed.append(_with(piece, region=len(regions)))
                regions.append(size * num_blocks)
            elif packed:
                placed.append(_with(piece, region=0, offset_bytes=at, block_stride_bytes=strides[0]))
                at += size
            else:
                placed.append(_with(piece, region=place, block_stride_bytes=strides[place]))
                place += 1
        layers = tuple(LayerDescription(f"layer{p}", "plain", (piece,)) for p, piece in enumerate(placed))
        groups.append(GroupDescription(shape.spec(side), layers))
    return Description(PROTOCOL, "engine", {}, rank, tp_size, num_blocks, tuple(regions), tuple(groups))


def _heads_outside(piece: Piece) -> bool:
    return piece.heads.count > 1 and piece.heads.stride_bytes >= 4 * piece.block_stride_bytes


def _with(piece: Piece, **changes: int) -> Piece:
    return msgspec.structs.replace(piece, **changes)


def _piece(
    shape: PieceShape,
    heads: int,
    tokens: tuple[int, int],
    order: tuple[str, ...],
    heads_outside: bool,
    pad: int,
    num_blocks: int,
) -> tuple[Piece, int]:
    """Returns a piece, dense except for `pad`, and the bytes of a block."""
    kernels, units = tokens
    counts = {"rows": shape.rows, "heads": heads, "units": units, "kernels": kernels}
    # Kernel blocks are the outermost axis, as in an engine that splits a block.
    nest = ["units" if each == "tokens" else each for each in order]
    nest = ["kernels", *nest]
    if heads_outside:
        nest.remove("heads")
    strides, span = {}, shape.item_bytes
    for name in reversed(nest):
        strides[name] = span
        span = span * counts[name]
    block = span + pad
    if heads_outside:
        strides["heads"] = block * num_blocks
    axes = {name: Axis(counts[name], strides[name]) for name in counts}
    piece = Piece(0, 0, block, shape.item_bytes, total_heads=shape.total_heads, **axes)
    return piece, block * (heads if heads_outside else 1)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    tp = draw(st.sampled_from([(1, 1), (1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]))
    group_shapes = tuple(draw(st.lists(shapes(tp[0] == tp[1]), min_size=1, max_size=4)))
    num_tokens = draw(st.integers(1, 60))
    whole = math.lcm(*(shape.blocks[0] for shape in group_shapes))
    computed = draw(st.integers(0, num_tokens // whole)) * whole
    tables = []
    sides = []
    for side in (0, 1):
        lengths = [-(-num_tokens // shape.blocks[side]) for shape in group_shapes]
        num_blocks = sum(lengths) + 3
        ids = draw(st.one_of(st.permutations(range(1, num_blocks)), st.just(list(range(1, num_blocks)))))
        given = iter(ids)
        tables.append(tuple(tuple(next(given) for _ in range(length)) for length in lengths))
        sides.append(draw(layouts(group_shapes, side, tp[side], num_blocks)))
    ours = tuple(freed(shape.spec(0), table, num_tokens) for shape, table in zip(group_shapes, tables[0], strict=True))
    return World(group_shapes, sides[0], sides[1], num_tokens, computed, (ours, tables[1]))


def freed(spec: GroupSpec, table: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The table as an engine passes it: no blocks where none is read."""
    read = read_blocks(spec, num_tokens)
    return tuple(block if place in read else NULL_BLOCK for place, block in enumerate(table))
