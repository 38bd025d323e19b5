"""HybridOffloadConnector: a store in host memory, and in whatever tiers an operator puts below it.

What is loaded and stored is decided in `scheduler.py` with hybridkv.planner; bytes move in `worker.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hybridkv.connectors.config import decode_config
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.copies import devices
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.identity.worker_facts import worker_facts
from hybridkv.connectors.vllm.common.layout import resolve_layout
from hybridkv.connectors.vllm.common.messages import StepPlan
from hybridkv.connectors.vllm.common.specs import cuts
from hybridkv.connectors.vllm.common.specs.resumable import require_resumable
from hybridkv.connectors.vllm.common.store_connector import StoreConnector, WaitingScheduler, end_live, keep_live
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.connectors.vllm.offload.flushing import flush_and_close
from hybridkv.connectors.vllm.offload.opening import Opening, Plan
from hybridkv.connectors.vllm.offload.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.offload.worker import OffloadWorker
from hybridkv.planner import LoadAdmission
from hybridkv.tiers.ram import RamArena

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class HybridOffloadConnector(StoreConnector):
    """Keeps the KV cache of hybrid models beyond the engine's own memory, and restores prefixes from there.

    Raises:
        ConfigurationError: the configuration or the model cannot work; the engine does not start.
    """

    _plan_type = StepPlan

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = config = decode_config(self._kv_transfer_config.kv_connector_extra_config)
        self._require_resumable()
        self._layout = layout = resolve_layout(vllm_config, kv_cache_config, config.chunk_tokens, with_tails=True)
        tiers.require_own_directory(config, vllm_config)
        sizes = tiers.arena_sizes(config, layout)
        self._scheduler: OffloadScheduler | WaitingScheduler | None = None
        self._worker: OffloadWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            admission = self._sibling.admission or LoadAdmission(layout.spec, compat.max_in_flight_tokens(vllm_config))
            self._opening = Opening(
                Plan(vllm_config, config, layout, sizes, admission, self._recorder, self._sibling.steering)
            )
            self._scheduler = WaitingScheduler(self._opening.num_ranks, "HybridOffloadConnector", StepPlan())
            if self._opening.needs_no_worker:
                self._open()
        else:
            device_type = vllm_config.device_config.device_type
            self._device = devices.open_device(device_type, config.copies)
            memory = self._device.arena_memory(sizes.rank_bytes)
            digest_threads = self._device.digest_threads(layout.world_size)
            arena = RamArena(sizes.rank_bytes, sizes.granule_bytes, memory, digest_threads)
            stores, loads = self._device.copy_engines(config.load)
            paths = CopyPaths(stores, loads, config.load_timeout_seconds, tiers.clock)
            self._worker = OffloadWorker(layout, arena, paths, self._recorder)
            if config.slower:
                self._worker.bind_slower_tiers(
                    tiers.media(config, compat.rank(vllm_config), arena), tiers.opened_at_once(config)
                )
        keep_live(self)

    def _require_resumable(self) -> None:
        is_excepted = self._config.without_prefix_caching
        require_resumable(self._vllm_config, self._kv_cache_config, is_excepted=is_excepted)

    def _scheduler_half(self) -> OffloadScheduler | WaitingScheduler | None:
        return self._scheduler

    def _worker_half(self) -> OffloadWorker | None:
        return self._worker

    def _open_store(self, waiting: WaitingScheduler) -> OffloadScheduler:
        self._scheduler = self._opening.open(waiting.facts)
        if compat.publishes_kv_events(self._vllm_config):
            self._scheduler.tell_routers(compat.event_groups(self._kv_cache_config))
        return self._scheduler

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        # Once more: whatever was switched off in this process since the connector was built.
        self._require_resumable()
        cuts.require_divisible(self._vllm_config, self._layout)
        if self._worker is None:
            raise RuntimeError("a worker's method was called on the scheduler's half of HybridOffloadConnector")
        self._worker.register(kv_caches, self._kv_cache_config.num_blocks, self._device)
        if self._worker.has_slower_tiers:
            self._worker.tell(worker_facts(self._vllm_config, self._layout, kv_caches, os.environ))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self._scheduler, OffloadScheduler):
            self._scheduler.on_finished(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if isinstance(self._scheduler, OffloadScheduler) else ()

    def shutdown(self) -> None:
        end_live(self)
        if self._worker is not None:
            other = self._other_half()
            scheduler = other._scheduler if isinstance(other, HybridOffloadConnector) else None
            flush_and_close(scheduler if isinstance(scheduler, OffloadScheduler) else None, self._worker)
        if self._scheduler is not None:
            self._scheduler.close()
