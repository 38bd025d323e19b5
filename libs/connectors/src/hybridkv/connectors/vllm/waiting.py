"""The scheduler's half of a connector that stores before its store is open: it finds nothing and stores nothing.

An engine opens the store before it serves, with what its workers say at the start. Where they cannot, as below vLLM's
MultiConnector, it opens after the first step, with which they send it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.messages import StepOutcome

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.hybridkv.scheduler")


class WaitingScheduler:
    """Stands in for a `StoreScheduler` until the workers' facts are there.

    Args:
        num_ranks: how many workers have facts.
        connector: in whose name an operator is told.
        empty_plan: what a step without anything to do is.
    """

    def __init__(self, num_ranks: int, connector: str, empty_plan: KVConnectorMetadata) -> None:
        self.num_ranks = num_ranks
        self._connector = connector
        self._empty_plan = empty_plan
        self.facts: dict[int, dict[str, str]] = {}
        self.pool: BlockPool | None = None
        self.must_clear = False
        """Whether what lies in slower tiers was to be dropped."""
        self._has_warned = False

    @property
    def is_complete(self) -> bool:
        """Whether every worker has said what it knows."""
        return len(self.facts) >= self.num_ranks

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The engine's blocks, for whoever comes next."""
        self.pool = pool

    def track(self, request: Request) -> None:
        """Nothing is remembered of a request; it is seen again when it is asked for."""

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        return 0

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Nothing to load."""

    def plan_step(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._empty_plan

    def holds_freed_blocks(self) -> bool:
        return False

    def has_work_in_flight(self) -> bool:
        return False

    def on_output(self, output: KVConnectorOutput) -> None:
        """Takes the facts that come with a step."""
        outcome = output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            self.facts |= outcome.facts
        if not self.is_complete and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: %d of %d workers have said how they lay out what is stored, so nothing is stored and nothing "
                "restored; report how this engine was started",
                self._connector,
                len(self.facts),
                self.num_ranks,
            )

    def record_tiers(self) -> None:
        """There are none."""

    def reset(self) -> bool:
        self.must_clear = True
        return True

    def close(self) -> None:
        """Nothing is held."""
