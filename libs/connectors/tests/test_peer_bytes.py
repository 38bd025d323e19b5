"""Bytes of a request: counted by the connector, computed from the group table, and copied by the transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import peer_ranks
import pytest
from peer_ranks import Engine, Rank, Side, failures, hand_over, load

from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from hybridkv.connectors.vllm.nixl.params import RankAddress
from hybridkv.peers.description import PROTOCOL, Description, GroupDescription, LayerDescription, Piece
from hybridkv.peers.leases import SLOT_BYTES
from hybridkv.peers.ranges import Ranges
from hybridkv.peers.transport import RemoteId, TransferState
from hybridkv.planner import GroupKind, GroupSpec
from kits.peers.in_memory import InMemoryTransport, World
from kits.peers.volume import full_attention_bytes, group_table, moved_bytes

BLOCK_TOKENS, WINDOW_TOKENS = 16, 64
NUM_BLOCKS = 2048


@dataclass(frozen=True)
class Windows(Side):
    """Five window groups, one of full attention, and one recurrent state; pages move whole."""

    block_tokens: int = BLOCK_TOKENS
    total_heads: int = 0

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        window = GroupSpec(GroupKind.WINDOW, self.block_tokens, window_tokens=WINDOW_TOKENS)
        recurrent = GroupSpec(GroupKind.RECURRENT, self.block_tokens)
        return (*[window] * 5, GroupSpec(GroupKind.FULL, self.block_tokens), recurrent)


class WholeRank(Rank):
    """Rank with pages that are pieces which cannot be cut."""

    def _description(self, memory: NixlRankMemory) -> Description:
        groups = []
        for index, spec in enumerate(self.side.groups):
            block_bytes = self.pages[index].strides[0]
            piece = Piece(index, 0, block_stride_bytes=block_bytes, item_bytes=block_bytes)
            groups.append(GroupDescription(spec, (LayerDescription(f"layer{index}", "plain", (piece,)),)))
        sizes = tuple(region.num_bytes for region in memory.regions)
        whole = Description(PROTOCOL, self.name, {}, self.rank, self.side.tp_size, NUM_BLOCKS, sizes, tuple(groups))
        self.table = group_table(whole)
        return whole


class Counting(InMemoryTransport):
    """Counts the copied bytes."""

    num_bytes = 0

    def _copy(self, remote: RemoteId, ranges: Ranges) -> TransferState:
        self.num_bytes += ranges.total_bytes
        return super()._copy(remote, ranges)


@contextmanager
def pair() -> Iterator[tuple[WholeRank, WholeRank]]:
    """(producer, consumer)"""
    world = World()
    producer, consumer = (WholeRank(Windows(), 0, lambda name: Counting(name, world)) for _ in range(2))
    try:
        yield producer, consumer
    finally:
        peer_ranks.close(consumer.agent)
        peer_ranks.close(producer.agent)


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_ranks, "NUM_BLOCKS", NUM_BLOCKS)
    monkeypatch.setattr(peer_ranks, "ITEM_BYTES", 32)


def tables(num_tokens: int, first: int) -> tuple[tuple[int, ...], ...]:
    """Tables of all groups; the state is one block at the end of its table."""
    count = -(-num_tokens // BLOCK_TOKENS)
    found = [tuple(range(first + group * count, first + (group + 1) * count)) for group in range(7)]
    found[6] = (*[0] * (count - 1), found[6][-1])
    return tuple(found)


@pytest.mark.parametrize(("num_tokens", "computed_tokens"), [(4096, 0), (4090, 0), (4096, 2048), (40, 0), (4096, 4080)])
def test_counted_bytes_equal_the_table_and_the_copied_bytes(num_tokens: int, computed_tokens: int) -> None:
    with pair() as (theirs, ours):
        producer, consumer = Engine(theirs.side, [theirs]), Engine(ours.side, [ours])
        producer.addresses = [RankAddress(theirs.agent.listen("127.0.0.1", 0), theirs.name)]
        there, here = tables(num_tokens, 1), tables(num_tokens, 200)
        for number, page in enumerate(theirs.pages):
            page[:] = number
        load(consumer, "d", hand_over(producer, "p", there, num_tokens), here, computed_tokens)
        assert failures(consumer, "d") == [None]
        assert all((page[ids[-1]] == n).all() for n, (page, ids) in enumerate(zip(ours.pages, here, strict=True)))

        counted = ours.metrics.take()
        assert counted is not None
        totals = {name: value for name, _, value in counted.data["counters"]}
        formula = moved_bytes(ours.table, num_tokens, computed_tokens)
        assert totals["vllm:hybridkv_peer_read_bytes_total"] == formula
        # Nothing moves twice, and nothing but the lease moves besides.
        assert isinstance(ours.transport, Counting)
        assert ours.transport.num_bytes == formula + SLOT_BYTES


def test_five_windows_at_4096_tokens_cost_a_small_part_of_full_attention() -> None:
    """The bytes counted above, compared with the bytes without groups."""
    with pair() as (_, ours):
        block = ours.table[0].block_bytes
        assert moved_bytes(ours.table, 4096) == (5 * 4 + 256 + 1) * block
        assert full_attention_bytes(ours.table, 4096) == 7 * 256 * block
