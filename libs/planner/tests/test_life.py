"""The edges of a request's life: whatever comes, in whatever order, there is a next stage and a fail-safe answer."""

from __future__ import annotations

import pytest
from life_world import World, ask

from hybridkv.planner import Hit, Miss, Pending, Room, life
from hybridkv.planner.stages import (
    COMPUTE,
    GO_WITHOUT,
    NEW,
    RELEASE,
    RETRY_LATER,
    Bounds,
    Facts,
    GivenUp,
    Holding,
    HoldState,
    Loading,
    Offer,
    Past,
    Promote,
    Promoted,
    Search,
    Searched,
    Stage,
    Unsearched,
)

BOUNDS = Bounds(10.0, 30.0)
FACTS = Facts(100, 0, 7, 50.0, has_secondary=True)
FOUND = Searched(Past(), 7, 100, 0, Hit(64))
NEAR = Searched(Past(), 7, 100, 0, Hit(64), is_in_primary=True)
LOADING = Loading(Past(), 64)
GIVEN_UP = GivenUp(Past(failed_loads=3))
STAGES: tuple[Stage, ...] = (NEW, FOUND, NEAR, Holding(FOUND), LOADING, GIVEN_UP)
stages = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: type(stage).__name__)


def facts(hold: HoldState | None = None, room: Room | None = None, now_s: float = 50.0) -> Facts:
    return Facts(100, 0, 7, now_s, True, hold, room)


@stages
@pytest.mark.parametrize("hold", [None, *HoldState])
def test_every_question_has_an_answer_that_changes_nothing_when_it_is_asked_again(
    stage: Stage, hold: HoldState | None
) -> None:
    again, step = life.resume(stage, facts(hold), BOUNDS)
    assert life.resume(again, facts(hold), BOUNDS)[1] == step or step in (RELEASE, GO_WITHOUT)


@stages
@pytest.mark.parametrize("outcome", list(Promoted))
def test_what_was_brought_for_a_stage_that_is_over_is_a_question_like_another(stage: Stage, outcome: Promoted) -> None:
    after = life.promoted(stage, FACTS, BOUNDS, Promote(64, 50.0, has_time=True), outcome)
    if not isinstance(stage, Searched):
        assert after == life.resume(stage, FACTS, BOUNDS)


@stages
def test_a_load_of_which_a_request_knows_nothing_is_not_its_own(stage: Stage) -> None:
    ended = life.load_ended(stage, failed=True)
    assert (ended == stage) is not isinstance(stage, Loading)


@stages
def test_who_starts_over_keeps_its_failures_and_its_load_and_forgets_its_waits(stage: Stage) -> None:
    past = Past(failed_loads=stage.past.failed_loads, room_limit=48, only_primary=True, waited_in_vain=True)
    begun = life.start_over(life.allocated(Unsearched(past), 64 if isinstance(stage, Loading) else None))
    assert isinstance(begun, Loading) is isinstance(stage, Loading)
    assert (begun.past.room_limit, begun.past.only_primary, begun.past.waited_in_vain) == (48, True, False)


@stages
def test_other_tokens_take_with_them_what_was_searched_for_and_nothing_else(stage: Stage) -> None:
    forgotten = life.forget_search(stage)
    assert forgotten.past == stage.past
    assert isinstance(forgotten, Searched | Holding) is False
    assert isinstance(stage, Searched | Holding) or forgotten is stage


def test_nothing_is_brought_near_where_one_tier_is_all() -> None:
    alone = Facts(100, 0, 7, 50.0)
    assert life.resume(FOUND, alone, BOUNDS) == (FOUND, Offer(64))
    assert life.resume(FOUND, FACTS, BOUNDS) == (FOUND, Promote(64, 50.0, has_time=True))


def test_a_search_that_waits_although_it_was_the_last_is_a_miss() -> None:
    _, step = life.searched(NEW, FACTS, BOUNDS, Search(100, only_primary=False, is_last=True), Pending(64))
    assert step is COMPUTE


def test_an_answer_that_gains_nothing_is_computed() -> None:
    found = Searched(Past(), 7, 100, 64, Hit(64), is_in_primary=True)
    assert life.resume(found, Facts(100, 64, 7, 0.0), BOUNDS)[1] is COMPUTE


def test_a_request_that_loads_is_told_to_ask_again() -> None:
    assert life.resume(LOADING, FACTS, BOUNDS) == (LOADING, RETRY_LATER)


def test_a_request_that_is_given_up_still_lets_others_pass() -> None:
    room = Room(10, 5, 0, False, 40, 40)
    assert life.resume(GIVEN_UP, facts(room=room), BOUNDS) == (GIVEN_UP, RETRY_LATER)
    assert life.resume(GIVEN_UP, FACTS, BOUNDS) == (GIVEN_UP, COMPUTE)
    assert life.answer_of(GIVEN_UP) == Miss(None, "3 loads of this request failed")


def test_a_boundary_is_brought_down_by_a_quarter_until_it_fits_or_so_often() -> None:
    world = World(far=set(range(1, 100)), fitting_tokens=30)
    stage, reply = ask(NEW, world, BOUNDS, 101)
    # 99, 73, 53, 38, 27
    assert reply is RETRY_LATER and isinstance(stage, Holding) and stage.found.answer == Hit(27)
    world = World(far=set(range(1, 10_000)), fitting_tokens=0)
    stage, reply = ask(NEW, world, BOUNDS, 10_001)
    assert reply is RETRY_LATER and isinstance(stage, Unsearched)
    assert stage.past.room_limit == 997, "not to the end at once: a tier without room may have some soon"


def test_the_slow_tiers_deadline_counts_from_the_first_wait_whatever_is_waited_for() -> None:
    world = World(far={64, 32})
    stage, _ = ask(NEW, world, BOUNDS, 101)
    world.now_s, world.hold = 29.0, HoldState.LOST
    world.far, world.generation = {32}, 1
    stage, reply = ask(stage, world, BOUNDS, 101)
    assert reply is RETRY_LATER and stage.past.tier_since_s == 0.0
    world.now_s, world.hold = 30.0, HoldState.LOST
    stage, reply = ask(stage, world, BOUNDS, 101)
    assert reply is COMPUTE and stage.past.only_primary
    assert world.counts == ["the slow tier was waited for in vain"]
