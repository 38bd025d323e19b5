"""Pairs of engines written by hand: one piece per layer, tokens as the outermost axis, each layer in a region."""

from __future__ import annotations

from peer_worlds import GroupShape, PieceShape, World, freed

from hybridkv.peers.description import PROTOCOL, Axis, Description, GroupDescription, LayerDescription, Piece
from hybridkv.planner import GroupKind


def group(
    kind: GroupKind,
    blocks: tuple[int, int],
    window_tokens: int | None = None,
    align_tokens: int | None = None,
    unit_tokens: int = 1,
    token_bytes: int = 2,
) -> GroupShape:
    """One layer. `blocks`: block sizes of the reader and of the producer."""
    pieces = (PieceShape(token_bytes, 1, 0, 1),)
    return GroupShape(kind, window_tokens, align_tokens, unit_tokens, blocks, pieces)


def engine(shapes: tuple[GroupShape, ...], side: int, num_blocks: int) -> Description:
    """All groups share one region."""
    pages = []
    for shape in shapes:
        units = 1 if shape.kind is GroupKind.RECURRENT else shape.blocks[side] // shape.unit_tokens
        pages.append(units * shape.pieces[0].item_bytes)
    stride = max(pages)
    groups = tuple(
        GroupDescription(
            shape.spec(side),
            (
                LayerDescription(
                    "layer",
                    "plain",
                    (
                        Piece(
                            0,
                            0,
                            stride,
                            shape.pieces[0].item_bytes,
                            units=Axis(page // shape.pieces[0].item_bytes, shape.pieces[0].item_bytes),
                        ),
                    ),
                ),
            )
            if shape.kind is not GroupKind.SCRATCH
            else (),
        )
        for shape, page in zip(shapes, pages, strict=True)
    )
    return Description(PROTOCOL, f"engine-{side}", {}, 0, 1, num_blocks, (stride * num_blocks,), groups)


def world(shapes: tuple[GroupShape, ...], num_tokens: int, computed_tokens: int = 0, in_order: bool = False) -> World:
    """Block ids count from 1 through all groups, in order or in reverse."""
    tables, sides = [], []
    for side in (0, 1):
        lengths = [-(-num_tokens // shape.blocks[side]) for shape in shapes]
        ids = list(range(1, sum(lengths) + 1))
        given = iter(ids if in_order else reversed(ids))
        tables.append(tuple(tuple(next(given) for _ in range(length)) for length in lengths))
        sides.append((engine(shapes, side, sum(lengths) + 1),))
    ours = tuple(freed(shape.spec(0), table, num_tokens) for shape, table in zip(shapes, tables[0], strict=True))
    return World(shapes, sides[0], sides[1], num_tokens, computed_tokens, (ours, tables[1]))
