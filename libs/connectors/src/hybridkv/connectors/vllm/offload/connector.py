"""HybridOffloadConnector: KV cache offload to host memory and to the configured secondary tiers.

`scheduler.py` plans loads and stores with hybridkv.planner; `worker.py` moves bytes.

If both halves are in one process, this module flushes stores and moves at shutdown. In several processes, neither half
can reach the other, and vLLM ends its workers before its scheduler. There the scheduler's half keeps the engine
stepping while work is in flight (`has_work_in_flight`), and vLLM's own shutdown waits for that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from hybridkv.connectors.config import decode_config
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.base.store_connector import (
    StoreConnector,
    WaitingScheduler,
    mark_live,
    mark_shut_down,
)
from hybridkv.connectors.vllm.common.copies import devices
from hybridkv.connectors.vllm.common.copies.rank_worker import CopyPaths
from hybridkv.connectors.vllm.common.identity.worker_facts import worker_facts
from hybridkv.connectors.vllm.common.messages import StepPlan
from hybridkv.connectors.vllm.common.specs import cuts
from hybridkv.connectors.vllm.common.specs.resumable import require_resumable
from hybridkv.connectors.vllm.offload import tiers
from hybridkv.connectors.vllm.offload.builder import OffloadBuilder, check_settings
from hybridkv.connectors.vllm.offload.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.offload.worker import DRAIN_S, OffloadWorker
from hybridkv.planner import LoadAdmission
from hybridkv.tiers.ram import RamArena

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


FLUSH_POLL_S = 0.0005
"""Pause after a step of the flush without an outcome."""
CLOSE_RESERVE_S = 2.0
"""Part of `DRAIN_S` that is reserved for moves in flight at the end of the flush."""


class HybridOffloadConnector(StoreConnector):
    """vLLM connector that offloads the KV cache of hybrid models, and restores prefixes from the tiers.

    Raises:
        ConfigurationError: the configuration or the model is not supported; the engine does not start.
    """

    _plan_type = StepPlan
    _scheduler: OffloadScheduler | WaitingScheduler | None
    _worker: OffloadWorker | None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = check_settings(vllm_config, kv_cache_config)
        config, layout, sizes = settings
        self._config, self._layout = config, layout
        self._keeps_on_reset = config.on_reset == "keep"
        if role == KVConnectorRole.SCHEDULER:
            admission = self._child_place.admission or LoadAdmission(
                layout.spec, compat.max_in_flight_tokens(vllm_config)
            )
            self._scheduler_builder = OffloadBuilder(
                vllm_config, settings, admission, self._metrics, self._child_place.prefill_stops
            )
            self._scheduler = WaitingScheduler(layout.world_size, "HybridOffloadConnector", StepPlan())
            if not config.secondary:
                self._open()
        else:
            device_type = vllm_config.device_config.device_type
            self._device = devices.open_device(device_type, config.copies)
            memory = self._device.arena_memory(sizes.rank_bytes)
            digest_threads = self._device.digest_threads(layout.world_size)
            arena = RamArena(sizes.rank_bytes, sizes.granule_bytes, memory, digest_threads)
            stores, loads = self._device.copy_engines(config.load)
            paths = CopyPaths(stores, loads, config.load_timeout_seconds, tiers.clock)
            self._worker = OffloadWorker(layout, arena, paths, self._metrics, config.verify_ram)
            if config.secondary:
                self._worker.bind_secondary_tiers(
                    tiers.medium_openers(config, compat.rank(vllm_config), arena), tiers.tiers_opened_at_start(config)
                )
        mark_live(self)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        super().requires_piecewise_for_cudagraph(extra_config)
        tiers.require_host(decode_config(extra_config))
        return False

    def _open_store(self, waiting: WaitingScheduler) -> OffloadScheduler:
        self._scheduler = self._scheduler_builder.build(waiting.facts)
        if self._child_place.admission is not None:
            self._scheduler.leave_admission_to_parent()
        if compat.publishes_kv_events(self._vllm_config):
            self._scheduler.enable_kv_events(compat.event_groups(self._kv_cache_config))
        return self._scheduler

    def plan_without_lookup(self, request: Request, computed_tokens: int) -> None:
        """Plans the prefill stops of a request without an offer. A parent connector calls it if it did not look up the
        request here, or if the lookup has no answer. The engine holds `computed_tokens`. Does nothing until the store
        is open."""
        if isinstance(self._scheduler, OffloadScheduler):
            self._scheduler.plan_without_lookup(request, computed_tokens)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        # Checked again, since features may have been switched off in this process after the connector was built.
        is_excepted = self._config.without_prefix_caching
        require_resumable(self._vllm_config, self._kv_cache_config, is_excepted=is_excepted)
        cuts.require_divisible(self._vllm_config, self._layout)
        if self._worker is None:
            raise RuntimeError("a worker's method was called on the scheduler side of HybridOffloadConnector")
        self._worker.register(kv_caches, self._kv_cache_config.num_blocks, self._device)
        if self._worker.has_secondary_tiers:
            self._worker.set_facts(worker_facts(self._vllm_config, self._layout, kv_caches, os.environ))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self._scheduler, OffloadScheduler):
            self._scheduler.on_finished(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events() if isinstance(self._scheduler, OffloadScheduler) else ()

    def shutdown(self) -> None:
        mark_shut_down(self)
        if self._worker is not None:
            other = self._other_half()
            scheduler = other._scheduler if isinstance(other, HybridOffloadConnector) else None
            flush_and_close(scheduler if isinstance(scheduler, OffloadScheduler) else None, self._worker)
        if self._scheduler is not None:
            self._scheduler.close()


def flush_and_close(
    scheduler: OffloadScheduler | None, worker: OffloadWorker, clock: Callable[[], float] = time.monotonic
) -> None:
    """Flushes, then closes the worker, within `DRAIN_S`. The worker is closed even if the flush raises.

    Args:
        scheduler: scheduler's half; None if it is in another process: then nothing is flushed.
        worker: worker's half.
        clock: time in seconds.
    """
    if scheduler is None:
        worker.close(DRAIN_S)
        return
    left_s = 0.0
    try:
        left_s = flush(scheduler, worker, DRAIN_S - CLOSE_RESERVE_S, clock)
    finally:
        worker.close(CLOSE_RESERVE_S + left_s)


def flush(
    scheduler: OffloadScheduler, worker: OffloadWorker, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> float:
    """Runs steps without requests until no store or move is in flight or waiting, or until the timeout.

    At least one step runs, since moves that waited in an idle engine may be able to start.

    Returns:
        Unused seconds of `timeout_s`.
    """
    ends_s = clock() + timeout_s
    is_left = True
    while is_left and clock() < ends_s:
        plan = scheduler.plan_moves()
        worker.start_stores(plan)
        worker.start_moves(plan)
        worker.results()
        outcome = worker.outcome()
        if outcome is None:
            time.sleep(FLUSH_POLL_S)
        else:
            scheduler.on_outcome(outcome)
        is_left = scheduler.has_stores_in_flight()
    return max(ends_s - clock(), 0.0)
