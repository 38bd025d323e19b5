"""Selection between children, driven like the engine does: which child loads, which is waited for, and the counts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from multi_fakes import BLOCK_BYTES, Bench, FakeStore, new_blocks, new_request, output, scheduled

from hybridkv.connectors.vllm.common.stats import GAUGE_RESEND_INTERVAL
from hybridkv.planner import AUTO
from hybridkv.planner.admission import MAX_GATE_S


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Messages that the selector logged."""
    handler = _Said()
    logger = logging.getLogger("vllm.hybridkv.multi")
    logger.addHandler(handler)
    yield handler.texts
    logger.removeHandler(handler)


def test_only_the_chosen_child_gets_the_tokens() -> None:
    bench = Bench(FakeStore(32), FakeStore(64), FakeStore(48))
    assert bench.admit(new_request()) == 1
    assert [store.told for store in bench.stores] == [[("r", 0)], [("r", 64)], [("r", 0)]]


@pytest.mark.parametrize(("weights", "chosen"), [([1.0, 1.0], 1), ([3.0, 1.0], 0), ([2.0, 1.0], 0)])
def test_weights_choose_the_child_and_ties_go_to_the_first(weights: list[float], chosen: int) -> None:
    assert Bench(FakeStore(32), FakeStore(64), weights=list(weights)).admit(new_request()) == chosen


@pytest.mark.parametrize("place", range(3))
def test_an_undecided_child_does_not_delay_the_others(place: int) -> None:
    stores = [FakeStore(32), FakeStore(32), FakeStore(32)]
    stores[place].tokens = None
    bench = Bench(*stores)
    assert bench.admit(new_request()) == (1 if place == 0 else 0)
    assert bench.total(place).unanswered == 1 and bench.total(place).timeouts == 0


def test_a_child_with_bounded_lookups_is_waited_for_up_to_the_timeout() -> None:
    stores = [FakeStore(tokens=64), FakeStore(tokens=None)]
    stores[1].has_bounded_lookups = True  # type: ignore[attr-defined]
    bench, request = Bench(*stores), new_request("r", 1000)
    assert bench.ask(request) is None
    stores[1].tokens = 128
    assert bench.admit(request) == 1
    stores[1].tokens = None
    late = new_request("late", 1000)
    assert bench.ask(late) is None
    bench.clock.now_s += 1.0
    assert bench.admit(late) == 0
    assert bench.total(1).deferrals == 2 and bench.total(1).timeouts == 1


def test_a_child_that_can_have_no_more_tokens_is_not_waited_for() -> None:
    stores = [FakeStore(tokens=63), FakeStore(tokens=None)]
    stores[1].has_bounded_lookups = True  # type: ignore[attr-defined]
    bench = Bench(*stores)
    assert bench.admit(new_request("r", 64)) == 0


@pytest.mark.parametrize("place", range(2))
def test_a_child_that_stalls_delays_a_request_up_to_the_timeout(place: int) -> None:
    stores = [FakeStore(OSError("away")), FakeStore(OSError("away"))]
    stores[place].tokens = None
    bench = Bench(*stores, timeout_s=2.0)
    request = new_request()
    assert bench.ask(request) is None
    bench.clock.now_s += 1.9
    assert bench.ask(request) is None
    bench.clock.now_s += 0.1
    assert bench.admit(request) is None
    counts = bench.total(place)
    assert (counts.deferrals, counts.timeouts, counts.unanswered, counts.queries) == (2, 1, 1, 1)
    # The engine may ask once more before it has room: still no wait.
    assert bench.total(1 - place).errors == 1


@pytest.mark.parametrize("place", range(2))
def test_a_child_that_stalls_does_not_delay_after_a_miss_of_another(place: int) -> None:
    stores = [FakeStore(0), FakeStore(0)]
    stores[place].tokens = None
    bench = Bench(*stores)
    assert bench.ask(new_request()) == 0
    bench.clock.now_s += 5.0
    bench.admit(new_request())
    counts = bench.total(place)
    assert (counts.deferrals, counts.timeouts, counts.unanswered, counts.queries) == (0, 0, 1, 1), "it did not wait"
    assert bench.total(1 - place).misses == 1


def test_a_waiting_request_goes_on_at_the_first_answer() -> None:
    slow, slower = FakeStore(None), FakeStore(None)
    bench = Bench(slow, slower)
    request = new_request()
    assert bench.ask(request) is None
    slow.tokens = 0
    assert bench.admit(request) is None
    assert (bench.total(0).deferrals, bench.total(0).misses) == (1, 1)
    assert (bench.total(1).deferrals, bench.total(1).unanswered, bench.total(1).timeouts) == (1, 1, 0)


def test_children_that_failed_the_request_or_only_store_are_not_waited_for() -> None:
    stores = FakeStore(64), FakeStore(0), FakeStore(None, stores_only=True)
    bench = Bench(*stores)
    request = new_request()
    assert bench.admit(request) == 0
    bench.end_load(request, has_failed=True)
    assert bench.ask(request) is None, "a failed load defers one lookup"
    stores[1].tokens = None
    assert bench.ask(request) is None
    bench.clock.now_s += 1.0
    assert bench.admit(request) is None
    assert bench.total(1).timeouts == 1


def test_a_child_that_only_stores_is_not_asked_but_gets_allocations() -> None:
    bench = Bench(FakeStore(64, stores_only=True), FakeStore(32))
    assert bench.admit(new_request()) == 1
    assert bench.stores[0].asked == 0 and bench.stores[0].told == [("r", 0)]
    assert bench.total(0).queries == 0 and bench.total(1).queries == 1


@pytest.mark.parametrize("answer", [64, 0, None])
def test_a_request_that_reads_no_cache_asks_no_child(answer: int | None) -> None:
    bench = Bench(FakeStore(answer), FakeStore(32))
    request = new_request()
    request.skip_reading_prefix_cache = True
    assert bench.admit(request) is None
    assert [store.asked for store in bench.stores] == [0, 0]
    assert [store.told for store in bench.stores] == [[("r", 0)], [("r", 0)]]
    assert bench.selector.take_stats() is None or all(bench.total(place).queries == 0 for place in (0, 1))


def test_a_child_that_is_not_looked_up_plans_its_stops() -> None:
    """It may store the request."""
    bench = Bench(FakeStore(64), FakeStore(0), FakeStore(stores_only=True))
    request, skipping = new_request(), new_request("skipping")
    skipping.skip_reading_prefix_cache = True
    assert bench.admit(request) == 0
    assert [store.planned for store in bench.stores] == [[], [], ["r"]]
    bench.end_load(request, has_failed=True)
    assert bench.ask(request) is None, "a failed load defers one lookup"
    bench.admit(request)
    bench.ask(skipping)
    assert [store.planned for store in bench.stores] == [["r", "skipping"], ["skipping"], ["r", "r", "skipping"]]


def test_a_child_that_waits_plans_no_stops() -> None:
    bench = Bench(FakeStore(None), FakeStore(stores_only=True))
    assert bench.ask(new_request()) is None
    assert bench.stores[1].planned == []


def test_a_request_that_is_refused_room_has_stops() -> None:
    bench = Bench(FakeStore(64))
    waiting, other = new_request("waiting"), new_request("other")
    assert bench.admit(waiting) == 0
    bench.end_load(waiting, has_failed=True)
    assert bench.ask(waiting) is None, "a failed load defers one lookup"
    bench.selector._admission.take("other", other.num_tokens)
    assert bench.ask(waiting) is None
    bench.clock.now_s += MAX_GATE_S
    assert bench.ask(waiting) == 0 and bench.stores[0].planned == ["waiting"]


@pytest.mark.parametrize("tokens", [64, 0])
@pytest.mark.parametrize("answer", [None, OSError("away")], ids=["unanswered", "raised"])
def test_a_child_without_an_answer_plans_its_stops(answer: Exception | None, tokens: int) -> None:
    """It may store the request, and its lookup planned none."""
    bench = Bench(FakeStore(tokens), FakeStore(answer))
    assert bench.admit(new_request()) == (0 if tokens else None)
    assert [store.planned for store in bench.stores] == [[], ["r"]]


def test_a_child_that_fails_to_plan_stops_costs_only_its_own(said: list[str]) -> None:
    stores = FakeStore(stores_only=True, planning_error=OSError("away")), FakeStore(64), FakeStore(stores_only=True)
    bench = Bench(*stores)
    assert bench.admit(new_request()) == 1
    assert said == ["request r: s0 failed to plan its prefill stops"]
    assert stores[2].planned == ["r"]


def test_after_its_timeout_a_request_does_not_wait_again() -> None:
    bench = Bench(FakeStore(None))
    request = new_request()
    assert bench.ask(request) is None
    bench.clock.now_s += 1.0
    assert [bench.ask(request) for _ in range(3)] == [0, 0, 0]
    bench.admit(request)
    assert bench.ask(request) is None, "after a restart it may wait again"


def test_a_timeout_of_zero_waits_for_no_child() -> None:
    assert Bench(FakeStore(None), timeout_s=0.0).ask(new_request()) == 0


def test_the_last_answer_of_a_child_counts() -> None:
    first, second = FakeStore(None), FakeStore(None)
    bench = Bench(first, second)
    request = new_request()
    assert bench.ask(request) is None
    first.tokens, second.tokens = 32, 64
    assert bench.ask(request) == 64
    first.tokens, second.tokens = 32, None
    assert bench.ask(request) == 32
    second.tokens = 0
    assert bench.admit(request) == 0
    assert (bench.total(0).queries, bench.total(0).hit_tokens, bench.total(1).misses) == (1, 32, 1)


def test_a_child_that_raises_counts_as_a_miss_and_is_logged_once(said: list[str]) -> None:
    bench = Bench(FakeStore(RuntimeError("out of order")), FakeStore(32))
    for name in "abc":
        assert bench.admit(new_request(name)) == 1
    assert bench.total(0).errors == 3
    assert len(said) == 1 and "s0" in said[0] and "out of order" in said[0]


def test_if_all_children_raise_the_request_is_computed() -> None:
    assert Bench(FakeStore(ValueError()), FakeStore(KeyError())).ask(new_request()) == 0


def test_a_failed_load_bars_its_child_only_for_that_request() -> None:
    bench = Bench(FakeStore(64), FakeStore(32))
    request, other = new_request("a"), new_request("b")
    assert bench.admit(request) == 0
    bench.end_load(request, has_failed=True)
    assert bench.ask(request) is None
    assert bench.admit(request) == 1
    counts = bench.total(0)
    assert (counts.failures, counts.queries, counts.errors) == (1, 1, 0), "it was asked only before its load failed"
    assert bench.total(1).queries == 2
    bench.end_load(request)
    bench.selector.plan_step(scheduled([request], 1))
    assert bench.admit(other) == 0


def test_after_a_failed_load_one_lookup_is_deferred_and_barred_children_are_not_asked() -> None:
    bench = Bench(FakeStore(64))
    request = new_request()
    bench.admit(request)
    bench.end_load(request, has_failed=True)
    assert [bench.ask(request) for _ in range(3)] == [None, 0, 0], "requests with blocks are scheduled first"
    assert bench.stores[0].asked == 1


def test_a_request_with_a_failed_load_waits_for_requests_with_blocks() -> None:
    bench = Bench(FakeStore(64), FakeStore(64))
    failed, holding = new_request("a"), new_request("b")
    bench.admit(failed)
    bench.admit(holding)
    bench.end_load(failed, has_failed=True)
    assert [bench.ask(failed) for _ in range(2)] == [None, None]
    bench.end_load(holding)
    assert bench.ask(failed) is None, "loaded, but not scheduled yet"
    bench.selector.plan_step(scheduled([holding], 1))
    assert bench.ask(failed) == 64


@pytest.mark.parametrize("is_async", [True, False])
def test_an_offer_ends_the_wait_for_room(is_async: bool) -> None:
    """The engine had no room for the offered load. Short waits behind several failed loads do not add up."""
    bench, request = Bench(FakeStore(64)), new_request()
    pool = SimpleNamespace(num_gpu_blocks=1001, get_num_free_blocks=lambda: 1000)
    bench.selector.bind_block_pool(pool)  # type: ignore[arg-type]
    admission = bench.selector._admission
    admission.fail("first", request.num_tokens)
    assert bench.ask(request) is None
    admission.give_back("first")
    bench.clock.now_s += 1.0
    bench.stores[0].is_async = is_async
    assert bench.ask(request) == 64
    bench.stores[0].is_async = True
    bench.clock.now_s += MAX_GATE_S
    admission.fail("second", request.num_tokens)
    assert bench.ask(request) is None
    bench.clock.now_s += MAX_GATE_S
    assert bench.ask(request) == 0


def test_the_wait_after_a_failed_load_is_bounded() -> None:
    bench = Bench(FakeStore(64), FakeStore(64))
    failed, stuck = new_request("a"), new_request("b")
    bench.admit(failed)
    bench.admit(stuck)
    bench.end_load(failed, has_failed=True)
    assert [bench.ask(failed) for _ in range(2)] == [None, None]
    bench.clock.now_s += MAX_GATE_S
    assert bench.ask(failed) == 0


def test_invalid_blocks_bar_the_child_of_their_request() -> None:
    bench = Bench(FakeStore(64), FakeStore(64))
    hurt, fine = new_request("a"), new_request("b")
    for request, first_id in ((hurt, 1), (fine, 100)):
        assert bench.ask(request) == 64
        bench.selector.allocated(request, new_blocks(first_id), 64)
    bench.selector.loads_reported(output(invalid={3}))
    bench.selector.loads_reported(output({"a", "b"}))
    assert bench.total(0).failures == 1
    bench.selector.plan_step(scheduled([fine], 1))
    assert bench.ask(hurt) is None
    assert bench.admit(hurt) == 1


@pytest.mark.parametrize("num_front_ends", range(1, 13))
def test_each_of_several_front_ends_gets_constant_pending_loads(num_front_ends: int) -> None:
    bench = Bench(FakeStore(64), FakeStore(0))
    bench.admit(new_request())
    updated = {}
    for step in range(num_front_ends * GAUGE_RESEND_INTERVAL):
        if (stats := bench.selector.take_stats()) is not None:
            updated[step % num_front_ends] = stats.children["s0"].pending_loads
    assert updated == dict.fromkeys(range(num_front_ends), 1)


def test_a_load_within_a_step_ends_with_it_and_takes_the_workers_time() -> None:
    bench = Bench(FakeStore(64, is_async=False), FakeStore(0))
    request = new_request()
    bench.admit(request)
    step_metadata = bench.selector.plan_step(scheduled([request], 96))
    assert (step_metadata.sync_children, step_metadata.is_measured) == (frozenset({0}), True)
    assert bench.total(0).pending_loads == 1
    bench.selector.step_ended(step_metadata.step, {0: 0.25}, output())
    counts = bench.total(0)
    assert (counts.load_seconds, counts.load_bytes, counts.pending_loads) == (0.25, 4 * BLOCK_BYTES, 0)


def test_loads_of_a_child_within_one_step_share_its_seconds() -> None:
    bench = Bench(FakeStore(1000, is_async=False), weights=[AUTO])
    learn_prefill(bench, 0.001)
    requests = [new_request(name, 2000) for name in "abc"]
    for request in requests:
        bench.admit(request)
    step_metadata = bench.selector.plan_step(scheduled(requests, 1000))
    bench.selector.step_ended(step_metadata.step, {0: 1.5}, output())
    assert bench.total(0).load_seconds == 1.5
    assert bench.ask(new_request("d", 2000)) == 1000, "a token takes half of its prefill"


def test_a_load_within_a_step_with_invalid_blocks_has_failed() -> None:
    bench = Bench(FakeStore(64, is_async=False), FakeStore(32))
    request = new_request()
    bench.admit(request)
    step_metadata = bench.selector.plan_step(scheduled([request], 96))
    bench.selector.step_ended(step_metadata.step, {}, output(invalid={1}))
    assert bench.total(0).failures == 1
    assert bench.admit(request) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_may_load_again_before_the_end_of_its_step(is_async: bool) -> None:
    """As after vLLM's reset of the prefix cache, which preempts requests of a step that still runs."""
    bench = Bench(FakeStore(64, is_async=False))
    request = new_request()
    bench.admit(request)
    first = bench.selector.plan_step(scheduled([request], 96))
    bench.stores[0].is_async = is_async
    bench.admit(request)
    second = bench.selector.plan_step(scheduled([] if is_async else [request], 96))
    bench.selector.step_ended(first.step, {0: 0.25}, output())
    bench.end_load(request)
    bench.selector.step_ended(second.step, {0: 0.25}, output())
    assert bench.total(0).pending_loads == 0


def test_loads_are_counted_with_their_seconds_and_bytes() -> None:
    bench = Bench(FakeStore(40))
    request = new_request()
    bench.admit(request)
    assert bench.total(0).pending_loads == 1
    bench.end_load(request, took_s=0.5)
    counts = bench.total(0)
    # 40 tokens are in three blocks of 16.
    assert (counts.load_seconds, counts.load_bytes, counts.pending_loads) == (0.5, 3 * BLOCK_BYTES, 0)


def test_an_aborted_request_is_followed_until_its_load_ends() -> None:
    bench = Bench(FakeStore(64))
    request = new_request()
    bench.admit(request)
    bench.selector.ended(request)
    assert bench.total(0).pending_loads == 1
    bench.end_load(request)
    assert bench.total(0).pending_loads == 0
    assert not bench.selector._requests


def learn_prefill(bench: Bench, seconds_per_token: float) -> None:
    request = new_request("teacher")
    step_metadata = bench.selector.plan_step(scheduled([request], 1000))
    bench.clock.now_s += 1000 * seconds_per_token
    bench.selector.step_ended(step_metadata.step, {}, output())


def test_an_automatic_weight_is_measured_and_a_slow_hit_is_passed_over() -> None:
    bench = Bench(FakeStore(1000), weights=[AUTO])
    learn_prefill(bench, 0.001)
    first = new_request("a", 2000)
    assert bench.admit(first) == 0
    bench.end_load(first, took_s=5.0)
    bench.selector.plan_step(scheduled([first], 1))
    assert bench.admit(new_request("b", 2000)) is None
    assert bench.total(0).passed_over == 1


def test_the_faster_child_is_preferred_once_both_are_measured() -> None:
    bench = Bench(FakeStore(1000), FakeStore(900), weights=[AUTO, AUTO])
    learn_prefill(bench, 0.001)
    slow, fast = new_request("a", 2000), new_request("b", 2000)
    assert bench.admit(slow) == 0
    bench.end_load(slow, took_s=0.8)
    bench.stores[0].tokens = 0
    assert bench.admit(fast) == 1
    bench.end_load(fast, took_s=0.09)
    bench.stores[0].tokens = 1000
    assert bench.admit(new_request("c", 2000)) == 1


def test_a_slow_child_is_tried_again_after_a_while() -> None:
    bench = Bench(FakeStore(1000), weights=[AUTO])
    learn_prefill(bench, 0.001)
    first = new_request("a", 2000)
    bench.admit(first)
    bench.end_load(first, took_s=5.0)
    assert bench.ask(new_request("b", 2000)) == 0
    bench.clock.now_s += 121.0
    learn_prefill(bench, 0.001)
    assert bench.ask(new_request("c", 2000)) == 1000


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"host": 64}, {"host": 64}),
        ({"host": 40, "disk": 24}, {"host": 40, "disk": 24}),
        ({"host": -10, "disk": 64}, {"disk": 64}),
        ({"host": -10, "disk": 40}, {"disk": 40, "unspecified": 24}),
        ({"host": 80}, {"host": 64}),
        ({}, {"unspecified": 64}),
    ],
)
def test_hit_sources_sum_to_the_tokens_and_none_is_negative(said: dict[str, int], shown: dict[str, int]) -> None:
    bench = Bench(FakeStore(64, sources=said))
    request = new_request()
    bench.admit(request)
    assert bench.selector.hit_sources(request, 64, "unspecified") == shown
    assert bench.total(0).clamped_tokens == sum(-tokens for tokens in said.values() if tokens < 0)


def test_negative_sources_are_logged_once_per_interval(said: list[str]) -> None:
    bench = Bench(FakeStore(64, sources={"host": -7}))
    for number, later_s in enumerate((0.0, 1.0, 1.0, 60.0)):
        bench.clock.now_s += later_s
        request = new_request(str(number))
        bench.admit(request)
        bench.selector.hit_sources(request, 64, "unspecified")
    first, second = said
    assert "s0 (host) counted -7," in first
    assert "3 counts" in second and "-21 together" in second
    assert bench.total(0).clamped_tokens == 28


@pytest.mark.parametrize("answers", list(itertools.product([None, 0, 16, 32, RuntimeError()], repeat=2)))
def test_each_admitted_lookup_of_a_child_has_one_outcome(answers: tuple[object, object]) -> None:
    bench = Bench(*(FakeStore(answer) for answer in answers), timeout_s=0.0)
    bench.admit(new_request())
    for place in (0, 1):
        counts = bench.total(place)
        outcomes = (counts.hits, counts.misses, counts.passed_over, counts.unanswered, counts.errors)
        assert (counts.queries, sum(outcomes)) == (1, 1)
