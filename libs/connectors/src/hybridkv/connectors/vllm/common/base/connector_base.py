"""Base class of the connectors: forwards vLLM's connector interface to the half in this process.

The scheduler's half plans loads and stores; the worker's half moves the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from hybridkv.connectors.checking import require_valid
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.start_checks import check_start
from hybridkv.connectors.vllm.common.stats import OffloadPromMetrics, OffloadStats

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class SchedulerHalf(Protocol):
    """Methods that the scheduler's halves of all connectors have."""

    def track(self, request: Request) -> object: ...

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None: ...

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None: ...


Scheduler = TypeVar("Scheduler", bound=SchedulerHalf)
Worker = TypeVar("Worker")


class ConnectorBase(KVConnectorBase_V1, SupportsHMA, Generic[Scheduler, Worker]):
    """Connector of vLLM. A subclass sets the half of this process: `_scheduler` or `_worker`.

    Raises:
        ConfigurationError: the engine or the configuration cannot work.
    """

    _plan_type: ClassVar[type[KVConnectorMetadata]]

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        check_start(vllm_config, role)
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None

    # Worker side.

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all loads are asynchronous, so no request runs before its load has ended."""

    # Scheduler side.

    def on_new_request(self, request: Request) -> None:
        self._require_scheduler().track(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._require_scheduler().matched_tokens(request, num_computed_tokens)
        # Always asynchronous, also for a load on the worker's own thread: only then can a load fail without an effect
        # on other requests.
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._require_scheduler().on_allocated(request, blocks, num_external_tokens)

    # In the API process.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether the engine may sleep (vLLM 0.33 and later)."""
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Checks the configuration and returns False. With full CUDA graphs, vLLM calls this before it starts an engine
        process.

        Raises:
            ConfigurationError: the configuration cannot work.
        """
        require_valid(cls.__name__, extra_config, compat.transfer_keys())
        return False

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

    def _step_plan(self) -> KVConnectorMetadata:
        plan = self._get_connector_metadata()
        if not isinstance(plan, self._plan_type):
            raise TypeError(f"expected {self._plan_type.__name__}, got {type(plan).__name__}")
        return plan

    def _require_scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError(f"a scheduler's method was called on the worker's half of {type(self).__name__}")
        return self._scheduler

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"a worker's method was called on the scheduler's half of {type(self).__name__}")
        return self._worker
