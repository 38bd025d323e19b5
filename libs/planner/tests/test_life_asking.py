"""Lookups that a tier answers later are always sent, and waited for only while the wait is expected to save time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hybridkv.planner import Hit, Miss, Pending, life
from hybridkv.planner.stages import (
    NEW,
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
ASK_S = 2.0
WAIT = LookupWait(timeout_s=ASK_S, answer_s=ASK_S, read_s=0.0, saved_s_per_token=0.001)


def facts(now_s: float = 0.0, num_tokens: int = 10_000, lookup: LookupWait | None = WAIT) -> Facts:
    return Facts(num_tokens, 0, round(now_s * 1000), now_s, has_secondary=True, lookup=lookup)


def searched(
    stage: Stage, now: Facts, answer: Hit | Pending | Miss, settled: Hit | Pending | Miss | None = None
) -> tuple[Stage, object]:
    stage, action = life.resume(stage, now, BOUNDS)
    assert isinstance(action, Search)
    return life.searched(stage, now, BOUNDS, action, answer, settled)


def looked_up(possible: int, settled: int | None, num_tokens: int = 10_000) -> tuple[Stage, object]:
    """A request that asked, and what it is told when so much may be there."""
    stage, action = searched(NEW, facts(num_tokens=num_tokens), MISS)
    assert isinstance(action, StartLookups)
    stage, again = life.lookups_started(stage, facts(num_tokens=num_tokens), BOUNDS, action)
    assert isinstance(again, Search)
    found = MISS if settled is None else Hit(settled)
    return life.searched(stage, facts(num_tokens=num_tokens), BOUNDS, again, Pending(possible), found)


def test_a_short_prompt_asks_and_does_not_wait() -> None:
    _, step = looked_up(2000, None, 2001)
    assert isinstance(step, Compute), "two seconds of computing, and two of waiting"
    _, step = looked_up(2001, None, 2002)
    assert isinstance(step, RetryLater)


def test_a_prompt_without_a_further_boundary_does_not_ask() -> None:
    _, step = searched(NEW, facts(num_tokens=1000), MISS)
    assert isinstance(step, Compute), "its last token is computed in any case"
    _, step = searched(NEW, facts(num_tokens=1001), MISS)
    assert isinstance(step, StartLookups)


def first_wait_s(wait: LookupWait, possible: int = 8000) -> float:
    """How long a request waits for a tier that does not answer."""
    stage, action = searched(NEW, facts(lookup=wait), MISS)
    assert isinstance(action, StartLookups)
    stage, again = life.lookups_started(stage, facts(lookup=wait), BOUNDS, action)
    assert isinstance(again, Search)
    stage, step = life.searched(stage, facts(lookup=wait), BOUNDS, again, Pending(possible), MISS)
    for milliseconds in range(1, 5000):
        if not isinstance(step, RetryLater):
            return (milliseconds - 1) / 1000
        stage, step = searched(stage, facts(milliseconds / 1000, lookup=wait), Pending(possible), MISS)
    raise AssertionError("it waits for ever")


@given(st.floats(0, 4), st.floats(0, 4), st.floats(1e-6, 1), st.sampled_from([0.5, 2.0]))
def test_shorter_hits_than_the_break_even_are_not_waited_for(
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


def test_where_reading_takes_longer_than_computing_there_is_no_break_even() -> None:
    assert life.break_even_tokens(replace(WAIT, saved_s_per_token=0.0)) is None


def test_an_overdue_answer_is_waited_for_as_long_as_it_may_still_save_time() -> None:
    quick = replace(WAIT, answer_s=0.01)
    assert first_wait_s(quick, 100) == pytest.approx(0.11, abs=0.002), "100 tokens take 0.1 s"
    assert first_wait_s(quick, 8000) == pytest.approx(ASK_S / 2, abs=0.01), "after that an answer comes too late"


def test_an_answer_that_is_a_little_late_is_waited_for() -> None:
    """Its usual time is above half of the deadline."""
    wait = replace(WAIT, answer_s=1.2)
    assert first_wait_s(wait) == pytest.approx(1.6, abs=0.01)


def test_a_tier_that_answers_after_the_deadline_is_not_waited_for() -> None:
    assert first_wait_s(replace(WAIT, answer_s=ASK_S * 1.01)) == 0.0


@pytest.mark.parametrize(
    "wait", [replace(WAIT, answer_s=0.0, saved_s_per_token=0.0), replace(WAIT, answer_s=0.0, read_s=8.0)]
)
def test_a_tier_that_reads_as_slowly_as_the_engine_computes_is_not_waited_for(wait: LookupWait) -> None:
    assert first_wait_s(wait) == 0.0


def test_a_long_prompt_asks_once() -> None:
    stage, step = looked_up(8000, None)
    assert isinstance(step, RetryLater)
    stage, step = searched(stage, facts(2.5), MISS)
    assert isinstance(step, Compute)
    _, step = searched(stage, facts(3.0), MISS)
    assert isinstance(step, Compute), "it asked before"


def test_lookups_that_were_in_flight_at_the_search_need_no_other_search() -> None:
    stage, action = searched(NEW, facts(), Pending(8000), MISS)
    assert isinstance(action, StartLookups)
    waiting, step = life.lookups_started(stage, facts(), BOUNDS, action, is_news=False)
    assert isinstance(step, RetryLater)
    assert (waiting.past.lookups_sent_s, waiting.past.lookup_deadline_s) == (0.0, ASK_S)


def test_a_request_whose_lookup_is_unanswered_is_not_searched_again_while_it_waits() -> None:
    stage, step = looked_up(8000, None)
    assert isinstance(step, RetryLater)
    same, step = life.resume(stage, replace(facts(0.5), is_unanswered=True), BOUNDS)
    assert same == stage and isinstance(step, RetryLater), "another request's lookup was answered"
    _, step = life.resume(stage, facts(0.5), BOUNDS)
    assert isinstance(step, Search), "its own was"
    _, step = life.resume(stage, replace(facts(ASK_S), is_unanswered=True), BOUNDS)
    assert isinstance(step, Search), "its deadline is over"
    _, step = life.resume(stage, replace(facts(0.5, num_tokens=9000), is_unanswered=True), BOUNDS)
    assert isinstance(step, Search), "it has other tokens"


@pytest.mark.parametrize(("pause_s", "goes_on"), [(0.0, False), (40.0, True)])
def test_time_in_which_the_engine_does_not_call_is_no_wait_for_tiers(pause_s: float, goes_on: bool) -> None:
    stage, step = looked_up(8000, None)
    assert isinstance(step, RetryLater)
    stage = life.paused(stage, pause_s)
    _, step = searched(stage, facts(41.0), Hit(8000))
    assert isinstance(step, Promote) and step.has_time is goes_on


def test_a_pause_changes_nothing_for_a_request_that_waits_for_nothing() -> None:
    assert life.paused(NEW, 40.0) is NEW


def test_lookups_that_are_sent_again_are_waited_for_again() -> None:
    stage, _ = looked_up(8000, None)
    stage = life.sent_again(stage, 40.0, ASK_S)
    _, step = searched(stage, facts(40.5), Pending(8000), MISS)
    assert isinstance(step, RetryLater)
    _, step = searched(stage, facts(40.0 + ASK_S), Pending(8000), MISS)
    assert isinstance(step, Compute)
    assert life.sent_again(NEW, 40.0, ASK_S) is NEW, "the first poll sends them"


@pytest.mark.parametrize("boundary", [None, 8000])
@pytest.mark.parametrize("failed", [False, True])
def test_a_request_that_is_searched_anew_after_it_had_blocks_asks_anew(boundary: int | None, failed: bool) -> None:
    """It ran, or loaded, and much later was preempted, or its load failed."""
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.5), MISS)
    assert isinstance(step, Compute)
    stage = life.allocated(stage, boundary)
    stage = life.load_ended(stage, failed=failed, is_explained=True)
    stage, step = searched(life.start_over(stage), facts(1000.0), MISS)
    assert isinstance(step, StartLookups) and isinstance(stage, Searched)
    past = stage.past
    assert (past.lookups_sent_s, past.lookup_deadline_s, past.tier_since_s) == (1000.0, 1000.0 + ASK_S, None), (
        "its wait is new"
    )


def test_a_request_that_finds_no_blocks_asks_no_second_time() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.5), MISS)
    assert isinstance(step, Compute)
    for now_s in (10.0, 1000.0):
        stage, step = searched(stage, facts(now_s), MISS)
        assert isinstance(step, Compute)


def test_a_long_hit_leaves_too_little_to_ask_for() -> None:
    _, step = searched(NEW, facts(), Hit(9000))
    assert isinstance(step, Promote)


def test_where_no_tier_answers_late_nobody_is_asked() -> None:
    _, step = searched(NEW, facts(lookup=None), MISS)
    assert isinstance(step, Compute)


def test_what_is_settled_is_taken_when_too_little_more_is_possible() -> None:
    _, step = looked_up(8000, 7000)
    assert step == Promote(7000, 0.0, True, 0)
    _, step = looked_up(1500, None)
    assert isinstance(step, Compute)


def test_the_last_moments_of_a_wait_are_worth_less_than_its_beginning() -> None:
    stage, step = looked_up(8000, 5000)
    assert isinstance(step, RetryLater)
    stage, step = searched(stage, facts(1.5), Pending(5400), Hit(5000))
    assert step == Promote(5000, 0.0, True, 0), "the tiers are waited for since they were asked"


def test_after_the_deadline_what_is_pending_is_being_stored_and_waited_for_as_ever() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.0), Pending(8000))
    assert isinstance(step, RetryLater)
    assert isinstance(stage, Searched) and stage.past.stores_since_s == 2.0


def test_what_others_asked_is_not_waited_for() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(2.0), Pending(8000), MISS)
    assert isinstance(step, Compute), "somebody asked again when this request's time was over"


def test_what_is_being_stored_is_waited_for_while_others_ask() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(0.1), Pending(1500), None)
    assert isinstance(step, RetryLater), "the tiers have answered; a store is about to end"
    stage, step = searched(NEW, facts(num_tokens=1500, lookup=None), Pending(1400), Pending(1200))
    assert isinstance(step, RetryLater) and isinstance(stage, Searched) and stage.answer == Pending(1200)


def test_a_chunk_that_others_asked_for_is_asked_for_too() -> None:
    _, step = searched(NEW, facts(), Pending(9000), MISS)
    assert isinstance(step, StartLookups), "what is pending only because it was asked for is not known"
    _, step = searched(NEW, facts(), Pending(9000), None)
    assert isinstance(step, RetryLater), "what is being stored is"


def test_asking_and_loading_have_one_deadline() -> None:
    stage, _ = looked_up(8000, None)
    stage, step = searched(stage, facts(1.9), Hit(8000))
    assert step == Promote(8000, 0.0, True, 0)


@given(
    st.integers(3000, 20_000),
    st.lists(st.tuples(st.floats(0.01, 0.7), st.integers(0, 20_000), st.integers(0, 20_000)), min_size=8, max_size=12),
)
def test_no_answer_is_waited_for_beyond_its_deadline(num_tokens: int, polls: list[tuple[float, int, int]]) -> None:
    stage, step = looked_up(num_tokens, None, num_tokens)
    now_s = 0.0
    for seconds, possible, settled in polls:
        if not isinstance(step, RetryLater):
            break
        now_s += seconds
        pending = now_s < ASK_S
        answer = Pending(max(possible, settled, 1)) if pending else Hit(settled) if settled else MISS
        found = Hit(settled) if settled else MISS
        stage, step = searched(stage, facts(now_s, num_tokens), answer, found if pending else None)
    assert not isinstance(step, RetryLater) or now_s < ASK_S
    assert not isinstance(step, Offer), "a hit is brought near first"
