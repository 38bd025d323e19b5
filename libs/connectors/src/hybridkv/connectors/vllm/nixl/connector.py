"""HybridNixlConnector: implements vLLM's connector interface.

Each instance has one half of the connector: the scheduler's or the worker's. The instance forwards each call to this
half and decides nothing: `scheduler.py` decides about hand-overs and reads, and `worker.py` moves bytes. Methods of the
interface that are not here keep the base class's default.

`supports_divergent_local_hybrid_hits` stays False. If it were True, the engine would report the attention groups'
longer hit and expect the recurrent groups' state from the peer. The gain would be small: the state is at the end of the
prompt and is read anyway, and the attention groups' longer hit saves a few blocks. There would be two disadvantages. If
a lookup returns 0, the engine goes back to the common hit and loses the longer one. And window groups are sure to be
complete only at the end of the common hit.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.base.connector_base import ConnectorBase
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import suspect_groups
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.layout import CacheLayout, resolve_groups
from hybridkv.connectors.vllm.common.prefill_stops import current_child
from hybridkv.connectors.vllm.common.role import role_of
from hybridkv.connectors.vllm.common.specs.resumable import require_resumable
from hybridkv.connectors.vllm.nixl.config import NixlConfig, decode_config, require_ports
from hybridkv.connectors.vllm.nixl.memory.host_buffer import needs_host_buffer
from hybridkv.connectors.vllm.nixl.messages import NixlStepOutcome, NixlStepPlan, WorkerAddress
from hybridkv.connectors.vllm.nixl.producer import ProducerTerms
from hybridkv.connectors.vllm.nixl.prompts import withheld_tokens
from hybridkv.connectors.vllm.nixl.scheduler import NixlScheduler
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.connectors.vllm.nixl.worker import NixlWorker, WorkerSettings, require_nixl_and_secret
from hybridkv.planner import CacheSpec
from hybridkv.planner.admission import LoadAdmission
from hybridkv.planner.groups import whole_chunk_unit

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv.nixl")


class HybridNixlConnector(ConnectorBase[NixlScheduler, NixlWorker]):
    """Connector that hands a prompt's KV cache from the engine that computed it to the engine that decodes.

    Raises:
        ConfigurationError: the configuration or the model cannot work. The engine does not start.
    """

    _plan_type = NixlStepPlan

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        self._config = decode_config(transfer.kv_connector_extra_config)
        self._kv_role = role_of(transfer)
        self._require_resumable()
        uses_host_buffer = needs_host_buffer(vllm_config)
        self._layout = _layout(vllm_config, kv_cache_config)
        if self._kv_role.stores:
            require_ports(self._config.listen, self._layout.world_size)
        self._metrics = NixlMetrics()
        if role == KVConnectorRole.SCHEDULER:
            terms = _producer_terms(vllm_config, self._config, self._layout, uses_host_buffer)
            room = _room(vllm_config, self._layout)
            hosts = self._config.hosts
            self._scheduler = NixlScheduler(
                self._layout, terms, self._kv_role, hosts, room, self._metrics, time.time_ns()
            )
            self._scheduler.set_suspect_groups(suspect_groups("HybridNixlConnector", vllm_config, self._layout))
            _announce(vllm_config, self._config, terms, self._layout)
        else:
            settings = WorkerSettings(
                self._config,
                str(transfer.engine_id),
                compat.rank(vllm_config),
                self._layout.world_size,
                self._kv_role,
                uses_host_buffer,
            )
            self._worker = NixlWorker(settings, self._layout, self._metrics)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        super().requires_piecewise_for_cudagraph(extra_config)
        require_nixl_and_secret(decode_config(extra_config))
        return False

    def _require_resumable(self) -> None:
        is_excepted = self._config.without_prefix_caching
        require_resumable(self._vllm_config, self._kv_cache_config, is_excepted=is_excepted)

    # Worker side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        # Check again: this process may have switched a feature off after the connector was created.
        self._require_resumable()
        self._require_worker().register(self._vllm_config, self._kv_cache_config, kv_caches, os.environ)

    def unregister_kv_caches(self) -> None:
        """Raises RuntimeError: peers read this memory, and NIXL keeps the memory registered."""
        raise RuntimeError("HybridNixlConnector: the KV cache cannot be unmapped, because peers read it")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._require_worker().take_address() if compat.delivers_handshakes() else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._require_worker().start(self._step_plan())

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: peers read blocks in place after their request has finished."""

    def wait_for_save(self) -> None:
        """Copies blocks to host memory if peers cannot read device memory. Otherwise does nothing."""
        self._require_worker().save(self._step_plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._require_worker().results()
        return KVConnectorTransferResults(
            finished_sending=results.released, finished_recving=results.finished, failed_recving=results.failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        worker = self._require_worker()
        outcome = NixlStepOutcome(worker.take_failures())
        if (address := worker.take_address()) is not None:
            outcome.addresses[compat.rank(self._vllm_config)] = address
        return None if outcome.is_empty else outcome

    # Scheduler side.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Takes the ranks' addresses. Ignores metadata of other connectors."""
        found = {rank: each for rank, each in metadata.items() if isinstance(each, WorkerAddress)}
        self._require_scheduler().bind_addresses(found)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._require_scheduler().bind_block_pool(gpu_block_pool)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._require_scheduler().take_plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._require_scheduler().on_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._require_scheduler().finish(request, block_ids)

    def has_pending_push_work(self) -> bool:
        # The plan may have a message to the producer about a request that was never admitted. Only a step sends the
        # plan, so the engine must step even without requests.
        return self._require_scheduler().has_plan()

    def reset_cache(self) -> bool | None:
        """Ends the hand-overs to waiting requests; these requests are computed."""
        return self._require_scheduler().reset()

    # In the API process.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """False: peers read the KV cache, and NIXL keeps the memory registered until the engine ends."""
        return False

    # Both sides.

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler is not None:
            self._scheduler.record_leases()
        return self._metrics.take()


def _layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheLayout:
    groups = resolve_groups(vllm_config, kv_cache_config)
    return CacheLayout(
        # Whole prompts move, so any common chunk size is good.
        spec=CacheSpec(groups.specs, whole_chunk_unit(groups.specs)),
        layers=groups.layers,
        groups=groups.fingerprints,
        hash_block_tokens=compat.hash_block_tokens(vllm_config, kv_cache_config),
        hash_algorithm=str(vllm_config.cache_config.prefix_caching_hash_algo),
        world_size=vllm_config.parallel_config.world_size,
        inner_checkpoints=compat.inner_checkpoints(vllm_config, kv_cache_config),
    )


def _producer_terms(vllm_config: VllmConfig, config: NixlConfig, layout: CacheLayout, saves: bool) -> ProducerTerms:
    return ProducerTerms(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        host=config.listen.advertised,
        lease_seconds=config.lease_seconds,
        max_leases=config.max_leases,
        withheld_tokens=withheld_tokens(layout.spec.groups, compat.prefill_lookahead_tokens(vllm_config)),
        hash_block_tokens=layout.hash_block_tokens,
        new_nonce=_new_nonce,
        saves=saves,
    )


def _room(vllm_config: VllmConfig, layout: CacheLayout) -> LoadRoom:
    if current_child().admission is not None:
        return LoadRoom(None, time.monotonic)
    return LoadRoom(LoadAdmission(layout.spec, compat.max_in_flight_tokens(vllm_config)), time.monotonic)


def _new_nonce() -> int:
    return secrets.randbits(62) + 1


def _announce(vllm_config: VllmConfig, config: NixlConfig, terms: ProducerTerms, layout: CacheLayout) -> None:
    transfer = vllm_config.kv_transfer_config
    kv_role = role_of(transfer)
    logger.info(
        "HybridNixlConnector: groups %s; kv_role %s: it %s; listens at %s; NIXL transfers use %s; reads are %s; "
        "blocks are held %.3g s for a silent consumer, for at most %d requests; kv_load_failure_policy %s",
        ", ".join(
            f"{i} {group.kind.name} blocks of {group.block_tokens}" for i, group in enumerate(layout.spec.groups)
        ),
        transfer.kv_role,
        " and ".join(word for word, does in (("hands over", kv_role.stores), ("reads", kv_role.loads)) if does),
        f"{config.listen.host}, port {config.listen.port or 'any'}" if kv_role.stores else "nothing",
        "a copy in host memory" if terms.saves else "the engine's memory",
        "verified" if config.verify else "not verified",
        config.lease_seconds,
        config.max_leases,
        getattr(transfer, "kv_load_failure_policy", "unknown"),
    )
