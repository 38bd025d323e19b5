"""Scheduler half of HybridNixlConnector: passes the engine's calls to `Consumer` and `Producer`.

The scheduler half moves no bytes, sends no message to a peer, and never waits. Its decisions go into the step's plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.hosts import AllowedHosts
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import SuspectGroups
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.identity.adapters import Adapters
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import Requests
from hybridkv.connectors.vllm.common.role import Role
from hybridkv.connectors.vllm.nixl.consumer import Consumer
from hybridkv.connectors.vllm.nixl.messages import NixlStepOutcome, NixlStepPlan, WorkerAddress
from hybridkv.connectors.vllm.nixl.params import RankAddress, is_remote_decode, is_remote_prefill
from hybridkv.connectors.vllm.nixl.producer import Producer, ProducerTerms, has_ended_well
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.hashing import ChunkKeys

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class NixlScheduler:
    """Scheduler half: decides which requests to hand over and which to read.

    Args:
        layout: groups of the model, and the number of ranks.
        terms: settings of the producer.
        kv_role: role of the engine: producer, consumer, or both.
        hosts: hosts of producers that a request may name.
        room: admission of concurrent loads.
        metrics: counters of this half.
        began_ns: time of the engine's start, or an earlier time, in nanoseconds since 1970.
    """

    def __init__(
        self,
        layout: CacheLayout,
        terms: ProducerTerms,
        kv_role: Role,
        hosts: AllowedHosts,
        room: LoadRoom,
        metrics: NixlMetrics,
        began_ns: int,
    ) -> None:
        groups = layout.spec.groups
        self._num_ranks = layout.world_size
        self._room = room
        self._metrics = metrics
        self._addresses: dict[int, WorkerAddress] = {}
        self._producer = Producer(groups, terms, metrics) if kv_role.stores else None
        self._consumer = Consumer(groups, terms.withheld_tokens, hosts, room, metrics) if kv_role.loads else None
        keys = ChunkKeys(layout.fingerprint({}), layout.hash_block_tokens)
        self._adapters = Adapters(keys, began_ns)
        self._adapted = Requests(layout, keys, self._adapters)
        """Requests with an adapter; also those that are not handed over, because they may load another adapter. Their
        keys are not used."""
        self._plan = NixlStepPlan()

    def bind_addresses(self, addresses: Mapping[int, WorkerAddress]) -> None:
        """Takes addresses of ranks. The producer hands over no request before the addresses of all ranks are known."""
        self._addresses |= addresses
        if self._producer is not None and len(self._addresses) >= self._num_ranks:
            ranks = [self._addresses[rank] for rank in sorted(self._addresses)]
            self._producer.ranks = tuple(RankAddress(each.port, each.name) for each in ranks)

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Takes the engine's block pool."""
        self._room.pool = pool
        if self._producer is not None:
            self._producer.corrupt_blocks.bind(pool)

    def set_suspect_groups(self, groups: SuspectGroups) -> None:
        """Sets the groups in which the engine may leave corrupt blocks."""
        if self._producer is not None:
            self._producer.corrupt_blocks.suspects = groups

    def track(self, request: Request) -> None:
        """Handles a new request."""
        if request.lora_request is not None:
            self._adapted.track(request)
        if self._producer is not None:
            self._producer.begin(request)
        if self._consumer is not None:
            self._consumer.begin(request, self._plan)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens after `computed_tokens` that a producer holds. None: see `Consumer.matched_tokens`."""
        adapter = self._admitted_adapter(request)
        return self._consumer.matched_tokens(request, computed_tokens, adapter) if self._consumer is not None else 0

    def _admitted_adapter(self, request: Request) -> bytes | None:
        """Digest of the adapter's content just before the request's admission; empty without an adapter; None if the
        content is in doubt, or if the request is not handed over."""
        if request.lora_request is None:
            return b""
        params = request.kv_transfer_params
        if not (is_remote_decode(params) or is_remote_prefill(params)):
            return None
        tracked = self._adapted.track(request)
        tracked.follow_preemptions()
        self._adapted.identify(tracked)
        return tracked.adapter_version.digest if tracked.adapter_version is not None else None

    def _computed_adapter(self, request: Request) -> bytes | None:
        """Digest of the adapter's content with which the engine has computed the request; empty without an adapter;
        None if the content is in doubt, or if the request is not handed over."""
        if request.lora_request is None:
            return b""
        if not (is_remote_decode(request.kv_transfer_params) and has_ended_well(request)):
            return None
        tracked = self._adapted.get(request.request_id)
        if tracked is None or tracked.request is not request or tracked.adapter_version is None:
            return None
        version = tracked.adapter_version
        return version.digest if self._adapters.is_still_valid(version) else None

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Handles the allocation of blocks for the request."""
        if num_external_tokens == 0 and request.num_computed_tokens == 0:
            tracked = self._adapted.get(request.request_id)
            if tracked is not None and tracked.adapter_version is None:
                # vLLM may not have called `matched_tokens` for this request.
                self._admitted_adapter(request)
        if self._producer is not None:
            if request.num_computed_tokens == 0:
                self._producer.corrupt_blocks.unmark_allocated(blocks)
            self._producer.on_allocated(request, self._plan)
        if self._consumer is not None:
            self._consumer.on_allocated(request, blocks, num_external_tokens, self._plan)

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Handles the end of the request; see `Producer.finish`."""
        if self._consumer is not None:
            self._consumer.finish(request, self._plan)
        answer: tuple[bool, dict[str, Any] | None] = (False, None)
        if self._producer is not None:
            answer = self._producer.finish(request, block_ids, self._plan, self._computed_adapter(request))
        tracked = self._adapted.get(request.request_id)
        if tracked is not None and tracked.request is request:
            self._adapted.forget(request.request_id)
        return answer

    def take_plan(self, scheduler_output: SchedulerOutput) -> NixlStepPlan:
        """Takes the plan of this step."""
        plan, self._plan = self._plan, NixlStepPlan()
        preempted = compat.preempted_ids(scheduler_output)
        for request_id in preempted:
            if tracked := self._adapted.get(request_id):
                # The engine may load the adapter again before the request restarts.
                tracked.follow_preemptions()
        if self._producer is not None:
            tables = compat.block_tables(scheduler_output)
            self._producer.corrupt_blocks.follow_step(scheduler_output, tables)
            if self._producer.host_copies is not None:
                self._producer.host_copies.preempted(preempted)
                plan.host_copies = self._producer.host_copies.of_step(scheduler_output.num_scheduled_tokens, tables)
        if self._consumer is not None:
            self._consumer.on_scheduled(scheduler_output.num_scheduled_tokens)
        return plan

    def has_plan(self) -> bool:
        """True if the plan is not empty: then the engine must step to send the plan to the workers."""
        return not self._plan.is_empty

    def on_output(self, output: KVConnectorOutput) -> None:
        """Handles the workers' output after a step."""
        outcome = output.kv_connector_worker_meta
        if isinstance(outcome, NixlStepOutcome) and outcome.addresses:
            self.bind_addresses(outcome.addresses)
        if self._producer is not None:
            self._producer.on_released(output.finished_sending or set())
        if self._consumer is not None:
            failed = set(getattr(output, "failed_recving", None) or ())
            self._consumer.on_loaded(output.finished_recving or set(), failed)

    def record_leases(self) -> None:
        """Records the number of requests with held blocks."""
        if self._producer is not None:
            self._metrics.set_held(self._producer.num_offered)

    def reset(self) -> bool:
        """Ends the loads of waiting requests; see `Consumer.reset`."""
        if self._consumer is not None:
            self._consumer.reset(self._plan)
        return True

    def close(self) -> None:
        """Ends the threads that read the files of adapters. Does not wait."""
        self._adapters.close()
