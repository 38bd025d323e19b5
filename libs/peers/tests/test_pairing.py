"""What moves is what a resume reads: every byte right, no other byte written, nothing more than the formula says."""

from __future__ import annotations

import dataclasses

import pytest
from byte_model import Names, Side, apply, places, stray_writes, wrong_reads
from hypothesis import HealthCheck, given, settings
from peer_worlds import World, worlds

from hybridkv.peers.comparison import Agreement, Refusal, compare
from hybridkv.peers.description import NULL_BLOCK
from hybridkv.peers.pairing import Exchange, Pairing, Resume
from hybridkv.peers.ranks import source_ranks
from hybridkv.peers.tables import BlockTables, offered
from hybridkv.planner import GroupKind, resume_start

MODERATE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclasses.dataclass
class Played:
    """A world in which one rank of ours has read from all that it must."""

    ours: Side
    before: list
    pairings: list[Pairing]
    refusal: Refusal | None = None


def play(world: World, rank: int, serves_blocks: bool = True, shifted: int | None = None) -> Played:
    names = Names()
    ours = Side(world.ours[rank], names)
    for index, table in enumerate(world.tables[0]):
        if world.shapes[index].kind is not GroupKind.RECURRENT:
            ours.fill(index, list(table), 0, world.computed_tokens)
    before = ours.copy()
    totals = [piece.total_heads for shape in world.shapes for piece in shape.pieces if shape.kind is not GroupKind.SCRATCH]
    sources = source_ranks(totals or [1], len(world.ours), rank, len(world.theirs))
    assert sources is not None
    pairings = []
    for source in sources:
        theirs = Side(world.theirs[source], names)
        for index, table in enumerate(world.tables[1]):
            theirs.fill(index, list(table), 0, world.num_tokens)
        agreement = compare(ours.description, theirs.description)
        assert isinstance(agreement, Agreement), agreement
        remote = offered([group.spec for group in theirs.description.groups], world.tables[1], world.num_tokens)
        if shifted is not None:
            ids = list(remote.block_ids)
            ids[shifted] = (*ids[shifted][1:], *ids[shifted][:1])
            remote = BlockTables(remote.num_tokens, remote.first_blocks, tuple(ids))
        local = BlockTables.whole(world.num_tokens, world.tables[0])
        pairing = Exchange(agreement).pair(local, remote, Resume(world.num_tokens, world.computed_tokens, serves_blocks))
        if isinstance(pairing, Refusal):
            return Played(ours, before, [], pairing)
        pairings.append(pairing)
        apply(pairing.ranges, ours, theirs)
    return Played(ours, before, pairings)


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
    for rank in range(len(world.ours)):
        played = play(world, rank)
        lacking = any(needs_more(world, index) for index in range(len(world.shapes)))
        if world.num_tokens > world.computed_tokens:
            assert (played.refusal is not None) == lacking
        if played.refusal is not None:
            assert all((old == new).all() for old, new in zip(played.before, played.ours.regions, strict=True))
            return
        for index, table in enumerate(world.tables[0]):
            spec = world.shapes[index].spec(0)
            if spec.kind is GroupKind.RECURRENT:
                continue
            for end in range(spec.block_tokens, world.num_tokens + 1, spec.block_tokens):
                read = range(resume_start(spec, end) // spec.block_tokens, end // spec.block_tokens)
                if end > world.computed_tokens and all(table[place] != NULL_BLOCK for place in read):
                    assert wrong_reads(played.ours, index, list(table), end) == []
