"""Moved spans compared with the planner's reads, and moved bytes compared with the formula."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_worlds import World, worlds
from plain_worlds import group, world
from world_reads import run_reads

from hybridkv.peers.cells import moved_span
from hybridkv.planner import GroupKind, GroupSpec, read_blocks
from hybridkv.planner.coverage import load_start
from kits.peers.volume import GroupBytes, full_attention_bytes, group_table, moved_blocks, moved_bytes


@st.composite
def specs(draw: st.DrawFn) -> GroupSpec:
    kind = draw(st.sampled_from([*GroupKind]))
    return GroupSpec(
        kind,
        draw(st.sampled_from([1, 2, 3, 4, 8])),
        draw(st.integers(1, 40)) if kind is GroupKind.WINDOW else None,
        draw(st.integers(1, 40)) if kind is GroupKind.CHUNKED else None,
    )


@settings(deadline=None)
@given(specs(), st.integers(0, 100), st.integers(0, 12))
def test_the_moved_span_with_equal_blocks_equals_the_read_of_a_load(spec: GroupSpec, tokens: int, blocks: int) -> None:
    computed = min(blocks * spec.block_tokens, tokens)
    span = moved_span(spec, tokens, computed)
    start = load_start(spec, tokens, computed) if computed < tokens else tokens
    assert (span.start < tokens) == (start < tokens)
    if start < tokens:
        assert span.start // spec.block_tokens == start // spec.block_tokens
        assert span.end == tokens


@settings(deadline=None)
@given(specs(), st.integers(1, 100))
def test_blocks_moved_to_an_empty_engine_equal_those_a_resume_reads(spec: GroupSpec, tokens: int) -> None:
    assert moved_blocks(spec, tokens) == len(read_blocks(spec, tokens))


def test_a_window_is_rounded_up_to_blocks() -> None:
    spec = GroupSpec(GroupKind.WINDOW, 16, window_tokens=24)
    assert moved_blocks(spec, 160) == 2
    assert moved_blocks(spec, 161) == 3  # 24 tokens before token 161 begin in the third block from the end


@settings(max_examples=examples(60), deadline=None)
@given(worlds())
def test_moved_bytes_equal_the_formula(given_world: World) -> None:
    if len(given_world.ours) > 1 or len(given_world.theirs) > 1:
        return
    if any(shape.blocks[0] != shape.blocks[1] for shape in given_world.shapes):
        return
    pairing = run_reads(given_world, 0).pairings[0]
    table = group_table(given_world.ours[0])
    most = moved_bytes(table, given_world.num_tokens, given_world.computed_tokens)
    trimmed = [s.unit_tokens < s.blocks[0] and s.kind is not GroupKind.RECURRENT for s in given_world.shapes]
    assert pairing.num_bytes == most or (pairing.num_bytes < most and any(trimmed))


@pytest.mark.parametrize("num_tokens", [128, 4096, 4097])
def test_whole_blocks_move_as_the_formula_says(num_tokens: int) -> None:
    shapes = (
        group(GroupKind.FULL, (16, 16), unit_tokens=16),
        *[group(GroupKind.WINDOW, (16, 16), window_tokens=64, unit_tokens=16) for _ in range(5)],
        group(GroupKind.RECURRENT, (64, 64)),
        group(GroupKind.SCRATCH, (16, 16)),
    )
    case = world(shapes, num_tokens)
    pairing = run_reads(case, 0).pairings[0]
    table = group_table(case.ours[0])
    assert pairing.num_bytes == moved_bytes(table, num_tokens)
    assert [moves.num_cells for moves in pairing.groups] == [moved_blocks(row.spec, num_tokens) for row in table]


def test_five_windows_at_4096_tokens_are_a_small_part_of_full_attention() -> None:
    window = GroupBytes(GroupSpec(GroupKind.WINDOW, 16, window_tokens=64), 1000)
    full = GroupBytes(GroupSpec(GroupKind.FULL, 16), 1000)
    table = (*[window] * 5, full)
    assert moved_bytes(table, 4096) == 1000 * (5 * 4 + 256)
    assert full_attention_bytes(table, 4096) == 1000 * 6 * 256
    assert moved_bytes(table, 4096, 2048) == 1000 * (5 * 4 + 128)
    assert full_attention_bytes(table, 4096, 2048) == 1000 * 6 * 128
    assert moved_bytes(table, 4096, 4096) == 0
