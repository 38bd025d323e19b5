"""Base class of the connectors that store KV.

Methods of vLLM's interface that neither this module nor `connector_base` defines keep vLLM's default.
`WaitingScheduler` is the scheduler's half until the store is open.
"""

from __future__ import annotations

import logging
import weakref
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.base.connector_base import ConnectorBase
from hybridkv.connectors.vllm.common.messages import StepOutcome, WorkerFacts
from hybridkv.connectors.vllm.common.prefill_stops import current_child
from hybridkv.connectors.vllm.common.role import role_of
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from hybridkv.connectors.vllm.common.copies.rank_worker import LoadResults
    from hybridkv.connectors.vllm.common.layout import CacheLayout

scheduler_logger = logging.getLogger("vllm.hybridkv.scheduler")


class WaitingScheduler:
    """Scheduler's half until the facts of all workers have arrived. Loads nothing and stores nothing.

    Args:
        num_ranks: number of workers that send facts.
        connector: name of the connector, for the log.
        empty_plan: plan of a step without work.
    """

    def __init__(self, num_ranks: int, connector: str, empty_plan: KVConnectorMetadata) -> None:
        self.num_ranks = num_ranks
        self._connector = connector
        self._empty_plan = empty_plan
        self.facts: dict[int, dict[str, str]] = {}
        self.pool: BlockPool | None = None
        self.must_clear = False
        """True after a reset: when the store is open, its tiers must be cleared."""
        self._has_warned = False

    @property
    def is_complete(self) -> bool:
        """Whether the facts of every worker have arrived."""
        return len(self.facts) >= self.num_ranks

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Keeps the engine's block pool for the scheduler's half of the open store."""
        self.pool = pool

    def track(self, request: Request) -> None:
        """Does nothing: the scheduler's half of the open store tracks the request at the engine's next lookup."""

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        return 0

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Does nothing: there is no load."""

    def plan_step(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._empty_plan

    def holds_freed_blocks(self) -> bool:
        return False

    def has_work_in_flight(self) -> bool:
        return False

    def on_output(self, output: KVConnectorOutput) -> None:
        """Takes the facts of workers from a step's output. Warns once if facts are still missing."""
        outcome = output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            self.facts |= outcome.facts
        if not self.is_complete and not self._has_warned:
            self._has_warned = True
            scheduler_logger.warning(
                "%s: %d of %d workers have reported their memory layout, so nothing is stored or loaded; report how "
                "this engine was started",
                self._connector,
                len(self.facts),
                self.num_ranks,
            )

    def record_tiers(self) -> None:
        """Does nothing: there are no tiers yet."""

    def reset(self) -> bool:
        self.must_clear = True
        return True

    def close(self) -> None:
        """Does nothing: no resources are held."""


logger = logging.getLogger("vllm.hybridkv")

_live: weakref.WeakSet[StoreConnector] = weakref.WeakSet()
"""Fully built connectors of this process that are not shut down."""


class StoreScheduler(Protocol):
    """Scheduler's half of a connector that stores. Only `close` waits for I/O without a short bound; other methods wait
    at most for checks of an adapter's files, see `identity.adapters.LOOK_S`."""

    def bind_block_pool(self, pool: BlockPool) -> None: ...

    def track(self, request: Request) -> object: ...

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None: ...

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None: ...

    def plan_step(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata: ...

    def on_output(self, output: KVConnectorOutput) -> None: ...

    def holds_freed_blocks(self) -> bool: ...

    def has_work_in_flight(self) -> bool: ...

    def record_tiers(self) -> None: ...

    def reset(self) -> bool: ...

    def close(self) -> None: ...


class StoreWorker(Protocol):
    """Worker's half of a connector that stores. Its methods raise no errors."""

    def start_loads(self, plan: Any) -> None: ...

    def start_stores(self, plan: Any) -> None: ...

    def results(self) -> LoadResults: ...

    def outcome(self) -> StepOutcome | None: ...

    def take_facts(self) -> dict[str, str] | None: ...

    def suspend(self, timeout_s: float) -> bool: ...

    def resume(self) -> None: ...


SUSPEND_S = 60.0
"""Maximum seconds that an engine waits for copies in flight before it sleeps."""


class StoreConnector(ConnectorBase["StoreScheduler | WaitingScheduler", StoreWorker]):
    """Connector that stores KV. A subclass sets `_layout` and the half of this process.

    Raises:
        ConfigurationError: the engine already has a connector of this class with the same `ChildPlace`.
    """

    _cache_hit_source = compat.HOST_HIT
    _layout: CacheLayout
    _keeps_on_reset = False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._child_place = current_child()
        self._engine_id = transfer.engine_id
        self._refuse_second()
        self._kv_role = role_of(transfer)
        self._metrics = ConnectorMetrics()
        self._has_failed_to_open = False

    def _refuse_second(self) -> None:
        """Refuses a second connector of this class in one engine. Both would store the same chunks, and the second
        would overwrite metrics of the first. Children of one HybridMultiConnector have different places.
        """
        for other in _live:
            if type(other) is type(self) and other.role == self.role and other._is_at(self):
                raise ConfigurationError(
                    "kv_connector",
                    f"one {type(self).__name__} for each engine",
                    f"a second one in engine {self._engine_id}",
                    'name it once among "connectors", or use HybridMultiConnector, which tells several apart',
                )

    def _is_at(self, other: StoreConnector) -> bool:
        return (self._engine_id, self._child_place.number) == (other._engine_id, other._child_place.number)

    def _other_half(self) -> StoreConnector | None:
        """The connector with the other role, if it is in this process and the engine has one worker; else None."""
        for other in _live:
            is_half = type(other) is type(self) and other._is_at(self) and other.role != self.role
            if is_half and self._layout.world_size == 1:
                return other
        return None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: if a store fails, later requests compute the tokens again."""
        return False

    @property
    def stores_only(self) -> bool:
        """Whether the connector never loads, so that a parent connector can skip its lookup."""
        return not self._kv_role.loads

    # The halves.

    @abstractmethod
    def _open_store(self, waiting: WaitingScheduler) -> StoreScheduler:
        """Opens the store and returns the scheduler that replaces `waiting` as `_scheduler`.

        Raises:
            ConfigurationError: the store cannot be opened.
        """

    # Worker side.

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        facts = self._require_worker().take_facts() if compat.delivers_handshakes() else None
        return WorkerFacts(facts) if facts is not None else None

    def unregister_kv_caches(self) -> None:
        """Waits until no copy uses the KV cache; then vLLM unmaps it. Later copies fail. May be called several times.

        Raises:
            RuntimeError: copies are still in flight after `SUSPEND_S`; the KV cache must stay mapped.
        """
        if not self._require_worker().suspend(SUSPEND_S):
            raise RuntimeError(
                f"{type(self).__name__}: copies of the KV cache are still in flight after {SUSPEND_S:.0f} s, so the "
                "engine cannot sleep now; try again"
            )

    def restore_kv_caches(self) -> None:
        """Allows copies again, after vLLM has mapped the KV cache at its old addresses. May be called several times."""
        self._require_worker().resume()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._require_worker().start_loads(self._step_plan())

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: vLLM does not call this for recurrent layers, so `wait_for_save` stores all groups."""

    def wait_for_save(self) -> None:
        self._require_worker().start_stores(self._step_plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._require_worker().results()
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        worker = self._require_worker()
        facts = worker.take_facts()
        outcome = worker.outcome()
        if facts is None:
            return outcome
        outcome = outcome or StepOutcome()
        outcome.facts[compat.rank(self._vllm_config)] = facts
        return outcome

    # Scheduler side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Takes the facts of the workers, and opens the store when all facts have arrived. Ignores metadata of other
        connectors' workers.

        Raises:
            ConfigurationError: the store cannot be opened; the engine does not start.
        """
        waiting = self._scheduler
        if isinstance(waiting, WaitingScheduler):
            waiting.facts |= {rank: each.facts for rank, each in metadata.items() if isinstance(each, WorkerFacts)}
            if waiting.is_complete:
                self._open()

    def _open(self) -> None:
        """Opens the store and replaces the `WaitingScheduler`."""
        waiting = self._scheduler
        if not isinstance(waiting, WaitingScheduler):
            raise RuntimeError(f"the store of {type(self).__name__} is opened once")
        scheduler = self._open_store(waiting)
        if waiting.pool is not None:
            scheduler.bind_block_pool(waiting.pool)
        if waiting.must_clear:
            scheduler.reset()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        # Not groups with blocks that chunks cut: a load may fill only a part of a block, so the engine must zero the
        # rest.
        spec = self._layout.spec
        return tuple(index for index in spec.stored_groups if index not in spec.cut_groups)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._require_scheduler().plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        scheduler = self._require_scheduler()
        scheduler.on_output(connector_output)
        if isinstance(scheduler, WaitingScheduler) and scheduler.is_complete and not self._has_failed_to_open:
            self._open_late()

    def _open_late(self) -> None:
        """Opens the store while the engine already serves. After a failure the engine continues without the store."""
        name = type(self).__name__
        try:
            self._open()
        except ConfigurationError:
            self._has_failed_to_open = True
            logger.exception("%s: nothing is stored or loaded", name)
        else:
            logger.info(
                "%s: opened after the first step, because a parent connector does not forward the handshake; requests "
                "that started before are not stored",
                name,
            )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Blocks with a copy in flight are pinned in the pool, so the request may release its own references.
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self._require_scheduler().holds_freed_blocks()

    def has_pending_push_work(self) -> bool:
        return self._require_scheduler().has_work_in_flight()

    def reset_cache(self) -> bool | None:
        """Drops all stored chunks; with `"on_reset": "keep"` none. vLLM also calls this method before it sleeps."""
        if self._keeps_on_reset:
            logger.info("%s: a reset of vLLM's caches keeps the tiers, as on_reset says", type(self).__name__)
            return True
        return self._require_scheduler().reset()

    # Both sides.

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            self._scheduler.record_tiers()
        return self._metrics.take()


def mark_live(connector: StoreConnector) -> None:
    """Marks a fully built connector as live. From now on, a second connector with the same place is refused."""
    _live.add(connector)


def mark_shut_down(connector: StoreConnector) -> None:
    """Marks a connector as shut down."""
    _live.discard(connector)
