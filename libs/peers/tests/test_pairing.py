"""Pairing moves what a resume reads: every byte right, no other byte written, no more bytes than the formula says."""

from __future__ import annotations

import msgspec
import pytest
from byte_model import places, stray_writes, wrong_reads
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer_worlds import World, worlds
from plain_worlds import group, world
from world_reads import ReadOutcome, agreed, run_reads

from hybridkv.peers import cells, digests, pairing
from hybridkv.peers.cells import Side
from hybridkv.peers.description import NULL_BLOCK
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import Exchange, Pairing, Resume
from hybridkv.peers.tables import BlockTables, offered
from hybridkv.planner import GroupKind, GroupSpec, TokenSpan, read_blocks, resume_start

MODERATE = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MODERATE
@given(worlds())
def test_every_byte_that_a_resume_reads_is_right_and_no_other_is_written(world: World) -> None:
    for rank in range(len(world.ours)):
        outcome = run_reads(world, rank, holds_all=True)
        assert outcome.refusal is None, outcome.refusal
        for index, table in enumerate(world.tables[0]):
            if world.num_tokens > world.computed_tokens:
                assert wrong_reads(outcome.ours, index, list(table), world.num_tokens) == []
        span = world.computed_tokens, world.num_tokens
        assert stray_writes(outcome.before, outcome.ours, [list(t) for t in world.tables[0]], span) == 0


def needs_more(world: World, index: int) -> bool:
    """Whether the producer's offer of a group lacks a token of a local block that the read fills."""
    shape = world.shapes[index]
    if shape.kind not in (GroupKind.WINDOW, GroupKind.CHUNKED):
        return False
    here, there = shape.spec(0), shape.spec(1)
    start = resume_start(here, world.num_tokens)
    held = resume_start(there, world.num_tokens) // there.block_tokens * there.block_tokens
    first = max(start // here.block_tokens * here.block_tokens, world.computed_tokens)
    return start < world.num_tokens and first < held


@MODERATE
@given(worlds())
def test_a_block_that_may_be_hit_again_is_complete(world: World) -> None:
    require_blocks_serve(world)


def require_blocks_serve(case: World) -> None:
    for rank in range(len(case.ours)):
        outcome = run_reads(case, rank)
        lacking = any(needs_more(case, index) for index in range(len(case.shapes)))
        if case.num_tokens > case.computed_tokens:
            assert (outcome.refusal is not None) == lacking
        if outcome.refusal is not None:
            assert all((old == new).all() for old, new in zip(outcome.before, outcome.ours.regions, strict=True))
            return
        for index, table in enumerate(case.tables[0]):
            spec = case.shapes[index].spec(0)
            if spec.kind is GroupKind.RECURRENT:
                continue
            for end in range(spec.block_tokens, case.num_tokens + 1, spec.block_tokens):
                read = range(resume_start(spec, end) // spec.block_tokens, end // spec.block_tokens)
                if end > case.computed_tokens and all(table[place] != NULL_BLOCK for place in read):
                    assert wrong_reads(outcome.ours, index, list(table), end) == []


@st.composite
def windows_into_larger_blocks(draw: st.DrawFn) -> World:
    """The read begins inside a local block, and that block may end before the boundary."""
    small = draw(st.integers(1, 4))
    large = small * draw(st.integers(2, 4))
    reach = draw(st.integers(1, 3 * large))
    kind = draw(st.sampled_from([GroupKind.WINDOW, GroupKind.CHUNKED]))
    option = "window_tokens" if kind is GroupKind.WINDOW else "align_tokens"
    return world((group(kind, (large, small), **{option: reach}),), num_tokens=draw(st.integers(1, 6 * large)))


@settings(max_examples=examples(200), deadline=None)
@given(windows_into_larger_blocks())
def test_a_larger_block_that_begins_before_the_window_is_complete(case: World) -> None:
    require_blocks_serve(case)


@settings(max_examples=examples(200), deadline=None)
@given(windows_into_larger_blocks())
def test_every_token_of_a_filled_block_is_read(case: World) -> None:
    """The reader may hand the block over to an engine with smaller blocks, or store a chunk that ends inside it. A hit
    there reads tokens before the window of a hit at the end of the block."""
    spec, (table,) = case.shapes[0].spec(0), case.tables[0]
    outcome = run_reads(case, 0, holds_all=True)
    assert outcome.refusal is None
    for table_place in read_blocks(spec, case.num_tokens):
        filled = places(outcome.ours.description, 0, table_place, table[table_place], case.num_tokens)
        assert [each.item for each in filled if each.item[-1] < case.num_tokens and not outcome.ours.holds(each)] == []


def test_a_block_that_could_be_hit_with_a_hole_is_refused() -> None:
    """A window of 5 before token 26 begins at 22. A hit on the block that ends at 24 reads from 20, and the other side
    has freed that."""
    case = world((group(GroupKind.WINDOW, (8, 2), window_tokens=5),), num_tokens=26)
    refused = run_reads(case, 0).refusal
    assert refused is not None
    assert refused.field == "block_ids[0]"
    assert run_reads(case, 0, holds_all=True).refusal is None


def test_a_request_with_too_many_runs_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides: a producer computes the digests of the same runs."""
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


# Controls: the model notices errors.

FULL_16 = group(GroupKind.FULL, (16, 16))
WINDOW_16 = group(GroupKind.WINDOW, (16, 16), window_tokens=24)
CHUNKED_16 = group(GroupKind.CHUNKED, (16, 16), align_tokens=80)
STATE_64 = group(GroupKind.RECURRENT, (64, 64))
MIXED = world((FULL_16, WINDOW_16, CHUNKED_16, STATE_64), num_tokens=200)


def wrong_groups(world: World, outcome: ReadOutcome) -> list[int]:
    return [i for i, table in enumerate(world.tables[0]) if wrong_reads(outcome.ours, i, list(table), world.num_tokens)]


def test_the_world_of_the_controls_is_read_correctly() -> None:
    assert wrong_groups(MIXED, run_reads(MIXED, 0)) == []


@pytest.mark.parametrize("shifted", [0, 1, 2])
def test_shifted_ids_of_one_group_are_noticed_in_that_group(shifted: int) -> None:
    assert wrong_groups(MIXED, run_reads(MIXED, 0, shifted=shifted)) == [shifted]


def test_a_state_of_another_boundary_is_refused() -> None:
    outcome = Exchange(agreed(MIXED)).pair(
        BlockTables.whole(200, MIXED.tables[0]),
        offered([shape.spec(1) for shape in MIXED.shapes], MIXED.tables[1], 200),
        Resume(199),
    )
    hint = "a state is valid at one boundary only"
    assert outcome == Incompatibility("groups[3]: the boundary of a state", "199", "200", hint)


def test_a_window_that_is_one_token_short_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 19 tokens before token 33 reads back to token 15; a window of 18 reads one block less."""
    short = world((group(GroupKind.WINDOW, (16, 16), window_tokens=19),), num_tokens=33)
    assert wrong_groups(short, run_reads(short, 0)) == []

    def off_by_one(spec: GroupSpec, *rest: int) -> TokenSpan:
        return cells.moved_span(msgspec.structs.replace(spec, window_tokens=(spec.window_tokens or 0) - 1), *rest)

    monkeypatch.setattr(pairing, "moved_span", off_by_one)
    assert wrong_groups(short, run_reads(short, 0)) == [0]


# An error of another connector: blocks paired by their index in lists of different block sizes.


def block_pairs(world: World, cell_tokens: int, **resume: int) -> list[tuple[int, int]]:
    """Pairs of (local cell, remote cell); block ids are index plus one here."""
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


def test_a_window_is_paired_by_tokens_where_block_sizes_differ() -> None:
    """1,200 tokens, a window of 130, remote blocks of 64, local ones of 128. Counted from the ends of the lists, [17 to
    19] would be read from [16 to 18]."""
    window = group(GroupKind.WINDOW, (128, 64), window_tokens=130)
    case = world((window,), num_tokens=1200, in_order=True)
    assert block_pairs(case, 64) == [(16, 16), (17, 17), (18, 18)]
    assert wrong_groups(case, run_reads(case, 0)) == []


def test_a_local_prefix_is_skipped_by_tokens_where_block_sizes_differ() -> None:
    """4 blocks of 128 of 1,200 tokens are computed. By index, [8 to 19] would be read from [7 to 18]."""
    case = world((group(GroupKind.FULL, (128, 64)),), num_tokens=1200, computed_tokens=512, in_order=True)
    assert block_pairs(case, 64, computed_tokens=512) == [(cell, cell) for cell in range(8, 19)]
    assert wrong_groups(case, run_reads(case, 0)) == []
