"""HybridLMCacheConnector: stores and loads the engine's prefixes at an existing `lmcache server`.

`scheduler.py` plans loads and stores; `worker.py` moves bytes through shared memory that the server maps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.base.store_connector import (
    StoreConnector,
    WaitingScheduler,
    mark_live,
    mark_shut_down,
)
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.copies import devices
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.identity.worker_facts import worker_facts
from hybridkv.connectors.vllm.common.specs.resumable import require_resumable
from hybridkv.connectors.vllm.lmcache.builder import NAME, LMCacheBuilder, agree_on_layout
from hybridkv.connectors.vllm.lmcache.config import decode_config
from hybridkv.connectors.vllm.lmcache.messages import LMCachePlan
from hybridkv.connectors.vllm.lmcache.scheduler import LMCacheScheduler
from hybridkv.connectors.vllm.lmcache.session_spec import session_spec_of
from hybridkv.connectors.vllm.lmcache.worker import LMCacheWorker
from hybridkv.planner import LoadAdmission

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HybridLMCacheConnector(StoreConnector):
    """vLLM connector that stores the KV cache of hybrid models at a server of LMCache, and loads prefixes from it.

    Raises:
        ConfigurationError: unusable configuration, model or server; the engine does not start.
    """

    _plan_type = LMCachePlan
    _scheduler: LMCacheScheduler | WaitingScheduler | None
    _worker: LMCacheWorker | None
    has_bounded_lookups = True
    """A lookup normally ends within milliseconds. It ends at `lookup_timeout_seconds` at the latest, and at once if the
    server is down."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = config = decode_config(self._kv_transfer_config.kv_connector_extra_config)
        self._keeps_on_reset = config.on_reset == "keep"
        self._require_resumable()
        self._layout = layout = agree_on_layout(vllm_config, kv_cache_config, config)
        if role == KVConnectorRole.SCHEDULER:
            admission = None
            if self._child_place.admission is None:
                admission = LoadAdmission(layout.spec, compat.max_in_flight_tokens(vllm_config))
            room = LoadRoom(admission, time.monotonic)
            self._scheduler_builder = LMCacheBuilder(vllm_config, config, layout, room, self._metrics)
            self._scheduler = WaitingScheduler(layout.world_size, NAME, LMCachePlan())
        else:
            device_type = vllm_config.device_config.device_type
            self._device = devices.open_device(device_type, config.copies)
            stores, loads = self._device.copy_engines("async")
            paths = CopyPaths(stores, loads, config.load_timeout_seconds, time.monotonic)
            self._worker = LMCacheWorker(
                layout, compat.rank(vllm_config), session_spec_of(config, layout), paths, self._metrics
            )
        mark_live(self)

    def _require_resumable(self) -> None:
        is_excepted = self._config.without_prefix_caching
        require_resumable(self._vllm_config, self._kv_cache_config, is_excepted=is_excepted)

    def _open_store(self, waiting: WaitingScheduler) -> LMCacheScheduler:
        self._scheduler = self._scheduler_builder.build(waiting.facts)
        return self._scheduler

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        # Checked again: settings of this process may have changed since the constructor.
        self._require_resumable()
        if self._worker is None:
            raise RuntimeError(f"a worker's method was called on the scheduler's half of {NAME}")
        self._worker.register(kv_caches, self._kv_cache_config.num_blocks, self._device)
        self._worker.set_facts(worker_facts(self._vllm_config, self._layout, kv_caches, os.environ))

    def shutdown(self) -> None:
        mark_shut_down(self)
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
