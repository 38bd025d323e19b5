"""Ranks of two engines in one process, as arrays: real agents, control connections and transports, without vLLM."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import patience

from hybridkv.connectors.vllm.nixl.agent.agent import Agent, AgentResults
from hybridkv.connectors.vllm.nixl.agent.lease_server import ServerOptions
from hybridkv.connectors.vllm.nixl.agent.read_manager import ReadOptions
from hybridkv.connectors.vllm.nixl.memory.description import MemoryRegion
from hybridkv.connectors.vllm.nixl.memory.rank_memory import NixlRankMemory
from hybridkv.connectors.vllm.nixl.messages import (
    NixlLoadFailure,
    NixlStepPlan,
    OfferedRequest,
    OpenedLease,
    PromptLoad,
    WaitingRequest,
)
from hybridkv.connectors.vllm.nixl.params import RankAddress, RemotePrompt
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.peers.control import ControlLoop
from hybridkv.peers.description import PROTOCOL, Axis, Description, GroupDescription, LayerDescription, Piece
from hybridkv.peers.leases import Lease
from hybridkv.peers.ranks import head_share
from hybridkv.peers.reads import ReadBounds
from hybridkv.peers.tables import BlockTables, offered
from hybridkv.peers.transport import Region as Registered
from hybridkv.peers.transport import Transport
from hybridkv.peers.wire import NO_SECRET, WireLimits
from hybridkv.planner import GroupKind, GroupSpec, read_blocks

NUM_BLOCKS, MAX_LEASES, ITEM_BYTES = 24, 8, 16
LEASE_S = 1e5
WAIT_S = patience.seconds(12.0)
PATIENT = ReadBounds(WAIT_S, WAIT_S, WAIT_S, WAIT_S, WAIT_S)
_starts = itertools.count()


@dataclass(frozen=True)
class Side:
    """Settings of one engine.

    Args:
        block_tokens: of both of its groups.
        tp_size: ranks.
        total_heads: of the model; 0: pages move whole.
        heads_first: whether heads are outside of tokens in a page.
    """

    block_tokens: int = 4
    tp_size: int = 1
    total_heads: int = 4
    heads_first: bool = True

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return (
            GroupSpec(GroupKind.FULL, self.block_tokens),
            GroupSpec(GroupKind.WINDOW, self.block_tokens, window_tokens=6),
        )

    def num_heads(self, rank: int) -> int:
        share = head_share(self.total_heads, self.tp_size, rank) if self.total_heads else None
        return share.num_heads if share else 4


class Rank:
    """One rank with its memory (one region per group) and its agent."""

    max_links = WireLimits().max_connections
    clock = staticmethod(time.monotonic)
    """Clock of control connections, in seconds."""

    def __init__(
        self,
        side: Side,
        rank: int,
        open_transport: Callable[[str], Transport],
        verify: bool = True,
        bounds: ReadBounds = PATIENT,
    ) -> None:
        self.side, self.rank = side, rank
        self.name = f"engine-{next(_starts)}.{rank}"
        heads, tokens = side.num_heads(rank), side.block_tokens
        shape = (NUM_BLOCKS, heads, tokens) if side.heads_first else (NUM_BLOCKS, tokens, heads)
        self.pages = [np.full((*shape, ITEM_BYTES), 0xEE, dtype=np.uint8) for _ in side.groups]
        memory = NixlRankMemory([MemoryRegion(page.ctypes.data, page.nbytes) for page in self.pages], MAX_LEASES)
        self.metrics = NixlMetrics()
        self.transport = open_transport(self.name)
        capability = self.transport.register([Registered(each.address, each.num_bytes) for each in memory.regions])
        limits = WireLimits(max_connections=self.max_links, handshake_timeout_s=WAIT_S, silence_timeout_s=WAIT_S)
        self.agent = Agent(
            ControlLoop(self.name, NO_SECRET, limits, self.clock),
            self.transport,
            memory,
            ServerOptions(
                self._description(memory),
                capability,
                MAX_LEASES,
                lease_s=LEASE_S,
                clock=time.monotonic,
            ),
            ReadOptions(bounds, verify, time.monotonic, self.max_links),
            self.metrics,
        )
        self.results = AgentResults()

    def view(self, group: int) -> np.ndarray:
        """Array of [block, token, head, byte]."""
        page = self.pages[group]
        return page.transpose(0, 2, 1, 3) if self.side.heads_first else page

    def until(self, holds: Callable[[AgentResults], bool]) -> AgentResults:
        """Collect results of the agent until `holds` is true of their sum."""
        until_s = time.monotonic() + WAIT_S
        while not holds(self.results):
            assert time.monotonic() < until_s, self.results
            new = self.agent.take_results()
            self.results.finished |= new.finished
            self.results.failures |= new.failures
            self.results.released |= new.released
            time.sleep(0.002)
        return self.results

    def _description(self, memory: NixlRankMemory) -> Description:
        groups = []
        for index, spec in enumerate(self.side.groups):
            strides = self.view(index).strides
            piece = Piece(
                region=index,
                offset_bytes=0,
                block_stride_bytes=strides[0],
                item_bytes=ITEM_BYTES,
                heads=Axis(self.side.num_heads(self.rank), strides[2]),
                units=Axis(self.side.block_tokens, strides[1]),
                total_heads=self.side.total_heads,
            )
            groups.append(GroupDescription(spec, (LayerDescription(f"layer{index}", "plain", (piece,)),)))
        sizes = tuple(region.num_bytes for region in memory.regions)
        return Description(PROTOCOL, self.name, {}, self.rank, self.side.tp_size, NUM_BLOCKS, sizes, tuple(groups))


@dataclass
class Engine:
    """All ranks of a side."""

    side: Side
    ranks: list[Rank]
    addresses: list[RankAddress] = field(default_factory=list)

    @staticmethod
    def start(
        side: Side, open_transport: Callable[[str], Transport], verify: bool = True, bounds: ReadBounds = PATIENT
    ) -> Engine:
        engine = Engine(side, [Rank(side, rank, open_transport, verify, bounds) for rank in range(side.tp_size)])
        engine.addresses = [RankAddress(rank.agent.listen("127.0.0.1", 0), rank.name) for rank in engine.ranks]
        return engine

    def submit(self, plan: Callable[[], NixlStepPlan]) -> None:
        for rank in self.ranks:
            rank.agent.submit(plan())

    def close(self) -> None:
        for rank in self.ranks:
            close(rank.agent)


def close(agent: Agent) -> None:
    """Close an agent, however long a busy machine takes."""
    with mock.patch("hybridkv.connectors.vllm.nixl.agent.agent.CLOSE_S", patience.seconds(2.0)):
        assert agent.close()


def content(group: int, tokens: Sequence[int], heads: Sequence[int]) -> np.ndarray:
    """Expected content of tokens and heads, on any rank and in any block: [token, head, byte]."""
    numbers = 7 * group + 31 * np.array(tokens)[:, None, None] + 5 * np.array(heads)[None, :, None]
    return ((numbers + 3 * np.arange(ITEM_BYTES)) % 251).astype(np.uint8)


def tables_of(side: Side, num_tokens: int, offset: int = 1) -> tuple[tuple[int, ...], ...]:
    """Whole tables: blocks of the two groups in turn, each table in descending order."""
    count = -(-num_tokens // side.block_tokens)
    assert offset + 2 * count <= NUM_BLOCKS
    return tuple(tuple(range(offset + (group + 1) * count - 1, offset + group * count - 1, -1)) for group in (0, 1))


def heads_of(rank: Rank) -> list[int]:
    side = rank.side
    share = head_share(side.total_heads, side.tp_size, rank.rank) if side.total_heads else None
    first = share.first if share else 0
    return list(range(first, first + side.num_heads(rank.rank)))


def write_prompt(engine: Engine, tables: tuple[tuple[int, ...], ...], num_tokens: int) -> None:
    """Write the content of a forward pass."""
    size = engine.side.block_tokens
    for rank in engine.ranks:
        for group, table in enumerate(tables):
            for place, block in enumerate(table):
                tokens = range(place * size, min((place + 1) * size, num_tokens))
                rank.view(group)[block, : len(tokens)] = content(group, tokens, heads_of(rank))


def wrong_tokens(engine: Engine, tables: tuple[tuple[int, ...], ...], num_tokens: int) -> list[tuple[int, int, int]]:
    """(rank, group, token) of all wrong tokens that a resume would read."""
    size, wrong = engine.side.block_tokens, []
    for rank in engine.ranks:
        for group, table in enumerate(tables):
            spec = engine.side.groups[group]
            first = num_tokens - (spec.window_tokens or num_tokens + 1) + 1
            for token in range(max(0, first), num_tokens):
                assert token // size in read_blocks(spec, num_tokens)
                found = rank.view(group)[table[token // size], token % size]
                if not (found == content(group, [token], heads_of(rank))[0]).all():
                    wrong.append((rank.rank, group, token))
    return wrong


def hand_over(
    producer: Engine, request_id: str, tables: tuple[tuple[int, ...], ...], num_tokens: int, is_planned: bool = True
) -> RemotePrompt:
    """Finish the request; returns the prompt for its consumer. `is_planned`: the ranks get the plan with its blocks."""
    lease = Lease(slot=3, nonce=hash(request_id) & ((1 << 62) - 1) | 1)
    kept = offered(producer.side.groups, tables, num_tokens)
    producer.submit(lambda: NixlStepPlan(opened=[OpenedLease(request_id, lease)]))
    if is_planned:
        offer(producer, request_id, kept)
    return RemotePrompt(
        engine_id="producer",
        request_id=request_id,
        host="127.0.0.1",
        ranks=tuple(producer.addresses),
        num_tokens=num_tokens,
        block_ids=kept.block_ids,
        first_blocks=kept.first_blocks,
        block_tokens=tuple(group.block_tokens for group in producer.side.groups),
        lease=lease,
        lease_seconds=LEASE_S,
        prefix_tokens=num_tokens,
        prefix="prefix",
    )


def offer(producer: Engine, request_id: str, kept: BlockTables) -> None:
    producer.submit(lambda: NixlStepPlan(offered=[OfferedRequest(request_id, kept)]))


def load(
    consumer: Engine, request_id: str, prompt: RemotePrompt, tables: tuple[tuple[int, ...], ...], computed: int = 0
) -> None:
    prompt_load = PromptLoad(request_id, prompt, prompt.num_tokens, computed, tables)
    consumer.submit(lambda: NixlStepPlan(waiting=[WaitingRequest(request_id, prompt)], loads=[prompt_load]))


def failures(consumer: Engine, request_id: str) -> list[NixlLoadFailure | None]:
    """Failure of the load on each rank, after it ended."""
    found = []
    for rank in consumer.ranks:
        results = rank.until(lambda results: request_id in results.finished)
        found.append(results.failures.get(request_id))
    return found
