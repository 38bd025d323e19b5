"""State machine of a selector with many requests: in any order of events counts add up and nothing is left over."""

from __future__ import annotations

from typing import Any

from examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from multi_fakes import Bench, FakeStore, new_blocks, new_request, output, scheduled

from hybridkv.metrics import ChildSelection
from hybridkv.planner import AUTO

NUM_CHILDREN = 3
answers = st.sampled_from([None, 0, 16, 32, 64, RuntimeError("no")])


class Life(RuleBasedStateMachine):
    """Model of the engine's requests: waiting, loading, loaded, running."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(*(FakeStore() for _ in range(NUM_CHILDREN)), weights=[1.0, 2.0, AUTO], timeout_s=5.0)
        self.waiting: list[Any] = []
        self.loading: dict[str, tuple[Any, int]] = {}
        self.loaded: list[Any] = []
        self.barred: dict[str, set[int]] = {}
        self.asked: dict[str, list[bool]] = {}
        self.queries = [0] * NUM_CHILDREN
        self.names = 0

    @rule()
    def arrive(self) -> None:
        self.names += 1
        self.waiting.append(new_request(str(self.names)))

    @rule(child=st.integers(0, NUM_CHILDREN - 1), answer=answers, is_async=st.booleans())
    def change(self, child: int, answer: Any, is_async: bool) -> None:
        self.bench.stores[child].tokens = answer
        self.bench.stores[child].is_async = is_async

    @rule(later_s=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, later_s: float) -> None:
        self.bench.clock.now_s += later_s

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), has_room=st.booleans())
    def admit(self, data: st.DataObject, has_room: bool) -> None:
        request = data.draw(st.sampled_from(self.waiting))
        before = [store.asked for store in self.bench.stores]
        num_tokens, is_async = self.bench.selector.matched_tokens(request, 0)
        asked = [store.asked > count for store, count in zip(self.bench.stores, before, strict=True)]
        if any(asked):
            # Children with a failed load of this request are not asked. Without room for the request no child is asked,
            # and earlier answers stay valid.
            barred = self.barred.get(request.request_id, set())
            assert asked == [child not in barred for child in range(NUM_CHILDREN)]
            self.asked[request.request_id] = asked
        if num_tokens is None or not has_room:
            return
        self.waiting.remove(request)
        for child, was_asked in enumerate(self.asked.pop(request.request_id, ())):
            self.queries[child] += was_asked
        self.bench.selector.allocated(request, new_blocks(), num_tokens)
        chosen = self.bench.selector.chosen(request)
        if num_tokens:
            assert chosen is not None and chosen not in self.barred.get(request.request_id, set())
            assert self.bench.stores[chosen].told[-1] == (request.request_id, num_tokens)
        if num_tokens and is_async:
            assert chosen is not None
            self.loading[request.request_id] = (request, chosen)
            return
        step_metadata = self.bench.selector.plan_step(scheduled([request], 100))
        assert step_metadata.sync_children == (frozenset({chosen}) if num_tokens else frozenset())
        self.bench.selector.step_ended(step_metadata.step, dict.fromkeys(step_metadata.sync_children, 0.1), output())
        self.bench.selector.ended(request)

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), has_failed=st.booleans(), is_aborted=st.booleans())
    def end_load(self, data: st.DataObject, has_failed: bool, is_aborted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.loading)))
        request, child = self.loading.pop(name)
        if is_aborted:
            self.bench.selector.ended(request)
        assert self.bench.selector.loads_reported(output({name}, {name} if has_failed else set())) == {name: child}
        if is_aborted:
            return
        if has_failed:
            self.barred.setdefault(name, set()).add(child)
            self.waiting.append(request)
        else:
            self.loaded.append(request)

    @precondition(lambda self: self.loaded)
    @rule()
    def run_the_loaded(self) -> None:
        step_metadata = self.bench.selector.plan_step(scheduled(self.loaded, 1))
        self.bench.selector.step_ended(step_metadata.step, {}, output())
        for request in self.loaded:
            self.bench.selector.ended(request)
        self.loaded.clear()

    def _counts(self) -> list[ChildSelection]:
        return [self.bench.total(child) for child in range(NUM_CHILDREN)]

    @invariant()
    def each_admitted_lookup_has_one_outcome_per_asked_child(self) -> None:
        for counts, queries in zip(self._counts(), self.queries, strict=True):
            outcomes = counts.hits + counts.misses + counts.passed_over + counts.unanswered + counts.errors
            assert counts.queries == outcomes == queries

    @invariant()
    def pending_loads_are_those_that_have_not_ended(self) -> None:
        for child, counts in enumerate(self._counts()):
            assert counts.pending_loads == sum(chosen == child for _, chosen in self.loading.values())

    def teardown(self) -> None:
        for name, (request, _) in list(self.loading.items()):
            self.bench.selector.ended(request)
            self.bench.selector.loads_reported(output({name}))
        for request in [*self.waiting, *self.loaded]:
            self.bench.selector.ended(request)
        assert not self.bench.selector._requests
        assert not self.bench.selector._loads._loads
        room = self.bench.selector._admission.room("", 1, 100, 100)
        assert (room.held_by_others, room.reserved_blocks) == (0, 0)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
