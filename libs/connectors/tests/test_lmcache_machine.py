"""Random order of events of engines, servers and ranks: loaded chunks were found and stay locked; nothing leaks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from examples import examples
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lmcache_played import BLOCK, CHUNK, DRAFTER, FULL, STATE, TIMEOUT_S, WINDOW, FakeEngine, new_request

from hybridkv.connectors.vllm.common.messages import LoadFailure, StoreOutcome
from hybridkv.connectors.vllm.common.role import Role
from hybridkv.connectors.vllm.lmcache.load_tracker import LoadStage
from hybridkv.connectors.vllm.lmcache.messages import PageLoad, PageStore
from hybridkv.lmcache.calls import CallAnswer, CallFailureReason
from hybridkv.planner import last_boundary

MODELS: tuple[Any, ...] = ((FULL,), (FULL, WINDOW), (STATE, FULL), (FULL, DRAFTER), (WINDOW, STATE, FULL, DRAFTER))
MAX_REQUESTS = 6
RANKS = 2


@dataclass(slots=True)
class Running:
    """Request as the engine sees it."""

    request: Any
    has_blocks: bool = False
    load: PageLoad | None = None
    offered: tuple[int, int] | None = None
    """Tokens that the engine holds, and tokens that it may load."""
    names: tuple[bytes, ...] = ()
    """Digests of the chunks up to there, at the time of the offer: a reset changes the keys of later lookups."""

    @property
    def name(self) -> str:
        return str(self.request.request_id)


class Machine(RuleBasedStateMachine):
    @initialize(groups=st.sampled_from(MODELS), kv_role=st.sampled_from([Role(), Role(), Role(stores=False)]))
    def begin(self, groups: Any, kv_role: Role) -> None:
        self.engine = FakeEngine(groups, kv_role, world_size=RANKS, max_chunks=3)
        self.requests: dict[str, Running] = {}
        self.dying: dict[str, Running] = {}
        """Finished requests that are still loading."""
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.stores: dict[int, tuple[PageStore, int]] = {}
        self.number = 0

    def draw_request(self, data: st.DataObject, wanted: Any) -> Running:
        return data.draw(st.sampled_from([each for each in self.requests.values() if wanted(each)]))

    def any_request(self, wanted: Any) -> bool:
        return any(wanted(each) for each in self.requests.values())

    # What users do.

    @precondition(lambda self: len(self.requests) < MAX_REQUESTS)
    @rule(
        name=st.sampled_from("abcdefgh"),
        prompt=st.integers(0, 1),
        length=st.integers(1, 5 * CHUNK),
        skips_prefix_cache=st.booleans(),
    )
    def add(self, name: str, prompt: int, length: int, skips_prefix_cache: bool) -> None:
        if name in self.requests or name in self.dying:
            return
        params = {"prompt_logprobs": 1} if skips_prefix_cache else {}
        request = new_request(name, [prompt, *range(length)], **params)
        self.requests[name] = Running(request)
        self.engine.half.track(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        running = self.draw_request(data, lambda each: True)
        del self.requests[running.name]
        running.request.status = running.request.status.FINISHED_ABORTED
        self.finished.append(running.name)
        if running.load is not None:
            self.dying[running.name] = running
        else:
            self.engine.free(running.request)

    # What the engine does.

    @precondition(lambda self: self.any_request(lambda each: not each.has_blocks))
    @rule(
        data=st.data(),
        blocks=st.integers(0, 8),
        answers=st.booleans(),
        outcome=st.sampled_from(["given", "given", "none", "other", "less"]),
    )
    def ask(self, data: st.DataObject, blocks: int, answers: bool, outcome: str) -> None:
        engine, running = self.engine, self.draw_request(data, lambda each: not each.has_blocks)
        request = running.request
        computed = min(blocks * BLOCK, (request.num_tokens - 1) // BLOCK * BLOCK)
        offered = engine.half.matched_tokens(request, computed)
        if offered is None and answers:
            while engine.server.asked:
                engine.server.answer(3)
            offered = engine.half.matched_tokens(request, computed)
        if offered is None:
            return
        assert not (offered and request.skip_reading_prefix_cache)
        if offered:
            end = computed + offered
            assert end % CHUNK == 0 and end <= last_boundary(engine.layout.spec, request.num_tokens)
        if outcome == "none":
            return
        if outcome == "other":
            engine.half.on_allocated(request, engine.new_blocks(request, 0), 0)
            offered = 0
        elif outcome == "less" and offered > BLOCK:
            offered -= BLOCK
            engine.half.on_allocated(request, engine.new_blocks(request, computed + offered), offered)
        else:
            engine.half.on_allocated(request, engine.new_blocks(request, computed + offered), offered)
        running.has_blocks = True
        if not offered:
            request.num_computed_tokens = computed
            return
        request.num_computed_tokens = computed + offered
        running.load = PageLoad(running.name, (), -1, ())
        running.offered = computed, offered
        running.names = tuple(engine.load_tracker.digests(engine.half.track(request), (computed + offered) // CHUNK))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        engine = self.engine
        scheduled = {}
        for running in self.requests.values():
            if running.has_blocks and running.load is None and data.draw(st.booleans()):
                left = running.request.num_tokens - running.request.num_computed_tokens
                scheduled[running.name] = data.draw(st.integers(1, max(1, left)))
        for name, count in scheduled.items():
            request = self.requests[name].request
            engine.grow(request, request.num_computed_tokens + count)
        states = {}
        for name, count in scheduled.items():
            request = self.requests[name].request
            end = request.num_computed_tokens + count
            if end % CHUNK == 0:
                states[name] = engine.states(request, end)
        plan = engine.step(scheduled, preempted=self.preempted, finished=self.finished, states=states)
        self.finished, self.preempted = [], []
        for load in plan.loads:
            self.check(load)
        for store in plan.stores:
            assert engine.half._kv_role.stores
            self.stores[store.store_id] = store, RANKS
            pinned = [block for copy in store.copies for block in copy.block_ids]
            assert all(engine.pool.blocks[block].ref_cnt > 1 for block in pinned)
        for name, count in scheduled.items():
            request = self.requests[name].request
            request.num_computed_tokens += count
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids(7)

    def check(self, load: PageLoad) -> None:
        running = self.requests.get(load.request_id) or self.dying[load.request_id]
        assert running.load is not None and running.offered is not None
        running.load = load
        computed, offered = running.offered
        if load.refused is not None:
            assert not load.copies and (computed + offered) % CHUNK
            return
        assert len(load.digests) * CHUNK == computed + offered
        tracker = self.engine.load_tracker
        assert tuple(load.digests) == running.names
        assert len({block for copy in load.copies for block in copy.block_ids} & {0}) == 0
        prefix = tracker._loads[load.request_id].prefix
        assert prefix is not None
        held = self.engine.server.locked.values()
        answer = prefix.lookup.ended
        assert isinstance(answer, CallAnswer)
        assert any(found is answer.value for found in held), "the lock of a loading prefix is held"

    @precondition(lambda self: self.any_request(lambda each: each.has_blocks and each.load is None))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = self.draw_request(data, lambda each: each.has_blocks and each.load is None)
        self.again(running)
        running.request.num_preemptions += 1
        self.preempted.append(running.name)

    def again(self, running: Running) -> None:
        self.engine.free(running.request)
        running.has_blocks, running.load, running.offered = False, None, None
        running.request.num_computed_tokens = 0

    # What the ranks do.

    @precondition(lambda self: any(load.start_chunk >= 0 for load in self.loads()))
    @rule(data=st.data(), failure=st.sampled_from([None, None, "checksum", "timeout"]))
    def end_load(self, data: st.DataObject, failure: str | None) -> None:
        load = data.draw(st.sampled_from([load for load in self.loads() if load.start_chunk >= 0]))
        if load.refused is not None:
            failure = "timeout"
        name = load.request_id
        if failure is None:
            self.engine.tell(loaded=[name])
        else:
            key = data.draw(st.sampled_from(load.digests)) if failure == "checksum" else None
            self.engine.tell(failures={name: [LoadFailure(failure, "", key)]})
        dying = self.dying.pop(name, None)
        if dying is not None:
            self.engine.free(dying.request)
            return
        running = self.requests[name]
        if failure is not None:
            self.again(running)
        running.load = None

    def loads(self) -> list[PageLoad]:
        every = (*self.requests.values(), *self.dying.values())
        return [each.load for each in every if each.load is not None]

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), ranks=st.integers(1, RANKS), failure=st.sampled_from([None, None, None, "io"]))
    def end_store(self, data: st.DataObject, ranks: int, failure: str | None) -> None:
        number = data.draw(st.sampled_from(sorted(self.stores)))
        store, left = self.stores.pop(number)
        ranks = min(left, ranks)
        self.engine.tell({number: StoreOutcome(ranks, failure, failure)})
        if left > ranks:
            self.stores[number] = store, left - ranks

    # What the server does.

    @precondition(lambda self: self.engine.server.asked)
    @rule(data=st.data(), num_chunks=st.integers(0, 4))
    def answer(self, data: st.DataObject, num_chunks: int) -> None:
        server = self.engine.server
        server.answer(num_chunks, data.draw(st.integers(0, len(server.asked) - 1)))

    @precondition(lambda self: self.engine.server.asked)
    @rule(
        data=st.data(),
        reason=st.sampled_from([CallFailureReason.LOST, CallFailureReason.TIMEOUT, CallFailureReason.BUSY]),
    )
    def fail(self, data: st.DataObject, reason: CallFailureReason) -> None:
        server = self.engine.server
        server.fail(reason, data.draw(st.integers(0, len(server.asked) - 1)))

    @rule()
    def wait(self) -> None:
        self.engine.now_s += TIMEOUT_S

    @rule()
    def reset(self) -> None:
        assert self.engine.half.reset()

    # What always holds.

    @invariant()
    def every_lock_belongs_to_a_waiting_request_or_a_load(self) -> None:
        if not hasattr(self, "engine"):
            return
        tracker = self.engine.load_tracker
        for name, running in self.requests.items():
            state = tracker._requests.get(name)
            if running.has_blocks and running.load is None and state is not None:
                assert state.stage is not LoadStage.FOUND
        kept = [state.prefix for state in tracker._requests.values() if state.prefix is not None]
        kept += [load.prefix for load in tracker._loads.values() if load.prefix is not None]
        answers = [each.lookup.ended for each in kept if not each.lookup.is_dropped]
        needed = {id(answer.value) for answer in answers if isinstance(answer, CallAnswer)}
        assert {id(found) for found in self.engine.server.locked.values()} <= needed

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for running in list(self.requests.values()):
            running.request.status = running.request.status.FINISHED_ABORTED
            self.finished.append(running.name)
            if running.load is None:
                engine.free(running.request)
            else:
                self.dying[running.name] = running
        self.requests.clear()
        plan = engine.step(finished=self.finished)
        for load in plan.loads:
            self.check(load)
        while engine.server.asked:
            engine.server.answer(2)
        engine.tell({number: StoreOutcome(left) for number, (_, left) in self.stores.items()}, loaded=list(self.dying))
        for running in self.dying.values():
            engine.free(running.request)
        engine.step()
        assert not engine.server.locked
        assert not engine.half.has_work_in_flight() and not engine.half.holds_freed_blocks()
        assert not engine.load_tracker._requests and not engine.half._requests.all()
        assert engine.num_pinned == 0
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
        assert engine.room_is_idle


Machine.TestCase.settings = settings(
    phases=(Phase.explicit, Phase.generate),  # shrinking takes minutes, and failures are short
    max_examples=int(os.environ.get("MACHINE_EXAMPLES", examples(100))),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMachine = Machine.TestCase
