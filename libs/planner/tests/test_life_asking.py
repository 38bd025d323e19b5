"""Lookups that a tier answers later are always sent, and a request waits for them only while the wait is expected to
save time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hybridkv.planner import Hit, Miss, Pending, life
from hybridkv.planner.stages import (
    NEW_REQUEST,
    Bounds,
    Compute,
    Facts,
    LookupWait,
    Offer,
    Past,
    Promote,
    RetryLater,
    Search,
    Searched,
    Stage,
    StartLookups,
)

BOUNDS = Bounds(lookup_s=10.0, load_s=30.0, boundary_tokens=1000)
MISS = Miss(None, "nothing")
TIMEOUT_S = 2.0
WAIT = LookupWait(timeout_s=TIMEOUT_S, answer_s=TIMEOUT_S, read_s=0.0, saved_s_per_token=0.001)


def facts(now_s: float = 0.0, num_tokens: int = 10_000, lookup: LookupWait | None = WAIT) -> Facts:
    return Facts(num_tokens, 0, round(now_s * 1000), now_s, has_secondary=True, lookup=lookup)


def searched(
    stage: Stage, now: Facts, answer: Hit | Pending | Miss, settled: Hit | Pending | Miss | None = None
) -> tuple[Stage, object]:
    stage, action = life.resume(stage, now, BOUNDS)
    assert isinstance(action, Search)
    return life.searched(stage, now, BOUNDS, action, answer, settled)


def looked_up(possible: int, settled: int | None, num_tokens: int = 10_000) -> tuple[Stage, object]:
    """A request that sent lookups, and its next action when `possible` tokens may be found."""
    stage, action = searched(NEW_REQUEST, facts(num_tokens=num_tokens), MISS)
    assert isinstance(action, StartLookups)
    stage, again = life.lookups_started(stage, facts(num_tokens=num_tokens), BOUNDS, action)
    assert isinstance(again, Search)
    found = MISS if settled is None else Hit(settled)
    return life.searched(stage, facts(num_tokens=num_tokens), BOUNDS, again, Pending(possible), found)


def test_a_short_prompt_sends_lookups_and_does_not_wait() -> None:
    _, step = looked_up(2000, None, 2001)
    assert isinstance(step, Compute), "two seconds of computing equal two of waiting"
    _, step = looked_up(2001, None, 2002)
    assert isinstance(step, RetryLater)


def test_a_prompt_without_a_further_boundary_sends_no_lookup() -> None:
    _, step = searched(NEW_REQUEST, facts(num_tokens=1000), MISS)
    assert isinstance(step, Compute), "its last token is computed in any case"
    _, step = searched(NEW_REQUEST, facts(num_tokens=1001), MISS)
    assert isinstance(step, StartLookups)


def first_wait_s(wait: LookupWait, possible: int = 8000) -> float:
    """Seconds that a request waits for a tier that does not answer."""
    stage, action = searched(NEW_REQUEST, facts(lookup=wait), MISS)
    assert isinstance(action, StartLookups)
    stage, again = life.lookups_started(stage, facts(lookup=wait), BOUNDS, action)
    assert isinstance(again, Search)
    stage, step = life.searched(stage, facts(lookup=wait), BOUNDS, again, Pending(possible), MISS)
    for milliseconds in range(1, 5000):
        if not isinstance(step, RetryLater):
            return (milliseconds - 1) / 1000
        stage, step = searched(stage, facts(milliseconds / 1000, lookup=wait), Pending(possible), MISS)
    raise AssertionError("the wait never ends")


@given(st.floats(0, 4), st.floats(0, 4), st.floats(1e-6, 1), st.sampled_from([0.5, 2.0]))
def test_a_wait_is_worth_it_exactly_above_the_break_even(
    answer_s: float, read_s: float, saved_s: float, timeout_s: float
) -> None:
    wait = LookupWait(timeout_s, answer_s, read_s, saved_s)
    tokens = life.break_even_tokens(wait)
    rest_s = life.expected_rest_s(Past(lookups_sent_s=0.0, lookup_deadline_s=timeout_s), 0.0, wait)
    if tokens is None:
        assert not life.is_worth_waiting(1 << 40, rest_s, wait)
    else:
        assert life.is_worth_waiting(tokens + 1, rest_s, wait)
        assert tokens < 2 or not life.is_worth_waiting(tokens - 1, rest_s, wait)


def test_there_is_no_break_even_where_reading_is_slower_than_computing() -> None:
    assert life.break_even_tokens(replace(WAIT, saved_s_per_token=0.0)) is None


def test_a_request_waits_for_an_overdue_answer_while_it_may_save_time() -> None:
    quick = replace(WAIT, answer_s=0.01)
    assert first_wait_s(quick, 100) == pytest.approx(0.11, abs=0.002), "100 tokens take 0.1 s"
    assert first_wait_s(quick, 8000) == pytest.approx(TIMEOUT_S / 2, abs=0.01), "after that an answer comes too late"


def test_a_request_waits_for_an_answer_that_is_slightly_late() -> None:
    """The usual answer time is more than half of the deadline."""
    wait = replace(WAIT, answer_s=1.2)
    assert first_wait_s(wait) == pytest.approx(1.6, abs=0.01)


def test_a_request_does_not_wait_for_a_tier_that_answers_after_the_deadline() -> None:
    assert first_wait_s(replace(WAIT, answer_s=TIMEOUT_S * 1.01)) == 0.0


@pytest.mark.parametrize(
    "wait", [replace(WAIT, answer_s=0.0, saved_s_per_token=0.0), replace(WAIT, answer_s=0.0, read_s=8.0)]
)
def test_a_request_does_not_wait_for_a_tier_that_reads_no_faster_than_it_computes(wait: LookupWait) -> None:
    assert first_wait_s(wait) == 0.0


def test_a_long_prompt_sends_its_lookups_once() -> None:
    stage, step = looked_up(8000, None)
    assert isinstance(step, RetryLater)
    stage, step = searched(stage, facts(2.5), MISS)
    assert isinstance(step, Compute)
    _, step = searched(stage, facts(3.0), MISS)
    assert isinstance(step, Compute), "the lookups were sent before"


def test_lookups_already_in_flight_need_no_second_search() -> None:
    stage, action = searched(NEW_REQUEST, facts(), Pending(8000), MISS)
    assert isinstance(action, StartLookups)
    waiting, step = life.lookups_started(stage, facts(), BOUNDS, action, is_news=False)
    assert isinstance(step, RetryLater)
    assert (waiting.past.lookups_sent_s, waiting.past.lookup_deadline_s) == (0.0, TIMEOUT_S)


def test_a_waiting_request_is_not_searched_until_its_lookup_is_answered() -> None:
    stage, step = looked_up(8000, None)
    assert isinstance(step, RetryLater)
    same, step = life.resume(stage, replace(facts(0.5), is_unanswered=True), BOUNDS)
    assert same == stage and isinstance(step, RetryLater), "the lookup of another request was answered"
    _, step = life.resume(stage, facts(0.5), BOUNDS)
    assert isinstance(step, Search), "its own lookup was answered"
    _, step = life.resume(stage, replace(facts(TIMEOUT_S), is_unanswered=True), BOUNDS)
    assert isinstance(step, Search), "its deadline has passed"
    _, step = life.resume(stage, replace(facts(0.5, num_tokens=9000), is_unanswered=True), BOUNDS)
    assert isinstance(step, Search), "its tokens have changed"


@pytest.mark.parametrize(("pause_s", "goes_on"), [(0.0, False), (40.0, True)])
def test_an_engine_pause_does_not_count_as_waiting(pause_s: float, goes_on: bool) -> None:
    stage, step = looked_up(8000, None)
    assert isinstance(step, RetryLater)
    stage = life.paused(stage, pause_s)
    _, step = searched(stage, facts(41.0), Hit(8000))
    assert isinstance(step, Promote) and step.has_time is goes_on


def test_a_pause_changes_nothing_for_a_request_that_does_not_wait() -> None:
    assert life.paused(NEW_REQUEST, 40.0) is NEW_REQUEST


def test_lookups_that_are_sent_again_get_a_new_deadline() -> None:
    stage, _ = looked_up(8000, None)
    stage = life.lookups_sent_again(stage, 40.0, TIMEOUT_S)
    _, step = searched(stage, facts(40.5), Pending(8000), MISS)
    assert isinstance(step, RetryLater)
    _, step = searched(stage, facts(40.0 + TIMEOUT_S), Pending(8000), MISS)
    assert isinstance(step, Compute)
    assert life.lookups_sent_again(NEW_REQUEST, 40.0, TIMEOUT_S) is NEW_REQUEST, "the first poll sends them"


@pytest.mark.parametrize("boundary", [None, 8000])
@pytest.mark.parametrize("failed", [False, True])
def test_a_restarted_request_sends_its_lookups_again(boundary: int | None, failed: bool) -> None:
    """It ran or loaded, and much later was preempted or its load failed."""
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.5), MISS)
    assert isinstance(step, Compute)
    stage = life.allocated(stage, boundary)
    stage = life.load_ended(stage, failed=failed, is_explained=True)
    stage, step = searched(life.start_over(stage), facts(1000.0), MISS)
    assert isinstance(step, StartLookups) and isinstance(stage, Searched)
    past = stage.past
    assert (past.lookups_sent_s, past.lookup_deadline_s, past.tier_since_s) == (1000.0, 1000.0 + TIMEOUT_S, None), (
        "a new wait"
    )


def test_a_request_without_blocks_sends_its_lookups_once() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.5), MISS)
    assert isinstance(step, Compute)
    for now_s in (10.0, 1000.0):
        stage, step = searched(stage, facts(now_s), MISS)
        assert isinstance(step, Compute)


def test_a_long_hit_leaves_too_little_for_lookups() -> None:
    _, step = searched(NEW_REQUEST, facts(), Hit(9000))
    assert isinstance(step, Promote)


def test_no_lookup_is_sent_without_a_tier_that_answers_later() -> None:
    _, step = searched(NEW_REQUEST, facts(lookup=None), MISS)
    assert isinstance(step, Compute)


def test_a_found_prefix_is_loaded_when_pending_keys_could_add_too_little() -> None:
    _, step = looked_up(8000, 7000)
    assert step == Promote(7000, 0.0, True, 0)
    _, step = looked_up(1500, None)
    assert isinstance(step, Compute)


def test_a_request_stops_waiting_when_the_possible_gain_becomes_small() -> None:
    stage, step = looked_up(8000, 5000)
    assert isinstance(step, RetryLater)
    stage, step = searched(stage, facts(1.5), Pending(5400), Hit(5000))
    assert step == Promote(5000, 0.0, True, 0), "the wait counts from the sent lookups"


def test_keys_pending_after_the_deadline_are_stores_and_are_awaited() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.0), Pending(8000))
    assert isinstance(step, RetryLater)
    assert isinstance(stage, Searched) and stage.past.stores_since_s == 2.0


def test_a_request_does_not_wait_for_lookups_of_others() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.0), Pending(8000), MISS)
    assert isinstance(step, Compute), "another request sent a lookup after this request's deadline"


def test_a_request_waits_for_stores_while_others_send_lookups() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(0.1), Pending(1500), None)
    assert isinstance(step, RetryLater), "the tiers have answered; a store is about to end"
    stage, step = searched(NEW_REQUEST, facts(num_tokens=1500, lookup=None), Pending(1400), Pending(1200))
    assert isinstance(step, RetryLater) and isinstance(stage, Searched) and stage.answer == Pending(1200)


def test_a_key_in_the_lookup_of_another_request_is_looked_up_too() -> None:
    _, step = searched(NEW_REQUEST, facts(), Pending(9000), MISS)
    assert isinstance(step, StartLookups), "pending only because of a lookup: not known"
    _, step = searched(NEW_REQUEST, facts(), Pending(9000), None)
    assert isinstance(step, RetryLater), "pending because it is being stored"


def test_lookups_and_promotion_share_one_deadline() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(1.9), Hit(8000))
    assert step == Promote(8000, 0.0, True, 0)


@given(
    st.integers(3000, 20_000),
    st.lists(st.tuples(st.floats(0.01, 0.7), st.integers(0, 20_000), st.integers(0, 20_000)), min_size=8, max_size=12),
)
def test_a_request_never_waits_for_lookups_beyond_their_deadline(
    num_tokens: int, polls: list[tuple[float, int, int]]
) -> None:
    stage, step = looked_up(num_tokens, None, num_tokens)
    now_s = 0.0
    for seconds, possible, settled in polls:
        if not isinstance(step, RetryLater):
            break
        now_s += seconds
        pending = now_s < TIMEOUT_S
        answer = Pending(max(possible, settled, 1)) if pending else Hit(settled) if settled else MISS
        found = Hit(settled) if settled else MISS
        stage, step = searched(stage, facts(now_s, num_tokens), answer, found if pending else None)
    assert not isinstance(step, RetryLater) or now_s < TIMEOUT_S
    assert not isinstance(step, Offer), "a hit is promoted first"
