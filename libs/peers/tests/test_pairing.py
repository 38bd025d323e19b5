"""What moves is what a resume reads: every byte right, no other byte written, nothing more than the formula says."""

from __future__ import annotations

import msgspec
import pytest
from byte_model import stray_writes, wrong_reads
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_worlds import World, worlds
from plain_worlds import group, world
from played_worlds import Played, agreed, play

from hybridkv.peers import cells, digests, pairing
from hybridkv.peers.cells import Side
from hybridkv.peers.description import NULL_BLOCK
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import Exchange, Pairing, Resume
from hybridkv.peers.tables import BlockTables, offered
from hybridkv.planner import GroupKind, GroupSpec, TokenSpan, resume_start

MODERATE = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MODERATE
@given(worlds())
def test_every_byte_that_a_resume_reads_is_right_and_no_other_is_written(world: World) -> None:
    for rank in range(len(world.ours)):
        played = play(world, rank, serves_blocks=False)
        assert played.refusal is None, played.refusal
        for index, table in enumerate(world.tables[0]):
            if world.num_tokens > world.computed_tokens:
                assert wrong_reads(played.ours, index, list(table), world.num_tokens) == []
        span = world.computed_tokens, world.num_tokens
        assert stray_writes(played.before, played.ours, [list(t) for t in world.tables[0]], span) == 0


def needs_more(world: World, index: int) -> bool:
    """Whether what the producer offers of a group lacks a token that a hit at the end of a block here would read."""
    shape = world.shapes[index]
    if shape.kind not in (GroupKind.WINDOW, GroupKind.CHUNKED):
        return False
    here, there = shape.spec(0), shape.spec(1)
    start = resume_start(here, world.num_tokens)
    held = resume_start(there, world.num_tokens) // there.block_tokens * there.block_tokens
    block_start = start // here.block_tokens * here.block_tokens
    block_end = block_start + here.block_tokens
    if start >= world.num_tokens or block_end > world.num_tokens:
        return False
    first = max(block_start, resume_start(here, block_end), world.computed_tokens)
    return first < min(held, block_end)


@MODERATE
@given(worlds())
def test_a_block_that_may_be_found_again_serves_whoever_finds_it(world: World) -> None:
    require_blocks_serve(world)


def require_blocks_serve(case: World) -> None:
    for rank in range(len(case.ours)):
        played = play(case, rank)
        lacking = any(needs_more(case, index) for index in range(len(case.shapes)))
        if case.num_tokens > case.computed_tokens:
            assert (played.refusal is not None) == lacking
        if played.refusal is not None:
            assert all((old == new).all() for old, new in zip(played.before, played.ours.regions, strict=True))
            return
        for index, table in enumerate(case.tables[0]):
            spec = case.shapes[index].spec(0)
            if spec.kind is GroupKind.RECURRENT:
                continue
            for end in range(spec.block_tokens, case.num_tokens + 1, spec.block_tokens):
                read = range(resume_start(spec, end) // spec.block_tokens, end // spec.block_tokens)
                if end > case.computed_tokens and all(table[place] != NULL_BLOCK for place in read):
                    assert wrong_reads(played.ours, index, list(table), end) == []


@st.composite
def windows_into_larger_blocks(draw: st.DrawFn) -> World:
    """What is read begins inside a block here, and that block may end before the boundary."""
    small = draw(st.integers(1, 4))
    large = small * draw(st.integers(2, 4))
    reach = draw(st.integers(1, 3 * large))
    kind = draw(st.sampled_from([GroupKind.WINDOW, GroupKind.CHUNKED]))
    option = "window_tokens" if kind is GroupKind.WINDOW else "align_tokens"
    return world((group(kind, (large, small), **{option: reach}),), num_tokens=draw(st.integers(1, 6 * large)))


@settings(max_examples=examples(200), deadline=None)
@given(windows_into_larger_blocks())
def test_a_larger_block_that_begins_before_the_window_serves_whoever_finds_it(case: World) -> None:
    require_blocks_serve(case)


def test_a_block_that_would_be_found_with_a_hole_is_not_read_into() -> None:
    """A window of 5 before token 26 begins at 22. Who finds the block that ends with 24 reads from 20, and the other
    side has dropped that."""
    case = world((group(GroupKind.WINDOW, (8, 2), window_tokens=5),), num_tokens=26)
    refused = play(case, 0).refusal
    assert refused is not None
    assert refused.field == "block_ids[0]"
    assert play(case, 0, serves_blocks=False).refusal is None


def test_a_request_of_too_many_runs_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both sides: a producer takes the digests of the same runs."""
    exchange = Exchange(agreed(MIXED))
    tables = BlockTables.whole(200, MIXED.tables[0])
    remote = offered([shape.spec(1) for shape in MIXED.shapes], MIXED.tables[1], 200)
    found = exchange.pair(tables, remote, Resume(200))
    assert isinstance(found, Pairing)
    num_runs = sum(moves.num_runs for moves in found.groups)
    assert num_runs >= len(found.ranges) > 4
    for most, fits in ((num_runs, True), (num_runs - 1, False)):
        monkeypatch.setattr(pairing, "MAX_RUNS", most)
        monkeypatch.setattr(digests, "MAX_RUNS", most)
        again = exchange.pair(tables, remote, Resume(200))
        runs = digests.digest_runs(exchange, Side.THEIRS, remote, digests.digest_request(found))
        for each in (again, runs):
            assert isinstance(each, Incompatibility) is not fits
            assert fits or (isinstance(each, Incompatibility) and each.field == "groups[3]: runs of bytes")
    monkeypatch.setattr(pairing, "MAX_RUNS", 0)
    monkeypatch.setattr(pairing, "joined", None)
    assert isinstance(exchange.pair(tables, remote, Resume(200)), Incompatibility)


# Controls: the model sees what it is there to see.

FULL_16 = group(GroupKind.FULL, (16, 16))
WINDOW_16 = group(GroupKind.WINDOW, (16, 16), window_tokens=24)
CHUNKED_16 = group(GroupKind.CHUNKED, (16, 16), align_tokens=80)
STATE_64 = group(GroupKind.RECURRENT, (64, 64))
MIXED = world((FULL_16, WINDOW_16, CHUNKED_16, STATE_64), num_tokens=200)


def wrong_groups(world: World, played: Played) -> list[int]:
    return [i for i, table in enumerate(world.tables[0]) if wrong_reads(played.ours, i, list(table), world.num_tokens)]


def test_nothing_is_wrong_in_the_world_of_the_controls() -> None:
    assert wrong_groups(MIXED, play(MIXED, 0)) == []


@pytest.mark.parametrize("shifted", [0, 1, 2])
def test_ids_that_are_shifted_in_one_group_are_seen_in_that_group(shifted: int) -> None:
    assert wrong_groups(MIXED, play(MIXED, 0, shifted=shifted)) == [shifted]


def test_a_state_of_another_boundary_is_refused() -> None:
    played = Exchange(agreed(MIXED)).pair(
        BlockTables.whole(200, MIXED.tables[0]),
        offered([shape.spec(1) for shape in MIXED.shapes], MIXED.tables[1], 200),
        Resume(199),
    )
    hint = "a state is valid at one boundary only"
    assert played == Incompatibility("groups[3]: the boundary of a state", "199", "200", hint)


def test_a_window_that_is_one_token_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 19 tokens before token 33 reads back to token 15, and one of 18 a block less."""
    short = world((group(GroupKind.WINDOW, (16, 16), window_tokens=19),), num_tokens=33)
    assert wrong_groups(short, play(short, 0)) == []

    def off_by_one(spec: GroupSpec, *rest: int) -> TokenSpan:
        return cells.moved_span(msgspec.structs.replace(spec, window_tokens=(spec.window_tokens or 0) - 1), *rest)

    monkeypatch.setattr(pairing, "moved_span", off_by_one)
    assert wrong_groups(short, play(short, 0)) == [0]


# What another connector gets wrong: blocks that are paired by their place in lists of different grids.


def block_pairs(world: World, cell_tokens: int, **resume: int) -> list[tuple[int, int]]:
    """Which cell of the local table is read from which cell of the remote one: ids are places plus one here."""
    exchange = Exchange(agreed(world))
    remote = offered([shape.spec(1) for shape in world.shapes], world.tables[1], world.num_tokens)
    local = BlockTables.whole(world.num_tokens, world.tables[0])
    found = exchange.pair(local, remote, Resume(world.num_tokens, **resume))
    assert isinstance(found, Pairing), found
    token_bytes = world.shapes[0].pieces[0].item_bytes
    ranges = found.ranges
    starts = zip(ranges.local_offsets, ranges.remote_offsets, ranges.num_bytes, strict=True)
    block_bytes = [size * token_bytes for size in world.shapes[0].blocks]
    cell_bytes = cell_tokens * token_bytes
    return [
        ((lo - block_bytes[0] + done) // cell_bytes, (ro - block_bytes[1] + done) // cell_bytes)
        for lo, ro, size in starts
        for done in range(0, size, cell_bytes)
    ]


def test_a_window_is_paired_by_tokens_where_blocks_have_different_sizes() -> None:
    """1,200 tokens, a window of 64, blocks of 64 there and 128 here. By places [16, 17] would be read from [17, 18]."""
    window = group(GroupKind.WINDOW, (128, 64), window_tokens=64)
    case = world((window,), num_tokens=1200, in_order=True)
    assert block_pairs(case, 64) == [(17, 17), (18, 18)]
    assert wrong_groups(case, play(case, 0)) == []


def test_a_local_prefix_is_left_out_by_tokens_where_blocks_have_different_sizes() -> None:
    """4 blocks of 128 are computed of 1,200 tokens. By places [8 to 19] would be read from [7 to 18]."""
    case = world((group(GroupKind.FULL, (128, 64)),), num_tokens=1200, computed_tokens=512, in_order=True)
    assert block_pairs(case, 64, computed_tokens=512) == [(cell, cell) for cell in range(8, 19)]
    assert wrong_groups(case, play(case, 0)) == []
