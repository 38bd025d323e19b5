"""HybridOffloadConnector: vLLM's connector interface, forwarded to the half that this process needs.

It only translates. What is loaded and stored is decided in `scheduler.py` with hybridkv.planner; bytes move in
`worker.py`. Every method that vLLM calls and that is not here has the base class's default.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from hybridkv.connectors.config import DiskTierConfig, OffloadConfig, decode_config, format_size
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import compat, devices, tiers
from hybridkv.connectors.vllm.admission import LoadAdmission
from hybridkv.connectors.vllm.engine_facts import require_resumable
from hybridkv.connectors.vllm.layout import CacheLayout, resolve_layout
from hybridkv.connectors.vllm.loads import Deadlines
from hybridkv.connectors.vllm.messages import StepPlan
from hybridkv.connectors.vllm.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.siblings import current_place
from hybridkv.connectors.vllm.stats import OffloadPromMetrics, OffloadStats, Recorder
from hybridkv.connectors.vllm.worker import CopyPaths, OffloadWorker
from hybridkv.planner import GroupKind
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
        place = current_place()
        self._place = place.number
        _refuse_second(self, transfer.engine_id, role)
        self._config = config = decode_config(transfer.kv_connector_extra_config)
        self._require_resumable()
        layout = resolve_layout(vllm_config, kv_cache_config, config.chunk_tokens)
        tiers.require_own_directory(config, vllm_config)
        sizes = tiers.arena_sizes(config, layout)
        self._engine_id = transfer.engine_id
        self._recorder = Recorder()
        self._scheduler: OffloadScheduler | None = None
        self._worker: OffloadWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = OffloadScheduler(
                layout,
                tiers.build_stack(config, layout, sizes),
                place.admission or LoadAdmission(layout.spec, compat.max_in_flight_tokens(vllm_config)),
                Deadlines(config.lookup_timeout_seconds, config.load_timeout_seconds, tiers.clock),
                self._recorder,
            )
            _say_what_was_understood(vllm_config, config, layout)
        else:
            self._device_type = devices.require_allowed(vllm_config.device_config.device_type, config.experimental_cuda)
            memory = devices.arena_memory(self._device_type, sizes.rank_bytes)
            arena = RamArena(sizes.rank_bytes, sizes.granule_bytes, memory)
            stores, loads = devices.copy_engines(self._device_type, config.load)
            paths = CopyPaths(stores, loads, config.load_timeout_seconds, tiers.clock)
            rank = compat.rank(vllm_config)
            self._worker = OffloadWorker(layout, arena, paths, self._recorder)
            if config.disk is not None:
                self._worker.bind_slow_tier(partial(tiers.build_mover, config.disk, arena=arena, rank=rank))
        _live.add(self)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what a cache drops is computed again."""
        return False

    def _require_resumable(self) -> None:
        is_excepted = self._config.without_prefix_caching
        require_resumable(self._vllm_config, self._kv_cache_config, is_excepted=is_excepted)

    # Worker side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        # Once more: whatever was switched off in this process since the connector was built.
        self._require_resumable()
        self._of_worker().register(kv_caches, self._kv_cache_config.num_blocks, self._device_type)

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
        return self._of_worker().outcome()

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._of_scheduler().track(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._of_scheduler().matched_tokens(request, num_computed_tokens)
        # A load always ends in get_transfer_results, also one that is copied at once: only there can it fail safely.
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._of_scheduler().on_allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._of_scheduler().plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._of_scheduler().on_output(connector_output)

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
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

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

    def _of_scheduler(self) -> OffloadScheduler:
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
        if (other._engine_id, other.role, other._place) == (engine_id, role, connector._place):
            raise ConfigurationError(
                "kv_connector",
                "one HybridOffloadConnector for each engine",
                f"a second one in engine {engine_id}",
                'name it once among "connectors", or use HybridMultiConnector, which tells several apart',
            )


def _say_what_was_understood(vllm_config: VllmConfig, config: OffloadConfig, layout: CacheLayout) -> None:
    spec = layout.spec
    chunk = spec.chunk_tokens
    per_chunk = sum(layout.largest_chunk_bytes(i) for i in spec.stored_groups) * layout.world_size
    capacity = config.ram.capacity
    logger.info(
        "HybridOffloadConnector: groups %s; chunk %d tokens, %s (%.0f bytes per token); "
        "ram %s holds about %d tokens; %ssmallest prompt that can hit %d tokens; loads %s, given up after %.3g s; "
        "kv_load_failure_policy %s; cache %s",
        ", ".join(f"{i} {group.kind.name} blocks of {group.block_tokens}" for i, group in enumerate(spec.groups)),
        chunk,
        format_size(per_chunk),
        per_chunk / chunk,
        format_size(capacity),
        capacity // per_chunk * chunk,
        _disk_words(config.disk, per_chunk, chunk),
        chunk + 1,
        config.load,
        config.load_timeout_seconds,
        getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", "unknown"),
        layout.keys.fingerprint.digest().hex()[:12],
    )
    if not vllm_config.cache_config.enable_prefix_caching:
        logger.info(
            "HybridOffloadConnector: prefix caching is off, as without_prefix_caching says: the engine keeps nothing "
            "of its own, so every shared prefix is copied in again"
        )
    if any(group.lookahead_tokens for group in spec.groups):
        logger.info("HybridOffloadConnector: drafter groups are stored with the token after each chunk in their key")
    if not layout.reuses_hashes:
        logger.info("HybridOffloadConnector: block hashes change with the process, so tokens are hashed anew")
    scratch = [i for i, group in enumerate(spec.groups) if group.kind is GroupKind.SCRATCH]
    if scratch:
        logger.info("HybridOffloadConnector: groups %s are scratch and are not stored", scratch)


def _disk_words(disk: DiskTierConfig | None, per_chunk: int, chunk: int) -> str:
    if disk is None:
        return ""
    return f"disk {format_size(disk.capacity)} at {disk.path} holds about {disk.capacity // per_chunk * chunk} tokens; "
