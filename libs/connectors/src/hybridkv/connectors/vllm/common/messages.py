"""Messages between the two halves of a connector: plans to the workers, outcomes back. Plain values only."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hybridkv.connectors.vllm.common.copies.table import CopyTable
from hybridkv.tiers.stack import MoveOutcome, TierMove


class Load(msgspec.Struct, frozen=True, array_like=True):
    """All copies of one request's load. If `refused` is set, the load copies nothing and fails for this reason."""

    request_id: str
    copies: CopyTable
    refused: str | None = None


class Store(msgspec.Struct, frozen=True, array_like=True):
    """All copies of one request's store after this step."""

    store_id: int
    copies: CopyTable


@dataclass(frozen=True, slots=True)
class StepPlan(KVConnectorMetadata):
    """Plan of one step, from the scheduler to the workers. Frozen, because a worker in the same process gets the same
    object."""

    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    moves: tuple[TierMove, ...] = ()
    """Moves between tiers."""
    namespace: bytes = b""
    """Namespace of the secondary tiers, in the first plan and in plans with moves. A worker cannot compute it, because
    workers and the scheduler describe the model's layers differently."""
    is_idle: bool = False
    """True if the step computes nothing. Then a wait for a load delays no other request."""
    measured_step: int = 0
    """Number of this step if the scheduler measures its duration, to learn the prefill speed; else 0. The workers
    return it in `StepOutcome.measured_step`."""


@dataclass(slots=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """Facts that only this rank has, and on which its stored bytes depend. Sent once, before the engine serves."""

    facts: dict[str, str]


class StoreOutcome(msgspec.Struct, frozen=True, array_like=True):
    """End of a store on some ranks."""

    num_ranks: int
    """Number of ranks on which the store has ended."""
    failure: str | None = None
    """Description of a failure on one of these ranks; None without a failure."""
    reason: str | None = None
    """One-word reason of a failure, for the metrics."""


class LoadFailure(msgspec.Struct, frozen=True, array_like=True):
    """Failure of a load: reason, description, and key of the chunk that caused the failure, if known."""

    reason: str
    detail: str
    key: bytes | None = None


@dataclass(slots=True)
class StepOutcome(KVConnectorWorkerMetadata):
    """Loads, stores and moves that ended since the last step, from the workers to the scheduler. A merge over ranks
    keeps all failures of a load, but only one failure of a store or a move."""

    stores: dict[int, StoreOutcome] = field(default_factory=dict)
    load_failures: dict[str, tuple[LoadFailure, ...]] = field(default_factory=dict)
    moves: dict[int, MoveOutcome] = field(default_factory=dict)
    facts: dict[int, dict[str, str]] = field(default_factory=dict)
    """Facts of each rank, sent with its first outcome if `WorkerFacts` cannot be delivered."""
    measured_step: int = 0
    """`StepPlan.measured_step` of the step that ended."""

    @property
    def is_empty(self) -> bool:
        return not (self.stores or self.load_failures or self.moves or self.facts or self.measured_step)

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
        measured_step = max(self.measured_step, other.measured_step)
        return StepOutcome(stores, failures, moves, self.facts | other.facts, measured_step)
