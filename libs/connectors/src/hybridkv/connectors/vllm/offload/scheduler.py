"""Scheduler's half of HybridOffloadConnector: passes the engine's calls to the modules that plan loads and stores.

Moves no bytes. No step waits; only `reset` may wait, for a bounded time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import CorruptBlocks, SuspectGroups
from hybridkv.connectors.vllm.common.blocks.step_loads import StepLoads
from hybridkv.connectors.vllm.common.events import RouterEvents
from hybridkv.connectors.vllm.common.explain import LookupReason, log, unsearched
from hybridkv.connectors.vllm.common.identity.identification import Identity
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.messages import Load, StepOutcome, StepPlan, Store
from hybridkv.connectors.vllm.common.requests import Requests, TrackedRequest
from hybridkv.connectors.vllm.common.role import BOTH, Role
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.checkpoints import Checkpoints
from hybridkv.connectors.vllm.offload.hints import HintReader
from hybridkv.connectors.vllm.offload.loads.load_planner import Deadlines, LoadPlanner
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.connectors.vllm.offload.loads.local_blocks import LocalBlocks
from hybridkv.connectors.vllm.offload.prefetching import Prefetcher
from hybridkv.connectors.vllm.offload.reuse import ReuseMeter
from hybridkv.connectors.vllm.offload.stores.keeping import Keeper
from hybridkv.connectors.vllm.offload.stores.store_planner import StorePlanner
from hybridkv.planner import LoadAdmission, State
from hybridkv.planner.stages import COMPUTE
from hybridkv.tiers.stack import TierStack

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class OffloadScheduler:
    """Plans loads and stores, and applies the results of the workers.

    Args:
        layout: the model's groups.
        identity: identity of the cached content, and the keys of its chunks.
        stack: the tiers of this engine. `close` closes them.
        admission: limits the loads that hold blocks at the same time.
        deadlines: limits on the waits of a request.
        metrics: the connector's metrics.
        kv_role: whether the connector stores, loads, or does both.
    """

    def __init__(
        self,
        layout: CacheLayout,
        identity: Identity,
        stack: TierStack,
        admission: LoadAdmission,
        deadlines: Deadlines,
        metrics: ConnectorMetrics,
        kv_role: Role = BOTH,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._stack = stack
        self._kv_role = kv_role
        self._checkpoints: Checkpoints | None = None
        self._admission = admission
        self._metrics = metrics
        self._hints = HintReader(metrics, deadlines.clock)
        self._requests = Requests(layout, identity.keys, identity.adapters, self._hints.read)
        self._keeper = Keeper(layout, stack, deadlines.clock, metrics)
        self._engine_corruption = CorruptBlocks(layout.spec.groups, metrics)
        self._step_loads = StepLoads(self._requests, layout)
        local = LocalBlocks(layout, kv_role.copies_locally)
        local.is_corrupt = self._engine_corruption.is_corrupt
        self._in_flight = LoadsInFlight(layout, stack, admission, metrics, local)
        self._loads = LoadPlanner(layout, stack, admission, deadlines, metrics, self._in_flight)
        self._stores = StorePlanner(layout, stack, identity.adapters, metrics, self._keeper)
        self._prefetcher = Prefetcher(layout, self._requests, stack, self._loads.lookups.send, deadlines.clock, metrics)
        self._reuse = ReuseMeter(layout, stack, metrics, deadlines.clock)
        self._planned_loads: list[Load] = []
        self._planned_stores: list[Store] = []
        """Stores of requests that have ended since the last `plan_step`."""
        self._namespace_sent = False
        """Whether a plan has carried the namespace to the workers."""
        self._events: RouterEvents | None = None

    def enable_kv_events(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Enables KV events; see `take_events`. `groups`: see `RouterEvents`."""
        self._events = self._stores.events = RouterEvents(self._layout, self._stack, groups, self._metrics)

    def bind_checkpoints(self, checkpoints: Checkpoints) -> None:
        """Sets the planner of prefill stops, for models with recurrent states. Does nothing if the connector does not
        store. Without the planner, only states that the engine hands over by itself are stored."""
        self._checkpoints = checkpoints if self._kv_role.stores else None

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._engine_corruption.bind(pool)
        self._step_loads.bind(pool)
        self._loads.bind_block_pool(pool)
        self._in_flight.bind_block_pool(pool)
        self._stores.bind_block_pool(pool)
        if self._events is not None:
            self._events.bind_block_pool(pool)

    def leave_admission_to_parent(self) -> None:
        """Offers hits without a wait for room. A parent connector admits the loads of all its children. This connector
        still counts the blocks of its loads in the shared admission."""
        self._loads.admits_loads = False

    def set_keep_share(self, keep_share: float) -> None:
        """Sets the share of each tier that prefixes with a keep hint may use."""
        self._keeper.keep_share = keep_share

    def allow_hinted_peers(self, allows: Callable[[tuple[str, int]], bool]) -> None:
        """Sets the hosts and ports that hints may name as peers; by default none."""
        self._hints.allows_peer = allows

    def set_suspect_groups(self, groups: SuspectGroups) -> None:
        """Sets the groups in which the engine may leave corrupt blocks."""
        self._engine_corruption.suspects = groups

    # Called before the engine admits a request.

    def track(self, request: Request) -> TrackedRequest:
        """State of a request; the first call creates it. Later calls reset its progress after a preemption.

        If the connector loads, the first call also begins a prefetch for a request with the hint `prefetch`. For other
        requests that may load, it sends the async lookups, so that answers may arrive while the request is in the
        engine's queue.
        """
        known = self._requests.get(request.request_id)
        tracked = self._requests.track(request)
        if tracked is known:
            tracked.follow_preemptions()
            return tracked
        self._engine_corruption.track(request)
        if self._kv_role.loads:
            if tracked.hints.prefetch:
                self._prefetcher.begin(request, self._keeper.ram_bytes_left)
            elif self._may_look_up(tracked):
                self._loads.lookups.enqueue(tracked)
        return tracked

    def _may_look_up(self, tracked: TrackedRequest) -> bool:
        """Whether to send async lookups: a tier accepts them, the request may load, and this call can find its keys."""
        if not self._stack.lookup_wait_s or not tracked.hints.load or compat.skips_prefix_cache(tracked.request):
            return False
        return self._requests.identify(tracked)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Number of tokens after `computed_tokens` that can be loaded; None if the engine must call again.

        A request that must not load, or has no keys, gets 0, without a lookup, a promotion or a wait. Plans the prefill
        stops of the request, unless the engine must call again.
        """
        tracked = self.track(request)
        is_identified = self._requests.identify(tracked)
        if not self._kv_role.loads or compat.skips_prefix_cache(request):
            self._plan_unsearched(tracked, computed_tokens)
            return 0
        if self._admission.take_deferral(request.request_id):
            return None
        if not is_identified or not tracked.hints.load:
            self._stack.release(tracked.request_id)
            self._plan_unsearched(tracked, computed_tokens)
            tracked.last_reply = COMPUTE
            return 0
        if self._checkpoints is None:
            return self._loads.matched_tokens(tracked, computed_tokens)
        self._checkpoints.begin(request)
        num_tokens = self._loads.matched_tokens(tracked, computed_tokens)
        if num_tokens is not None:
            self._checkpoints.plan_stops(tracked, num_tokens, self._loads.loss(tracked))
        return num_tokens

    def plan_without_lookup(self, request: Request, computed_tokens: int) -> None:
        """Plans the prefill stops of a request without an offer. A parent connector calls it if it did not look up the
        request here, or if the lookup has no answer. The engine holds `computed_tokens`, and this connector loads
        nothing."""
        tracked = self.track(request)
        self._requests.identify(tracked)
        self._plan_unsearched(tracked, computed_tokens)

    def _plan_unsearched(self, tracked: TrackedRequest, computed_tokens: int) -> None:
        """Plans the prefill stops of a request without a lookup, if the request may store."""
        tracked.follow()
        tracked.computed_tokens = computed_tokens
        if self._checkpoints is not None:
            self._checkpoints.begin(tracked.request)
            if self._may_store(tracked):
                self._checkpoints.plan_stops(tracked, 0, self._loads.loss_without_search(tracked))

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plans the load of the request's external tokens into the blocks that the engine has allocated."""
        tracked = self.track(request)
        if request.num_computed_tokens == 0:
            self._engine_corruption.unmark_allocated(blocks)
        # After a load the engine calls again, without external tokens.
        tracked.resumed_tokens = max(request.num_computed_tokens, tracked.computed_tokens + num_external_tokens)
        is_admission = request.num_computed_tokens == 0
        if tracked.last_reply is None and num_external_tokens == 0 and is_admission:
            # There was no lookup, since the request must not load, but it may still store.
            self._requests.identify(tracked)
        if self._checkpoints is not None and is_admission and tracked.request_keys is not None:
            self._checkpoints.on_admitted(tracked, num_external_tokens)
        if tracked.request_keys is None or not tracked.hints.load:
            if tracked.last_reply is not None:
                explanation = unsearched(
                    tracked, LookupReason.ADAPTER if tracked.request_keys is None else LookupReason.HINT
                )
                self._metrics.lookup(explanation)
                log(explanation)
            tracked.last_reply = None
            return
        if self._events is not None:
            self._events.on_admitted(tracked)
        self._reuse.on_admitted(tracked)
        load = self._loads.on_allocated(tracked, blocks, num_external_tokens)
        if load is not None:
            self._planned_loads.append(load)

    # Called once in each step.

    def plan_step(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Plan of one step: its loads and moves, and the stores that follow its forward pass. Drops the progress of
        preempted requests, and forgets ended requests."""
        self._stack.tick()
        measured_step = self._loads.begin_step(scheduler_output.num_scheduled_tokens)
        preempted = compat.preempted_ids(scheduler_output)
        for request_id in preempted:
            if tracked := self._requests.get(request_id):
                tracked.follow_preemptions()
        self._keeper.renew()
        self._prefetcher.advance(self._keeper.ram_bytes_left)
        stores, self._planned_stores = self._planned_stores, []
        stores += self._plan_stores(scheduler_output, set(preempted))
        for request_id in scheduler_output.num_scheduled_tokens:
            self._admission.give_back(request_id)
        for request_id in compat.finished_ids(scheduler_output):
            tracked = self._requests.get(request_id)
            if tracked is not None and not tracked.request.is_finished():
                continue  # a new request has taken the id
            if tracked is not None:
                self._stores.on_request_finished(tracked)
                self._reuse.on_request_finished(tracked)
            self._requests.forget(request_id)
            self._loads.on_request_finished(request_id)
        if self._checkpoints is not None:
            self._checkpoints.advance(scheduler_output)
        loads, self._planned_loads = self._planned_loads, []
        loads = self._in_flight.without_corrupt_blocks(loads, self._engine_corruption.is_corrupt)
        if not compat.loads_after_forward(scheduler_output):
            loads = self._in_flight.without_local_copies(loads)
        return self._with_moves(
            loads, stores, is_idle=not scheduler_output.num_scheduled_tokens, measured_step=measured_step
        )

    def plan_moves(self) -> StepPlan:
        """Plan of a step without requests, for the flush at shutdown: moves, and stores planned at the end of requests.
        Ends all prefetches."""
        self._prefetcher.end()
        self._stack.tick()
        self._stores.drop_unconfirmed()
        stores, self._planned_stores = self._planned_stores, []
        return self._with_moves((), stores)

    def _with_moves(
        self, loads: Iterable[Load], stores: Iterable[Store], *, is_idle: bool = False, measured_step: int = 0
    ) -> StepPlan:
        moves = tuple(self._stack.take_moves())
        is_needed = bool(moves) or not self._namespace_sent
        self._namespace_sent = True
        namespace = self._identity.namespace if is_needed else b""
        return StepPlan(tuple(loads), tuple(stores), moves, namespace, is_idle, measured_step)

    def _plan_stores(self, scheduler_output: SchedulerOutput, preempted: set[str]) -> list[Store]:
        stores: list[Store] = []
        handed_over = compat.boundary_states(scheduler_output)
        tables = compat.block_tables(scheduler_output)
        # Needed even if nothing is stored: no load may copy from a corrupt block.
        self._engine_corruption.follow_step(scheduler_output, tables)
        if not self._kv_role.stores:
            return stores
        self._step_loads.follow_step(scheduler_output, tables)
        for request_id in self._engine_corruption.misled:
            if tracked := self._requests.get(request_id):
                tracked.is_storable = False
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in dict.fromkeys((*scheduled, *handed_over)) if handed_over else scheduled:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            request, num_scheduled = tracked.request, scheduled.get(request_id, 0)
            if (
                request.num_computed_tokens + num_scheduled < tracked.idle_below_tokens
                and request_id not in handed_over
            ):
                # Nothing new to store, as in most steps of most requests.
                continue
            if request.is_finished() or not self._may_store(tracked):
                continue
            if request_id in preempted and request_id not in scheduled:
                # The blocks of a preempted request may belong to another request now.
                continue
            states = self._engine_corruption.correct_states(handed_over.get(request_id, ()), self._metrics)
            store = self._plan_store(tracked, num_scheduled, states, tables)
            if store is not None:
                stores.append(store)
        return stores

    def _may_store(self, tracked: TrackedRequest) -> bool:
        """Whether a request may store. Does not check `kv_role`."""
        return tracked.is_storable and tracked.hints.store and tracked.request_keys is not None

    def _plan_store(
        self, tracked: TrackedRequest, num_scheduled: int, states: list[State], tables: compat.BlockTables
    ) -> Store | None:
        checkpoints = self._checkpoints
        if checkpoints is None:
            return self._stores.plan(tracked, num_scheduled, states, tables)
        states = checkpoints.states(tracked, num_scheduled, tables, states)
        store = self._stores.plan(tracked, num_scheduled, states, tables)
        idle_below = checkpoints.idle_below_tokens(tracked.request.num_computed_tokens)
        tracked.idle_below_tokens = min(tracked.idle_below_tokens, idle_below)
        if states:
            checkpoints.on_planned(tracked, states)
            checkpoints.record_planned_bytes(self._stores.num_planned_bytes)
        return store

    def on_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plans the store of the state at the end of an answer. Called before the engine frees the request's blocks.

        With asynchronous scheduling, this state has no key during the steps of the request. The next plan contains the
        store. The blocks of the state stay pinned until the store has ended.
        """
        if self._checkpoints is None:
            return
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            return
        ended_normally = compat.finished_normally(request) and request.num_computed_tokens < request.num_tokens
        if not ended_normally or not self._may_store(tracked):
            return

        def tables(request_id: str) -> Sequence[Sequence[int]]:
            return block_ids

        if states := self._checkpoints.states(tracked, 0, tables, ()):
            store = self._stores.plan(tracked, 0, states, tables)
            self._checkpoints.on_planned(tracked, states)
            if store is not None:
                self._planned_stores.append(store)

    def holds_freed_blocks(self) -> bool:
        """Whether the end of a store or load will return blocks to the engine's pool."""
        return self._stores.holds_freed_blocks() or self._in_flight.holds_freed_blocks()

    def has_work_in_flight(self) -> bool:
        """Whether the engine must keep stepping without requests."""
        return self.has_stores_in_flight() or self._in_flight.has_work() or self._prefetcher.has_work()

    def has_stores_in_flight(self) -> bool:
        """Whether a store is in flight, or a move between tiers may still end in time or start soon."""
        return self._stores.has_work() or self._stack.has_live_moves()

    # Results of the workers.

    def on_output(self, output: KVConnectorOutput) -> None:
        """Applies the outputs of one step."""
        if output.invalid_block_ids:
            self._step_loads.on_failed(output.invalid_block_ids)
        outcome = output.kv_connector_worker_meta
        measured_step = 0
        if outcome is not None and isinstance(outcome, StepOutcome):
            measured_step = outcome.measured_step
            self.on_outcome(outcome)
        self._loads.prefill_speed.on_output(measured_step)
        for request_id in output.finished_recving or ():
            tracked = self._requests.get(request_id)
            num_tokens = self._in_flight.on_ended(request_id, tracked, request_id in output.failed_recving)
            if tracked is not None:
                self._loads.end_load(tracked, num_tokens)

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Applies the outcomes of stores and moves, and records the failures of loads."""
        self._stores.on_ended(outcome.stores)
        for request_id, failures in outcome.load_failures.items():
            self._in_flight.on_failures(request_id, failures)
        for move_id, moved in outcome.moves.items():
            self._stack.on_move(move_id, moved)

    def record_tiers(self) -> None:
        """Updates the metrics of the tiers, of kept bytes and of reuse. Logs the estimate of reuse if it is due."""
        self._metrics.tiers(self._stack, self._layout.world_size)
        self._keeper.record(self._layout.world_size)
        self._reuse.record()

    def take_events(self) -> list[Any]:
        """KV events since the last call; empty if events are not enabled."""
        return self._events.take() if self._events is not None else []

    # Reset and shutdown.

    def reset(self) -> bool:
        """Withdraws all chunks in all tiers. Copies in flight continue, and their chunks are withdrawn too.

        Requests that have started store nothing more: their content may come from weights that the engine replaces.
        Later content may come from weights that are in no file, so the new keys are unique to this process.
        """
        self._stack.clear()
        if self._checkpoints is not None:
            self._checkpoints.forget()
        self._prefetcher.end()
        self._keeper.forget()
        self._reuse.forget()
        self._requests.begin_anew(self._identity.begin_anew())
        return True

    def close(self) -> None:
        """Logs the estimate of reuse, unpins all blocks in the engine's pool, and closes the tiers."""
        self._reuse.log()
        self._stores.close()
        self._in_flight.close()
        self._stack.close()
        self._identity.adapters.close()
        self._requests.clear()
