"""Messages between the connector's halves: plans from scheduler to workers, and outcomes back. All are plain values."""

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
    """Lease of a request that may be handed over. Workers write it into the lease table before the request ends."""

    request_id: str
    lease: Lease


class OfferedRequest(msgspec.Struct, frozen=True, array_like=True):
    """Finished request. Its blocks are held until its consumers are done or its lease expires.

    Args:
        request_id: id of the request.
        tables: blocks of the request. The producer digests no other blocks for the request's consumers.
    """

    request_id: str
    tables: BlockTables


class HostCopy(msgspec.Struct, frozen=True, array_like=True):
    """Blocks to copy to host memory after the step, because peers cannot read device memory.

    Args:
        block_ids: blocks of each group; 0 for no block.
    """

    block_ids: tuple[tuple[int, ...], ...]


class PromptLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of one request from its producer.

    Args:
        request_id: id of the request at this engine.
        prompt: prompt that the producer holds.
        num_tokens: tokens that the request has after the load; at most `prompt.num_tokens`.
        computed_tokens: tokens of these that this engine already has; a multiple of every block size.
        block_ids: for each group, this engine's whole block table; 0 for no block.
        refused: reason to fail the load without a read.
    """

    request_id: str
    prompt: RemotePrompt
    num_tokens: int
    computed_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    refused: str | None = None


class WaitingRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request that waits for its load. Workers renew its lease at the producer."""

    request_id: str
    prompt: RemotePrompt


@dataclass(slots=True)
class NixlStepPlan(KVConnectorMetadata):
    """Message from scheduler to workers, once per step. Workers apply the fields in order, except `host_copies`."""

    dropped: list[str] = field(default_factory=list)
    """Producer: ended requests that are not handed over. No consumer has the leases of these requests."""
    opened: list[OpenedLease] = field(default_factory=list)
    offered: list[OfferedRequest] = field(default_factory=list)
    host_copies: list[HostCopy] = field(default_factory=list)
    """The engine's thread makes these copies after the step."""
    waiting: list[WaitingRequest] = field(default_factory=list)
    loads: list[PromptLoad] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Consumer: requests that no longer need their producer's blocks. Workers cancel running loads of these requests,
    and send `LeaseDone` to the producer. Does not list a request with the id of a later request in `waiting`: workers
    end its lease when the later one begins."""

    @property
    def is_empty(self) -> bool:
        producing = self.dropped or self.opened or self.offered or self.host_copies
        return not (producing or self.waiting or self.loads or self.ended)


@dataclass(slots=True)
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Message from one rank to the scheduler, once: the rank's address for consumers.

    Args:
        port: port at which the rank listens.
        name: name of the rank, new at each start of its process. Consumers compare this name when they connect.
    """

    port: int
    name: str


class NixlLoadFailure(msgspec.Struct, frozen=True, array_like=True):
    """Failure of a load: the reason for metrics, the detail for logs."""

    reason: str
    detail: str


@dataclass(slots=True)
class NixlStepOutcome(KVConnectorWorkerMetadata):
    """Message from workers to scheduler after a step. `aggregate` keeps every rank's failures and addresses."""

    load_failures: dict[str, tuple[NixlLoadFailure, ...]] = field(default_factory=dict)
    addresses: dict[int, WorkerAddress] = field(default_factory=dict)
    """Address by rank, in the rank's first outcome. Only if the engine does not deliver handshake metadata."""

    @property
    def is_empty(self) -> bool:
        return not (self.load_failures or self.addresses)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> NixlStepOutcome:
        if not isinstance(other, NixlStepOutcome):
            raise TypeError(f"expected NixlStepOutcome, got {type(other).__name__}")
        failures = dict(self.load_failures)
        for request_id, theirs in other.load_failures.items():
            failures[request_id] = failures.get(request_id, ()) + theirs
        return NixlStepOutcome(failures, self.addresses | other.addresses)
