"""HybridOffloadConnector: vLLM's connector interface, forwarded to the half that this process needs.

It only translates. What is loaded and stored is decided in `scheduler.py` with hybridkv.planner; bytes move in
`worker.py`. Every method that vLLM calls and that is not here has the base class's default.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from hybridkv.connectors.config import decode_config
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import compat, cuts, devices, tiers
from hybridkv.connectors.vllm.duties import duties_of
from hybridkv.connectors.vllm.flushing import flush_and_close
from hybridkv.connectors.vllm.identity.worker_facts import worker_facts
from hybridkv.connectors.vllm.layout import resolve_layout
from hybridkv.connectors.vllm.messages import StepOutcome, StepPlan, WorkerFacts
from hybridkv.connectors.vllm.opening import Opening, Plan
from hybridkv.connectors.vllm.rank_work import CopyPaths
from hybridkv.connectors.vllm.resume_facts import require_resumable
from hybridkv.connectors.vllm.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.siblings import current_sibling
from hybridkv.connectors.vllm.stats import OffloadPromMetrics, OffloadStats, Recorder
from hybridkv.connectors.vllm.waiting import WaitingScheduler
from hybridkv.connectors.vllm.worker import OffloadWorker
from hybridkv.planner import LoadAdmission
from hybridkv.tiers.ram import RamArena

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv")

_live: weakref.WeakSet[HybridOffloadConnector] = weakref.WeakSet()
"""Connectors of this process that were not shut down."""


class HybridOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV cache of hybrid models beyond the engine's own memory, and restores prefixes from there.

    Raises:
        ConfigurationError: the configuration or the model cannot work; the engine does not start.
    """

    _cache_hit_source = compat.HOST_HIT

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        compat.require_supported_engine()
        compat.share_log()
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        sibling = current_sibling()
        self._sibling_number = sibling.number
        _refuse_second(self, transfer.engine_id, role)
        self._config = config = decode_config(transfer.kv_connector_extra_config)
        self._require_resumable()
        layout = resolve_layout(vllm_config, kv_cache_config, config.chunk_tokens)
        tiers.require_own_directory(config, vllm_config)
        sizes = tiers.arena_sizes(config, layout)
        self._engine_id = transfer.engine_id
        self._duties = duties_of(transfer)
        self._recorder = Recorder()
        self._scheduler: OffloadScheduler | WaitingScheduler | None = None
        self._worker: OffloadWorker | None = None
        self._layout = layout
        self._has_failed_to_open = False
        if role == KVConnectorRole.SCHEDULER:
            admission = sibling.admission or LoadAdmission(layout.spec, compat.max_in_flight_tokens(vllm_config))
            self._opening = Opening(Plan(vllm_config, config, layout, sizes, admission, self._recorder))
            self._scheduler = WaitingScheduler(self._opening.num_ranks)
            if self._opening.needs_no_worker:
                self._open()
        else:
            self._device_type = devices.require_allowed(vllm_config.device_config.device_type, config.experimental_cuda)
            memory = devices.arena_memory(self._device_type, sizes.rank_bytes)
            arena = RamArena(sizes.rank_bytes, sizes.granule_bytes, memory)
            stores, loads = devices.copy_engines(self._device_type, config.load)
            paths = CopyPaths(stores, loads, config.load_timeout_seconds, tiers.clock)
            self._worker = OffloadWorker(layout, arena, paths, self._recorder)
            if config.slower:
                self._worker.bind_slower_tiers(
                    tiers.media(config, compat.rank(vllm_config), arena, layout), tiers.opened_at_once(config)
                )
        _live.add(self)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what a cache drops is computed again."""
        return False

    @property
    def stores_only(self) -> bool:
        """Whether it never loads, so that a connector above need not ask it."""
        return not self._duties.loads

    def _require_resumable(self) -> None:
        is_excepted = self._config.without_prefix_caching
        require_resumable(self._vllm_config, self._kv_cache_config, is_excepted=is_excepted)

    # Worker side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        # Once more: whatever was switched off in this process since the connector was built.
        self._require_resumable()
        cuts.require_divisible(self._vllm_config, self._layout)
        worker = self._of_worker()
        worker.register(kv_caches, self._kv_cache_config.num_blocks, self._device_type)
        if worker.has_slower_tiers:
            worker.tell(worker_facts(self._vllm_config, self._layout, kv_caches, os.environ))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        facts = self._of_worker().take_facts() if compat.carries_handshakes() else None
        return WorkerFacts(facts) if facts is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._of_worker().start_loads(self._step_plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request runs before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: recurrent layers are never passed here, so all groups are stored after the forward pass."""

    def wait_for_save(self) -> None:
        self._of_worker().start_stores(self._step_plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._of_worker().results()
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        worker = self._of_worker()
        facts = worker.take_facts()
        outcome = worker.outcome()
        if facts is None:
            return outcome
        outcome = outcome or StepOutcome()
        outcome.facts[compat.rank(self._vllm_config)] = facts
        return outcome

    # Scheduler side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """What the workers said at the start. What is not ours, another connector's worker has said.

        Raises:
            ConfigurationError: a tier cannot be opened; the engine does not start.
        """
        waiting = self._scheduler
        if isinstance(waiting, WaitingScheduler):
            waiting.facts |= {rank: each.facts for rank, each in metadata.items() if isinstance(each, WorkerFacts)}
            if waiting.is_complete:
                self._open()

    def _open(self) -> None:
        """The store takes the place of what waited for it."""
        waiting = self._scheduler
        if not isinstance(waiting, WaitingScheduler):
            raise RuntimeError("the store of HybridOffloadConnector is opened once")
        self._scheduler = self._opening.open(waiting.facts)
        if waiting.pool is not None:
            self._scheduler.bind_block_pool(waiting.pool)
        if waiting.must_clear:
            self._scheduler.reset()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._of_scheduler().track(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._of_scheduler().matched_tokens(request, num_computed_tokens)
        # A load always ends in get_transfer_results, also one that is copied at once: only there can it fail safely.
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        # Where a chunk ends inside a block a load fills it in part only, so the engine must zero the rest.
        spec = self._layout.spec
        return tuple(index for index in spec.stored_groups if index not in spec.cut_groups)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._of_scheduler().on_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._of_scheduler().plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        scheduler = self._of_scheduler()
        scheduler.on_output(connector_output)
        if isinstance(scheduler, WaitingScheduler) and scheduler.is_complete and not self._has_failed_to_open:
            self._open_late()

    def _open_late(self) -> None:
        """The engine serves already, and goes on without a store that cannot be opened."""
        try:
            self._open()
        except ConfigurationError:
            self._has_failed_to_open = True
            logger.exception("HybridOffloadConnector: nothing is stored and nothing restored")
        else:
            logger.info(
                "HybridOffloadConnector: opened after the first step, because another connector between it and the "
                "engine carries no handshake; requests that began before are not stored"
            )

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Blocks that are being copied out are pinned in the pool, so the request may give up its own hold.
        return False, None

    def has_pending_block_frees(self) -> bool:
        return self._of_scheduler().holds_freed_blocks()

    def has_pending_push_work(self) -> bool:
        return self._of_scheduler().has_work_in_flight()

    def reset_cache(self) -> bool | None:
        return self._of_scheduler().reset()

    # Both sides.

    def shutdown(self) -> None:
        _live.discard(self)
        if self._worker is not None:
            flush_and_close(self._other_half(), self._worker)
        if self._scheduler is not None:
            self._scheduler.close()

    def _other_half(self) -> OffloadScheduler | None:
        """The scheduler's, where it is in this process and this worker is its only one."""
        for other in _live:
            is_other_half = (other._engine_id, other._sibling_number) == (self._engine_id, self._sibling_number)
            if is_other_half and isinstance(other._scheduler, OffloadScheduler) and self._layout.world_size == 1:
                return other._scheduler
        return None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            self._scheduler.record_tiers()
        return self._recorder.take()

    # In the API process.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return OffloadStats(data=data) if data is not None else OffloadStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        return OffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _step_plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        if not isinstance(plan, StepPlan):
            raise TypeError(f"expected StepPlan, got {type(plan).__name__}")
        return plan

    def _of_scheduler(self) -> OffloadScheduler | WaitingScheduler:
        if self._scheduler is None:
            raise RuntimeError("a scheduler's method was called on the worker's half of HybridOffloadConnector")
        return self._scheduler

    def _of_worker(self) -> OffloadWorker:
        if self._worker is None:
            raise RuntimeError("a worker's method was called on the scheduler's half of HybridOffloadConnector")
        return self._worker


def _refuse_second(connector: HybridOffloadConnector, engine_id: str | None, role: KVConnectorRole) -> None:
    """One to each place of an engine: a second at the same place would store everything twice, and its counts and
    sizes would overwrite the first one's in the metrics. HybridMultiConnector gives each of its children a place."""
    for other in _live:
        if (other._engine_id, other.role, other._sibling_number) == (engine_id, role, connector._sibling_number):
            raise ConfigurationError(
                "kv_connector",
                "one HybridOffloadConnector for each engine",
                f"a second one in engine {engine_id}",
                'name it once among "connectors", or use HybridMultiConnector, which tells several apart',
            )
