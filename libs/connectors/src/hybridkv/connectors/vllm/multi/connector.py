"""HybridMultiConnector: implements vLLM's connector interface with several children.

This module and `worker_side.py` forward each method to the children and combine their results. They choose no child:
`selection.py` applies the planner's choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from hybridkv.connectors.checking import require_valid
from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR, MODULES
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.base.connector_base import ConnectorBase
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import (
    groups_with_misfiled_states,
    misfiled_blocks,
    misfiled_warning,
    without_states,
)
from hybridkv.connectors.vllm.common.blocks.uncomputed_blocks import UncomputedBlocks
from hybridkv.connectors.vllm.common.events import AnnouncedBlocks
from hybridkv.connectors.vllm.common.layout import group_specs
from hybridkv.connectors.vllm.common.specs.resumable import warn_other_connectors
from hybridkv.connectors.vllm.common.start_checks import check_start
from hybridkv.connectors.vllm.multi.children import (
    Child,
    build_children,
    require_groups,
    resolve_children,
    resolve_without_engine,
)
from hybridkv.connectors.vllm.multi.messages import MultiKVEvents, MultiMetadata, MultiWorkerMetadata, of_child
from hybridkv.connectors.vllm.multi.selection import LoadSizes, Selector, load_admission, shared_prefill_stops
from hybridkv.connectors.vllm.multi.stats import MultiPromMetrics, MultiStats
from hybridkv.connectors.vllm.multi.worker_side import MultiWorkerSide, SchedulerStoresInFlight

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv.multi")

Finished = tuple[bool, dict[str, Any] | None]


class HybridMultiConnector(MultiWorkerSide, SupportsHMA):
    """Connector that loads each request from its best child, and stores with all children.

    Raises:
        ConfigurationError: the configuration cannot work. The engine does not start.
        ManagerError: a child does not support several KV cache groups, and the model may have several.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_start(vllm_config, role)
        super().__init__(vllm_config, role, kv_cache_config)
        config, classes = resolve_children(vllm_config)
        require_groups(vllm_config, kv_cache_config, classes)
        admission = load_admission(vllm_config, kv_cache_config)
        prefill_stops = shared_prefill_stops(vllm_config, kv_cache_config)
        self._set_children(build_children(classes, role, kv_cache_config, admission, prefill_stops))
        self._scheduler_stores = SchedulerStoresInFlight()
        self._announced_blocks = AnnouncedBlocks()
        groups = group_specs(kv_cache_config)
        self._groups_with_misfiled_states = groups_with_misfiled_states(vllm_config, groups)
        self._inner_checkpoints = compat.inner_checkpoints(vllm_config, kv_cache_config)
        # Children of other projects do not evict uncomputed blocks. Children of hybridkv find none left.
        self._uncomputed_blocks = UncomputedBlocks(len(groups), compat.max_uncomputed_tokens(vllm_config))
        self._clashing: set[str] = set()
        """Names of children with ignored kv_transfer_params, each logged once."""
        self._block_pool: BlockPool | None = None
        self._scheduler: Selector | None = None
        if role == KVConnectorRole.SCHEDULER:
            others = [child.config.name for child in classes if child.config.connector not in MODULES]
            warn_other_connectors(vllm_config, kv_cache_config, others)
            if self._groups_with_misfiled_states and not any(
                isinstance(each, ConnectorBase) for each in self._connectors
            ):
                logger.warning("%s", misfiled_warning("HybridMultiConnector", vllm_config, groups))
            sizes = LoadSizes(kv_cache_config, vllm_config.parallel_config.world_size)
            timeout_s = config.lookup_timeout_s
            self._scheduler = Selector(self._children, timeout_s, sizes, admission, time.monotonic, prefill_stops)
            logger.info(
                "HybridMultiConnector: %s; a lookup waits at most %g s",
                ", ".join(f"{child.name} load_weight {child.config.weight}" for child in self._children),
                config.lookup_timeout_s,
            )

    @property
    def sub_connectors(self) -> list[KVConnectorBase_V1]:
        """The children in the order of configuration."""
        return list(self._connectors)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return all(each.supports_divergent_local_hybrid_hits for each in self._connectors)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(each.requires_kv_delivery for each in self._connectors)

    # Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv_cache_manager = kv_cache_manager
        self._block_pool = kv_cache_manager.block_pool
        self._selector().bind_block_pool(kv_cache_manager.block_pool)
        for each in self._connectors:
            each.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool
        self._selector().bind_block_pool(gpu_block_pool)
        for each in self._connectors:
            each.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        self._uncomputed_blocks.track(request)
        for each in self._connectors:
            each.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._selector().matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        chosen = self._selector().chosen(request)
        if chosen is None:
            return super().get_loaded_kv_cache_group_ids(request)
        return self._connectors[chosen].get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._selector().allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        return self._selector().hit_sources(request, num_external_tokens, self._cache_hit_source)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._uncomputed_blocks.follow_step(scheduler_output, self._block_pool)
        groups, checkpoints = self._groups_with_misfiled_states, self._inner_checkpoints
        misfiled = misfiled_blocks(scheduler_output, groups, checkpoints) if groups or checkpoints else ()
        if misfiled and self._block_pool is not None:
            compat.evict_cached_blocks(self._block_pool, misfiled)
        children = tuple(self._metadata_of(each, scheduler_output, misfiled) for each in self._connectors)
        step_metadata = self._selector().plan_step(scheduler_output)
        return MultiMetadata(
            children,
            self._scheduler_stores.take(),
            step_metadata.step,
            is_measured=step_metadata.is_measured,
            sync_children=step_metadata.sync_children,
        )

    def _metadata_of(
        self, child: KVConnectorBase_V1, scheduler_output: SchedulerOutput, misfiled: Sequence[int]
    ) -> KVConnectorMetadata:
        if not misfiled or isinstance(child, ConnectorBase):
            return child.build_connector_meta(scheduler_output)
        # hybridkv's connectors do not store misfiled states. Other connectors would store them, and load them later.
        with without_states(scheduler_output, misfiled):
            return child.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        metadata = connector_output.kv_connector_worker_meta
        events = connector_output.kv_cache_events
        if isinstance(metadata, MultiWorkerMetadata) and metadata.step is not None:
            self._selector().step_ended(metadata.step, metadata.sync_load_seconds, connector_output)
        loaded_by = self._selector().loads_reported(connector_output)
        for position, each in enumerate(self._connectors):
            # A child gets reports of its own loads only.
            others = {request_id for request_id, child in loaded_by.items() if child != position}
            each.update_connector_output(
                replace(
                    connector_output,
                    finished_recving=(connector_output.finished_recving or set()) - others,
                    failed_recving=(connector_output.failed_recving or set()) - others,
                    kv_connector_worker_meta=metadata.children[position]
                    if isinstance(metadata, MultiWorkerMetadata)
                    else None,
                    kv_cache_events=events.children.get(position) if isinstance(events, MultiKVEvents) else None,
                )
            )

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        return self._finish(request, lambda child: child.connector.request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Finished:
        def finish(child: Child) -> Finished:
            if child.supports_groups:
                return cast(SupportsHMA, child.connector).request_finished_all_groups(request, block_ids)
            (only,) = block_ids
            return child.connector.request_finished(request, only)

        return self._finish(request, finish)

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        accepted = [
            position
            for position, each in enumerate(self._connectors)
            if each.register_finished_partial_tail(request, block_ids, partial_tail_offloads)
        ]
        self._scheduler_stores.tail_accepted(request.request_id, accepted)
        return bool(accepted)

    def _finish(self, request: Request, finish: Callable[[Child], Finished]) -> Finished:
        reading: list[int] = []
        combined: dict[str, Any] | None = None
        for position, child in enumerate(self._children):
            still_reads, parameters = finish(child)
            if still_reads:
                reading.append(position)
            if parameters is not None:
                clash = sorted(parameters.keys() & (combined or {}).keys())
                if not clash:
                    combined = (combined or {}) | parameters
                elif child.name not in self._clashing:
                    self._clashing.add(child.name)
                    logger.error(
                        "HybridMultiConnector: %s and an earlier child both return kv_transfer_params %s; those of %s "
                        "are ignored",
                        child.name,
                        clash,
                        child.name,
                    )
        self._selector().ended(request)
        return self._scheduler_stores.request_ended(request.request_id, reading), combined

    def take_events(self) -> Iterable[Any]:
        own: list[Any] = []
        others: list[Any] = []
        for child in self._children:
            # Other connectors may omit removals, so a table of their blocks would grow without bound.
            (own if child.config.connector == CONNECTOR else others).extend(child.connector.take_events())
        return self._announced_blocks.count_and_filter(own) + others

    def has_pending_block_frees(self) -> bool:
        return any(each.has_pending_block_frees() for each in self._connectors)

    def has_pending_push_work(self) -> bool:
        return any(each.has_pending_push_work() for each in self._connectors)

    def get_finished_count(self) -> int | None:
        counts = {child.name: child.connector.get_finished_count() for child in self._children}
        if None in counts.values() or len(set(counts.values())) == 1:
            return None if None in counts.values() else next(iter(counts.values()))
        raise ConfigurationError(
            f"{ROOT}.connectors",
            "children that wait for the same number of ranks",
            counts,
            "run them in separate engines",
        )

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        for position, each in enumerate(self._connectors):
            if child_metadata := of_child(metadata, position):
                each.set_xfer_handshake_metadata(child_metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for position, each in enumerate(self._connectors):
            if child_metadata := of_child(metadata, position):
                each.set_xfer_handshake_metadata_pp_aware(child_metadata)

    def reset_cache(self) -> bool | None:
        answers = self._call_all("reset_cache")
        return all(answer is not False for answer in answers)

    def _selector(self) -> Selector:
        if self._scheduler is None:
            raise RuntimeError("a scheduler method was called on the worker half of HybridMultiConnector")
        return self._scheduler

    # Both sides.

    def shutdown(self) -> None:
        self._call_all("shutdown")

    def _call_all(self, method: str) -> list[Any]:
        """Calls a method of every child, even if one raises. Then raises the first error."""
        answers, errors = [], []
        for child in self._children:
            try:
                answers.append(getattr(child.connector, method)())
            except Exception as error:
                logger.exception("%s: %s failed", child.name, method)
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return MultiStats.collect(self._scheduler.take_stats() if self._scheduler is not None else None, self._children)

    # Called before the engine is built, and in the API process.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        _, classes = resolve_children(vllm_config)
        wanted = {
            child.config.name: child.connector_class.get_required_kvcache_layout(child.vllm_config) for child in classes
        }
        layouts = {layout for layout in wanted.values() if layout is not None}
        if len(layouts) > 1:
            raise ConfigurationError(
                f"{ROOT}.connectors",
                "children that require the same KV cache layout",
                wanted,
                "run them in separate engines",
            )
        return next(iter(layouts), None)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether every child supports sleep mode."""
        children = resolve_without_engine(kv_transfer_config.kv_connector_extra_config)
        return all(compat.supports_sleep_mode(connector_class, transfer) for connector_class, transfer in children)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Whether a child requires piecewise CUDA graphs. Also checks the configuration, as `ConnectorBase` does."""
        require_valid(cls.__name__, extra_config, compat.transfer_keys())
        answers = []
        for i, (connector_class, transfer) in enumerate(resolve_without_engine(extra_config)):
            try:
                answers.append(connector_class.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config))
            except ConfigurationError as error:
                path = f"{ROOT}.connectors[{i}].{error.path}"
                raise ConfigurationError(path, error.expected, error.got, error.hint) from None
        return any(answers)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return MultiStats.build(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        _, classes = resolve_children(vllm_config)
        return MultiPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, classes)
