"""Scheduler's half of HybridLMCacheConnector: forwards the engine's calls to the load and the store tracker.

Moves no bytes and never waits: lookups run on another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import CorruptBlocks, SuspectGroups
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.common.blocks.step_loads import StepLoads
from hybridkv.connectors.vllm.common.explain import explain_adapter_in_doubt, log
from hybridkv.connectors.vllm.common.identity.identification import Identity
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import StepOutcome
from hybridkv.connectors.vllm.common.requests import Requests, TrackedRequest
from hybridkv.connectors.vllm.common.role import Role
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.load_tracker import LoadTracker
from hybridkv.connectors.vllm.lmcache.messages import LMCachePlan, PageLoad, PageStore
from hybridkv.connectors.vllm.lmcache.store_tracker import StoreTracker

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """Parts of the scheduler's half.

    Args:
        load_tracker: tracks lookups and loads.
        store_tracker: tracks stores.
        room: admits concurrent loads.
    """

    load_tracker: LoadTracker
    store_tracker: StoreTracker
    room: LoadRoom


class LMCacheScheduler:
    """Scheduler's half: plans loads and stores.

    Args:
        layout: layout of the engine's groups.
        identity: namespace and keys of the stored content.
        payload_bytes: page size of each stored group, in bytes.
        parts: trackers of loads and stores, and the admission of loads.
        kv_role: whether the connector stores, loads, or does both.
        metrics: the connector's metrics.
        close: closes the connection to the server.
    """

    def __init__(
        self,
        layout: CacheLayout,
        identity: Identity,
        payload_bytes: tuple[int, ...],
        parts: SchedulerParts,
        kv_role: Role,
        metrics: ConnectorMetrics,
        close: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._payload_bytes = payload_bytes
        self._load_tracker, self._store_tracker, self._room = (
            parts.load_tracker,
            parts.store_tracker,
            parts.room,
        )
        self._kv_role = kv_role
        self._metrics = metrics
        self._close = close
        self._requests = Requests(layout, identity.keys, identity.adapters)
        self._engine_corruption = CorruptBlocks(layout.spec.groups, metrics)
        self._step_loads = StepLoads(self._requests, layout)
        self._planned_loads: list[PageLoad] = []
        self._has_sent_namespace = False

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._engine_corruption.bind(pool)
        self._step_loads.bind(pool)
        self._room.pool = pool
        self._store_tracker.bind_block_pool(pool)

    def set_suspect_groups(self, groups: SuspectGroups) -> None:
        """Sets the groups in which the engine may leave corrupt blocks."""
        self._engine_corruption.suspects = groups

    # Before a request is admitted.

    def track(self, request: Request) -> TrackedRequest:
        """Returns the state of a request. Starts its lookup on the first call at which the request has keys. If the
        request may not load, releases the locks of the lookup."""
        before = self._requests.get(request.request_id)
        tracked = self._requests.track(request)
        if before is not None and before is not tracked:
            # A new request has the id of a finished one.
            self._load_tracker.on_request_finished(before.request_id)
        if self._kv_role.stores:
            self._engine_corruption.track(request)
        self._follow_preemptions(tracked)
        if tracked.request_keys is not None:
            self._load_tracker.start_lookup(tracked)
            if not self._loads(request):
                # The lookup only shows which chunks need no store, so its locks are not needed.
                self._load_tracker.release_lookup(tracked.request_id)
        return tracked

    def _follow_preemptions(self, tracked: TrackedRequest) -> None:
        if tracked.follow_preemptions():
            self._load_tracker.restart(tracked)

    def _loads(self, request: Request) -> bool:
        """True if the request may load."""
        return self._kv_role.loads and not compat.skips_prefix_cache(request)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Number of tokens beyond `computed_tokens` that can be loaded; None if the engine must call again."""
        tracked = self.track(request)
        if self._has_other_tokens(tracked):
            self._load_tracker.restart(tracked)
        keys = tracked.request_keys
        is_identified = self._requests.identify(tracked)
        if tracked.request_keys is not keys:
            # The lookup was for another version of the adapter.
            self._load_tracker.restart(tracked)
        if not self._loads(request):
            return 0
        if self._room.take_deferral(request.request_id):
            return None
        if not is_identified:
            tracked.computed_tokens = computed_tokens
            explanation = explain_adapter_in_doubt(tracked)
            self._metrics.lookup(explanation)
            log(explanation)
            return 0
        return self._load_tracker.matched_tokens(tracked, computed_tokens)

    @staticmethod
    def _has_other_tokens(tracked: TrackedRequest) -> bool:
        """True if the engine removed tokens of the request."""
        had = tracked.followed[0]
        return tracked.follow() < had

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plans the load of the external tokens into the allocated blocks."""
        tracked = self.track(request)
        if request.num_computed_tokens == 0:
            self._engine_corruption.unmark_allocated(blocks)
        if tracked.request_keys is None and not num_external_tokens and request.num_computed_tokens == 0:
            # vLLM did not call `matched_tokens` for this request, but the request's chunks may be stored.
            self._requests.identify(tracked)
        if tracked.request_keys is None and not num_external_tokens:
            return
        load = self._load_tracker.on_allocated(tracked, blocks, num_external_tokens)
        if load is not None:
            self._planned_loads.append(load)

    # Once per step.

    def plan_step(self, scheduler_output: SchedulerOutput) -> LMCachePlan:
        """Plan of the step: its loads, and the stores after its forward pass."""
        preempted = set(compat.preempted_ids(scheduler_output))
        for request_id in preempted:
            if tracked := self._requests.get(request_id):
                self._follow_preemptions(tracked)
        stores = self._plan_stores(scheduler_output, preempted) if self._kv_role.stores else []
        self._room.release(scheduler_output.num_scheduled_tokens)
        for request_id in compat.finished_ids(scheduler_output):
            tracked = self._requests.get(request_id)
            if tracked is not None and not tracked.request.is_finished():
                continue  # a new request has this id
            self._requests.forget(request_id)
            self._load_tracker.on_request_finished(request_id)
        loads, self._planned_loads = self._planned_loads, []
        releases = self._store_tracker.take_releases()
        is_needed = bool(loads or stores or releases) or not self._has_sent_namespace
        self._has_sent_namespace = True
        if not is_needed:
            return LMCachePlan()
        return LMCachePlan(tuple(loads), tuple(stores), self._identity.namespace, self._payload_bytes, releases)

    def _plan_stores(self, scheduler_output: SchedulerOutput, preempted: set[str]) -> list[PageStore]:
        stores: list[PageStore] = []
        handed_over = compat.boundary_states(scheduler_output)
        tables = compat.block_tables(scheduler_output)
        self._engine_corruption.follow_step(scheduler_output, tables)
        self._step_loads.follow_step(scheduler_output, tables)
        for request_id in self._engine_corruption.misled:
            if tracked := self._requests.get(request_id):
                tracked.is_storable = False
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in dict.fromkeys((*scheduled, *handed_over)):
            tracked = self._requests.get(request_id)
            if (
                tracked is None
                or tracked.request.is_finished()
                or not tracked.is_storable
                or tracked.request_keys is None
            ):
                continue
            if request_id in preempted and request_id not in scheduled:
                # Its blocks may belong to another request.
                continue
            states = self._engine_corruption.correct_states(handed_over.get(request_id, ()), self._metrics)
            store = self._store_tracker.plan(tracked, scheduled.get(request_id, 0), states, tables)
            if store is not None:
                stores.append(store)
        return stores

    def holds_freed_blocks(self) -> bool:
        """True if the end of a store will return blocks to the engine's pool."""
        return self._store_tracker.holds_freed_blocks()

    def has_work_in_flight(self) -> bool:
        """True if the engine must keep stepping without a running request."""
        return self._store_tracker.has_work() or self._load_tracker.has_work()

    # Reports of the workers.

    def on_output(self, output: KVConnectorOutput) -> None:
        """Handles ended stores and loads."""
        if output.invalid_block_ids:
            self._step_loads.on_failed(output.invalid_block_ids)
        outcome = output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            self._store_tracker.on_ended(outcome.stores)
            for request_id, failures in outcome.load_failures.items():
                self._load_tracker.on_failures(request_id, failures)
        for request_id in output.finished_recving or ():
            self._load_tracker.on_ended(request_id, self._requests.get(request_id), request_id in output.failed_recving)

    def record_tiers(self) -> None:
        """Does nothing: metrics are counted where events occur."""

    # Ends.

    def reset(self) -> bool:
        """Replaces the keys, so that this engine finds no chunk that was stored before. Deletes nothing at the server.

        The new keys are unique to this process, because the engine may now have weights that are in no file.
        """
        self._requests.begin_anew(self._identity.begin_anew())
        for tracked in self._requests.all():
            self._load_tracker.restart(tracked)
        return True

    def close(self) -> None:
        """Unpins all blocks, releases all locks at the server, and closes the connection."""
        self._store_tracker.close()
        self._load_tracker.close()
        self._identity.adapters.close()
        self._requests.clear()
        self._close()
