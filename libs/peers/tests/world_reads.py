"""Reads of a generated world: one rank of ours reads from all ranks that it needs."""

from __future__ import annotations

import dataclasses

import numpy as np
from byte_model import ByteNumbers, Side, apply
from peer_worlds import World

from hybridkv.peers.comparison import Agreement, compare
from hybridkv.peers.errors import Incompatibility
from hybridkv.peers.pairing import Exchange, Pairing, Resume
from hybridkv.peers.ranks import source_ranks
from hybridkv.peers.tables import BlockTables
from hybridkv.planner import GroupKind, clip_blocks


@dataclasses.dataclass
class ReadOutcome:
    """A world after one rank of ours has read from all ranks that it needs."""

    ours: Side
    before: list[np.ndarray]
    pairings: list[Pairing]
    remotes: list[tuple[Exchange, BlockTables, Side]] = dataclasses.field(default_factory=list)
    refusal: Incompatibility | None = None


def agreed(world: World) -> Agreement:
    """The agreement of the first ranks."""
    agreement = compare(world.ours[0], world.theirs[0])
    assert isinstance(agreement, Agreement)
    return agreement


def run_reads(world: World, rank: int, holds_all: bool = False, shifted: int | None = None) -> ReadOutcome:
    """With `holds_all` the peers have freed no block, so that no block is missing. Without it they have freed all
    blocks that a resume with their own block size does not read."""
    names = ByteNumbers()
    ours = Side(world.ours[rank], names)
    for index, table in enumerate(world.tables[0]):
        if world.shapes[index].kind is not GroupKind.RECURRENT:
            ours.fill(index, list(table), 0, world.computed_tokens)
    before = ours.copy()
    moved = [shape for shape in world.shapes if shape.kind is not GroupKind.SCRATCH]
    totals = [piece.total_heads for shape in moved for piece in shape.pieces]
    sources = source_ranks(totals or [1], len(world.ours), rank, len(world.theirs))
    assert sources is not None
    pairings, remotes = [], []
    for source in sources:
        theirs = Side(world.theirs[source], names)
        for index, table in enumerate(world.tables[1]):
            theirs.fill(index, list(table), 0, world.num_tokens)
        agreement = compare(ours.description, theirs.description)
        assert isinstance(agreement, Agreement), agreement
        if holds_all:
            remote = BlockTables.whole(world.num_tokens, world.tables[1])
        else:
            specs = [group.spec for group in theirs.description.groups]
            kept = clip_blocks(specs, world.tables[1], world.num_tokens)
            remote = BlockTables(world.num_tokens, kept.first_blocks, kept.block_ids)
        if shifted is not None:
            ids = list(remote.block_ids)
            ids[shifted] = (*ids[shifted][1:], *ids[shifted][:1])
            remote = BlockTables(remote.num_tokens, remote.first_blocks, tuple(ids))
        local = BlockTables.whole(world.num_tokens, world.tables[0])
        exchange = Exchange(agreement)
        found = exchange.pair(local, remote, Resume(world.num_tokens, world.computed_tokens))
        if isinstance(found, Incompatibility):
            return ReadOutcome(ours, before, [], refusal=found)
        pairings.append(found)
        remotes.append((exchange, remote, theirs))
        apply(found.ranges, ours, theirs)
    return ReadOutcome(ours, before, pairings, remotes)
