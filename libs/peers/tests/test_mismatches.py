"""Every difference between two engines, one by one: read with every byte right, or refused with the field's name.

Plain rules state again which pairs are read and which are refused; the bytes are those of the model of both sides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from byte_model import stray_writes, wrong_reads
from examples import thinned
from peer_worlds import Choice, GroupShape, PieceShape, World, freed, rank_of
from world_reads import run_reads

from hybridkv.peers.comparison import Agreement, compare
from hybridkv.peers.description import Description
from hybridkv.peers.errors import Incompatibility
from hybridkv.planner import GroupKind

BLOCKS = ((4, 4), (4, 8), (8, 4), (4, 12), (12, 4), (2, 12), (4, 6), (6, 4), (8, 12))
UNITS = ((1, 1), (2, 2), (1, 2), (None, None), (1, None), (None, 1))
"""Tokens that move only together, on each side; None: the whole block."""
RESUMES = ((1, 0), (23, 0), (24, 0), (25, 24), (47, 24), (48, 24), (48, 48))
"""(tokens, tokens that the reader already has)"""
WINDOW_TOKENS, ALIGN_TOKENS = 6, 10

LAYOUTS: dict[str, tuple[bool, Choice]] = {
    "heads, tokens": (False, (("heads", "rows", "tokens"), False, 0, 1)),
    "tokens, heads": (False, (("tokens", "heads", "rows"), False, 0, 1)),
    "rows, tokens, heads": (False, (("rows", "tokens", "heads"), False, 0, 1)),
    "heads outside of blocks": (False, (("heads", "tokens", "rows"), True, 0, 1)),
    "layers packed into blocks, padded": (True, (("heads", "tokens", "rows"), False, 3, 1)),
    "kernel blocks": (False, (("heads", "rows", "tokens"), False, 1, 2)),
}


def shape(
    kind: GroupKind,
    blocks: tuple[int, int],
    unit_tokens: int = 1,
    pieces: tuple[PieceShape, ...] = (PieceShape(2, 1, 0, 1),),
) -> GroupShape:
    return GroupShape(
        kind,
        WINDOW_TOKENS if kind is GroupKind.WINDOW else None,
        ALIGN_TOKENS if kind is GroupKind.CHUNKED else None,
        unit_tokens,
        blocks,
        pieces,
    )


def world(
    sides: tuple[tuple[GroupShape, ...], tuple[GroupShape, ...]],
    resume: tuple[int, int],
    tp_sizes: tuple[int, int] = (1, 1),
    layouts: tuple[str, str] = ("tokens, heads", "tokens, heads"),
) -> World:
    """Block ids run against the order of the tables."""
    num_tokens, computed_tokens = resume
    described: list[tuple[Description, ...]] = []
    tables = []
    for side, shapes in enumerate(sides):
        lengths = [math.ceil(num_tokens / each.blocks[side]) for each in shapes]
        packed, choice = LAYOUTS[layouts[side]]
        choices = {(g, p): choice for g, each in enumerate(shapes) for p in range(len(each.pieces))}
        num_blocks, tp_size = sum(lengths) + 1, tp_sizes[side]
        ranks = ((tp_size, rank) for rank in range(tp_size))
        described.append(tuple(rank_of(shapes, side, place, num_blocks, packed, choices) for place in ranks))
        ids = iter(range(num_blocks - 1, 0, -1))
        tables.append(tuple(tuple(next(ids) for _ in range(length)) for length in lengths))
    ours = tuple(freed(each.spec(0), table, num_tokens) for each, table in zip(sides[0], tables[0], strict=True))
    return World(sides[0], described[0], described[1], num_tokens, computed_tokens, (ours, tables[1]))


def require_read(case: World) -> None:
    for rank in range(len(case.ours)):
        outcome = run_reads(case, rank, holds_all=True)
        assert outcome.refusal is None, outcome.refusal
        for index, table in enumerate(case.tables[0]):
            if case.num_tokens > case.computed_tokens:
                assert wrong_reads(outcome.ours, index, list(table), case.num_tokens) == []
        span = case.computed_tokens, case.num_tokens
        assert stray_writes(outcome.before, outcome.ours, [list(table) for table in case.tables[0]], span) == 0


def require_refused(case: World, field: str) -> None:
    refusal = compare(case.ours[0], case.theirs[0])
    assert isinstance(refusal, Incompatibility)
    assert field in refusal.field
    assert refusal.ours != refusal.theirs
    assert refusal.hint


def refused_field(kind: GroupKind, blocks: tuple[int, int], units: tuple[int, int]) -> str | None:
    """The field that refuses the blocks, None where tokens can be paired. A state is whole, whatever its block size."""
    if kind in (GroupKind.RECURRENT, GroupKind.SCRATCH):
        return None
    if max(blocks) % min(blocks):
        return "block_tokens"
    return "unit_tokens" if units[0] != units[1] else None


@pytest.mark.parametrize("kind", list(GroupKind))
@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda blocks: f"{blocks[0]}from{blocks[1]}")
def test_blocks_of_any_sizes_are_read_or_refused_by_name(kind: GroupKind, blocks: tuple[int, int]) -> None:
    for wanted in UNITS:
        units = (wanted[0] or blocks[0], wanted[1] or blocks[1])
        sides = (shape(kind, blocks, units[0]),), (shape(kind, blocks, units[1]),)
        field = refused_field(kind, blocks, units)
        for num_tokens, computed_tokens in RESUMES:
            case = world(sides, (num_tokens, computed_tokens // blocks[0] * blocks[0]))
            if field is not None:
                require_refused(case, field)
            else:
                require_read(case)


PIECES = (PieceShape(2, 2, 4, 4), PieceShape(1, 1, 4, 4))
MIXED = tuple(
    shape(kind, blocks, pieces=PIECES)
    for kind, blocks in (
        (GroupKind.FULL, (4, 8)),
        (GroupKind.WINDOW, (8, 4)),
        (GroupKind.CHUNKED, (4, 4)),
        (GroupKind.RECURRENT, (8, 4)),
        (GroupKind.SCRATCH, (4, 4)),
    )
)


@pytest.mark.parametrize("layouts", thinned([*itertools.product(LAYOUTS, LAYOUTS)], 5), ids=" from ".join)
def test_any_layout_is_read_from_any_other(layouts: tuple[str, str]) -> None:
    for resume in ((45, 0), (45, 16), (48, 40)):
        require_read(world((MIXED, MIXED), resume, layouts=layouts))


@pytest.mark.parametrize(
    "tp_sizes", itertools.product((1, 2, 4, 8), repeat=2), ids=lambda sizes: f"{sizes[0]}of{sizes[1]}"
)
@pytest.mark.parametrize("total_heads", [0, 1, 4])
def test_any_number_of_ranks_is_read_or_refused_by_name(tp_sizes: tuple[int, int], total_heads: int) -> None:
    """0 heads: no split by heads. 1 head: every rank has it, as with a latent. 4 heads on 8 ranks: each head twice."""
    shapes = tuple(
        shape(kind, blocks, pieces=(PieceShape(2, 1, total_heads, 2),))
        for kind, blocks in ((GroupKind.FULL, (8, 4)), (GroupKind.WINDOW, (4, 8)), (GroupKind.RECURRENT, (4, 8)))
    )
    case = world((shapes, shapes), (29, 8), tp_sizes, ("heads, tokens", "tokens, heads"))
    if total_heads == 0 and tp_sizes[0] != tp_sizes[1]:
        require_refused(case, "tp_size")
    else:
        require_read(case)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_windows_of_any_length_are_read_into_blocks_of_any_size(ratio: int) -> None:
    """Rounded up to the smaller block, on either side."""
    for window_tokens, flipped in itertools.product(range(1, 4 * 4 * ratio), (False, True)):
        blocks = (4 * ratio, 4) if flipped else (4, 4 * ratio)
        window = dataclasses.replace(shape(GroupKind.WINDOW, blocks), window_tokens=window_tokens)
        for num_tokens in (4 * ratio - 1, 4 * ratio, 4 * ratio + 1, 30):
            require_read(world(((window,), (window,)), (num_tokens, 0)))


def test_a_token_in_the_place_of_another_is_noticed() -> None:
    """Negative control: shifted ids in one group make that group wrong."""
    case = world((MIXED, MIXED), (45, 0))
    assert isinstance(compare(case.ours[0], case.theirs[0]), Agreement)
    for shifted in range(3):
        outcome = run_reads(case, 0, holds_all=True, shifted=shifted)
        wrong = [i for i, table in enumerate(case.tables[0]) if wrong_reads(outcome.ours, i, list(table), 45)]
        assert wrong == [shifted]
