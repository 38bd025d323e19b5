"""What travels between the connector's two halves: plans to the workers, outcomes back. Plain values only."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hybridkv.connectors.vllm.nixl.params import RemotePrompt
from hybridkv.peers.leases import Lease
from hybridkv.peers.tables import BlockTables


class OpenedLease(msgspec.Struct, frozen=True, array_like=True):
    """A request whose blocks may be handed over when it has finished: its lease is to stand in the table by then."""

    request_id: str
    lease: Lease


class OfferedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A finished request whose blocks are held until its consumers are done, or say nothing for too long.

    Args:
        request_id: whose.
        tables: its blocks: of nothing else are digests given.
    """

    request_id: str
    tables: BlockTables


class HostCopy(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that are to be copied to host memory behind the step, where peers do not read the engine's own.

    Args:
        request_id: whose.
        block_ids: for every group; 0 where there is none.
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]


class PromptLoad(msgspec.Struct, frozen=True, array_like=True):
    """Everything that one request loads from its producer.

    Args:
        request_id: as this engine calls it.
        prompt: what the producer holds.
        num_tokens: that the request will have; at most the producer's.
        computed_tokens: of them, those that this engine held already, a multiple of every block.
        block_ids: for every group this engine's whole table; 0 where it has no block.
        refused: why it must fail without a byte moved.
    """

    request_id: str
    prompt: RemotePrompt
    num_tokens: int
    computed_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    refused: str | None = None


class WaitingRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that waits for its turn: its producer is to go on holding the blocks."""

    request_id: str
    prompt: RemotePrompt


@dataclass(slots=True)
class NixlStepPlan(KVConnectorMetadata):
    """Scheduler to workers, once a step. What is said of one request is said in the order of the fields."""

    dropped: list[str] = field(default_factory=list)
    """Producer: leases that nobody was told of end, by request."""
    opened: list[OpenedLease] = field(default_factory=list)
    offered: list[OfferedRequest] = field(default_factory=list)
    host_copies: list[HostCopy] = field(default_factory=list)
    """Done behind the step, by the engine's thread."""
    waiting: list[WaitingRequest] = field(default_factory=list)
    loads: list[PromptLoad] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Consumer: requests that need nothing of their producer any more. A load that is under way is given up."""

    @property
    def is_empty(self) -> bool:
        told = (
            self.dropped or self.opened or self.offered or self.host_copies or self.waiting or self.loads or self.ended
        )
        return not told


@dataclass(slots=True)
class WorkerAddress(KVConnectorHandshakeMetadata):
    """One rank to the scheduler, once, before the engine serves: how consumers find it.

    Args:
        port: at which it listens.
        name: of this start of it, with which it must answer.
    """

    port: int
    name: str


class NixlLoadFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a load failed: the reason for counters, the detail for people."""

    reason: str
    detail: str


@dataclass(slots=True)
class NixlStepOutcome(KVConnectorWorkerMetadata):
    """Workers to scheduler: what ended since the last step. Merging over ranks loses nothing."""

    load_failures: dict[str, tuple[NixlLoadFailure, ...]] = field(default_factory=dict)
    addresses: dict[int, WorkerAddress] = field(default_factory=dict)
    """Of each rank, with its first outcome, where `WorkerAddress` has no way."""

    @property
    def is_empty(self) -> bool:
        return not (self.load_failures or self.addresses)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> NixlStepOutcome:
        if not isinstance(other, NixlStepOutcome):
            raise TypeError(f"expected StepOutcome, got {type(other).__name__}")
        failures = dict(self.load_failures)
        for request_id, theirs in other.load_failures.items():
            failures[request_id] = failures.get(request_id, ()) + theirs
        return NixlStepOutcome(failures, self.addresses | other.addresses)
