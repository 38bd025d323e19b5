"""What travels between the connector's two halves: plans to the workers, outcomes back. Plain values only."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.tiers.stack import MoveOutcome, TierMove

__all__ = [
    "ChunkCopy",
    "CopyTable",
    "Load",
    "LoadFailure",
    "StepOutcome",
    "StepPlan",
    "Store",
    "StoreOutcome",
    "WorkerFacts",
]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Everything one request loads. `refused` says why it must fail without a byte moved."""

    request_id: str
    copies: CopyTable
    refused: str | None = None


class Store(msgspec.Struct, frozen=True, array_like=True):
    """Everything one request stores after this step."""

    store_id: int
    copies: CopyTable


@dataclass(frozen=True, slots=True)
class StepPlan(KVConnectorMetadata):
    """Scheduler to workers, once a step. A worker in the scheduler's process is given the same one, so it is frozen."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    moves: tuple[TierMove, ...] = ()
    """Between the tiers."""
    namespace: bytes = b""
    """Of slower tiers, where there are moves: the scheduler and the workers describe a model's layers differently."""
    is_idle: bool = False
    """Nothing is computed in this step: whoever waits for a load meanwhile holds up nobody."""


@dataclass(slots=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """One rank to the scheduler, once, before the engine serves: what stored bytes depend on and it alone knows."""

    facts: dict[str, str]


class StoreOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How many ranks are done with a store, and why any of them failed."""

    num_ranks: int
    failure: str | None = None
    reason: str | None = None
    """The tier's word for it."""


class LoadFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a load failed, and the chunk that is to blame, if one is."""

    reason: str
    detail: str
    key: bytes | None = None


@dataclass(slots=True)
class StepOutcome(KVConnectorWorkerMetadata):
    """Workers to scheduler: what ended since the last step. Merging over ranks loses nothing."""

    stores: dict[int, StoreOutcome] = field(default_factory=dict)
    load_failures: dict[str, tuple[LoadFailure, ...]] = field(default_factory=dict)
    moves: dict[int, MoveOutcome] = field(default_factory=dict)
    facts: dict[int, dict[str, str]] = field(default_factory=dict)
    """Of each rank, with its first outcome, where `WorkerFacts` has no way."""

    @property
    def is_empty(self) -> bool:
        return not (self.stores or self.load_failures or self.moves or self.facts)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepOutcome:
        if not isinstance(other, StepOutcome):
            raise TypeError(f"expected StepOutcome, got {type(other).__name__}")
        stores = dict(self.stores)
        for store_id, theirs in other.stores.items():
            mine = stores.get(store_id)
            stores[store_id] = (
                StoreOutcome(
                    mine.num_ranks + theirs.num_ranks, mine.failure or theirs.failure, mine.reason or theirs.reason
                )
                if mine
                else theirs
            )
        failures = dict(self.load_failures)
        for request_id, theirs_failed in other.load_failures.items():
            failures[request_id] = failures.get(request_id, ()) + theirs_failed
        moves = dict(self.moves)
        for move_id, moved in other.moves.items():
            moves[move_id] = moves[move_id].merge(moved) if move_id in moves else moved
        return StepOutcome(stores, failures, moves, self.facts | other.facts)
