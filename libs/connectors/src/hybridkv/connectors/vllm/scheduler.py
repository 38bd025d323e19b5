"""The scheduler's half of HybridOffloadConnector: what the engine asks and tells, handed to those who decide.

It moves no bytes, and it never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.duties import BOTH, Duties
from hybridkv.connectors.vllm.explain import log, unidentified
from hybridkv.connectors.vllm.identification import Identity
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.loads import Deadlines, LoadPlanner
from hybridkv.connectors.vllm.messages import Load, StepOutcome, StepPlan, Store
from hybridkv.connectors.vllm.requests import Requests, TrackedRequest
from hybridkv.connectors.vllm.stats import Recorder
from hybridkv.connectors.vllm.stores import StorePlanner
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
    """Decides what is loaded and stored.

    Args:
        layout: the model's groups.
        identity: whose content it is.
        stack: the tiers; this object is their only user.
        admission: which loads may hold blocks at the same time.
        deadlines: how long a request waits.
        recorder: counts what happens.
        duties: whether it stores, loads, or does both.
    """

    def __init__(
        self,
        layout: CacheLayout,
        identity: Identity,
        stack: TierStack,
        admission: LoadAdmission,
        deadlines: Deadlines,
        recorder: Recorder,
        duties: Duties = BOTH,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._stack = stack
        self._duties = duties
        self._admission = admission
        self._recorder = recorder
        self._requests = Requests(layout, identity.keys, identity.adapters)
        self._loads = LoadPlanner(layout, stack, admission, deadlines, recorder)
        self._stores = StorePlanner(layout, stack, identity.adapters, recorder)
        self._planned_loads: list[Load] = []
        self._has_told_namespace = False
        """Since the last step was planned."""

    def bind_block_pool(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._loads.bind_block_pool(pool)
        self._stores.bind_block_pool(pool)

    # What the engine asks before it admits a request.

    def track(self, request: Request) -> TrackedRequest:
        """What is remembered of a request, from when it is first seen."""
        return self._requests.track(request)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded, or None to be asked again.

        What may not be loaded is not searched for, nor promoted, waited for or counted.
        """
        tracked = self.track(request)
        is_identified = self._requests.identify(tracked)
        if not self._duties.loads or compat.reads_no_cache(request):
            return 0
        if not is_identified:
            self._stack.release(tracked.request_id)
            tracked.computed_tokens, tracked.told = computed_tokens, COMPUTE
            return 0
        return self._loads.matched_tokens(tracked, computed_tokens)

    def on_allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The engine has given the request blocks; plan the load of its external tokens into them."""
        tracked = self.track(request)
        if tracked.told is None and num_external_tokens == 0 and request.num_computed_tokens == 0:
            # Nobody asks what can be loaded for a request that may load nothing here, yet it may leave something.
            self._requests.identify(tracked)
        if tracked.kept_keys is None:
            if tracked.told is not None:
                explanation = unidentified(tracked)
                self._recorder.lookup(explanation)
                log(explanation)
            tracked.told = None
            return
        load = self._loads.on_allocated(tracked, blocks, num_external_tokens)
        if load is not None:
            self._planned_loads.append(load)

    # What the engine tells once a step.

    def plan_step(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Takes the step's loads and moves, and plans what becomes storable after its forward pass."""
        self._stack.tick()
        preempted = scheduler_output.preempted_req_ids or ()
        for request_id in preempted:
            if tracked := self._requests.get(request_id):
                tracked.forget_progress()
        stores = self._plan_stores(scheduler_output, set(preempted))
        for request_id in scheduler_output.num_scheduled_tokens:
            self._admission.give_back(request_id)
        for request_id in scheduler_output.finished_req_ids or ():
            tracked = self._requests.get(request_id)
            if tracked is not None and not tracked.request.is_finished():
                continue  # a new request has taken the id
            if tracked is not None:
                self._stores.on_gone(tracked)
            self._requests.forget(request_id)
            self._loads.on_gone(request_id)
        loads, self._planned_loads = self._planned_loads, []
        return self._with_moves(loads, stores)

    def plan_moves(self) -> StepPlan:
        """As `plan_step` at an end, where no request runs any more."""
        self._stack.tick()
        return self._with_moves((), ())

    def _with_moves(self, loads: Iterable[Load], stores: Iterable[Store]) -> StepPlan:
        moves = tuple(self._stack.take_moves())
        is_needed = bool(moves) or not self._has_told_namespace
        self._has_told_namespace = True
        return StepPlan(tuple(loads), tuple(stores), moves, self._identity.namespace if is_needed else b"")

    def _plan_stores(self, scheduler_output: SchedulerOutput, preempted: set[str]) -> list[Store]:
        stores: list[Store] = []
        if not self._duties.stores:
            return stores
        handed_over = compat.boundary_states(scheduler_output)
        tables = compat.block_tables(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in dict.fromkeys((*scheduled, *handed_over)):
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.request.is_finished() or not tracked.is_storable or tracked.kept_keys is None:
                continue
            if request_id in preempted and request_id not in scheduled:
                # Its blocks are somebody else's by now.
                continue
            states = [State(group, block, tokens) for group, block, tokens in handed_over.get(request_id, ())]
            store = self._stores.plan(tracked, scheduled.get(request_id, 0), states, tables)
            if store is not None:
                stores.append(store)
        return stores

    def holds_freed_blocks(self) -> bool:
        """Whether a store that ends will give blocks back to the engine's pool."""
        return self._stores.holds_freed_blocks()

    def has_work_in_flight(self) -> bool:
        """Whether the engine must keep stepping although it has no request to run."""
        return self.has_stores_in_flight() or self._loads.has_work()

    def has_stores_in_flight(self) -> bool:
        """Whether something may still come into a tier; what waits for its way down is a part of it."""
        return self._stores.has_work() or self._stack.has_moves_alive()

    # What the workers report.

    def on_output(self, output: KVConnectorOutput) -> None:
        """Commits or aborts what ended; a failed load is remembered so that its retry asks for less."""
        outcome = output.kv_connector_worker_meta
        if isinstance(outcome, StepOutcome):
            self.on_outcome(outcome)
        for request_id in output.finished_recving or ():
            self._loads.on_ended(request_id, self._requests.get(request_id), request_id in output.failed_recving)

    def on_outcome(self, outcome: StepOutcome) -> None:
        """What the workers did."""
        self._stores.on_ended(outcome.stores)
        for request_id, failures in outcome.load_failures.items():
            self._loads.on_failures(request_id, failures)
        for move_id, moved in outcome.moves.items():
            self._stack.on_move(move_id, moved)

    def record_tiers(self) -> None:
        """Counts what the tiers did since the last call, and what they hold now."""
        self._recorder.tiers(self._stack, self._layout.world_size)

    # Ends.

    def reset(self) -> bool:
        """Drops everything stored. Copies in flight end by themselves and leave nothing behind.

        Requests that have begun store nothing more: their content may be of the weights that the reset was to forget.
        What is stored from now on may be of weights that no file has, so its keys are such as no other process makes.
        """
        self._stack.clear()
        self._requests.begin_anew(self._identity.begin_anew())
        return True

    def close(self) -> None:
        """Gives back what is still pinned in the engine's pool, and closes the tiers."""
        self._stores.close()
        self._stack.close()
        self._identity.adapters.close()
        self._requests.clear()
