"""Edge cases of a request's stages: every event in every stage gives a next stage and a safe answer."""

from __future__ import annotations

import pytest
from life_world import World, ask

from hybridkv.planner import Hit, Miss, Pending, Room, life
from hybridkv.planner.admission import MAX_GATE_S
from hybridkv.planner.stages import (
    COMPUTE,
    NEW_REQUEST,
    RELEASE,
    RELEASE_LATE,
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
FOUND_IN_PRIMARY = Searched(Past(), 7, 100, 0, Hit(64), is_in_primary=True)
LOADING = Loading(Past(), 64)
GIVEN_UP = GivenUp(Past(failed_loads=3))
STAGES: tuple[Stage, ...] = (NEW_REQUEST, FOUND, FOUND_IN_PRIMARY, Holding(FOUND), LOADING, GIVEN_UP)
stages = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: type(stage).__name__)


def facts(hold: HoldState | None = None, room: Room | None = None, now_s: float = 50.0) -> Facts:
    return Facts(100, 0, 7, now_s, True, hold, room)


@stages
@pytest.mark.parametrize("hold", [None, *HoldState])
def test_every_stage_answers_and_repeats_its_answer_when_polled_again(stage: Stage, hold: HoldState | None) -> None:
    again, step = life.resume(stage, facts(hold), BOUNDS)
    assert life.resume(again, facts(hold), BOUNDS)[1] == step or step in (RELEASE, RELEASE_LATE)


@stages
@pytest.mark.parametrize("outcome", list(Promoted))
def test_a_promotion_of_an_earlier_stage_is_handled_like_a_poll(stage: Stage, outcome: Promoted) -> None:
    after = life.promoted(stage, FACTS, BOUNDS, Promote(64, 50.0, has_time=True), outcome)
    if not isinstance(stage, Searched):
        assert after == life.resume(stage, FACTS, BOUNDS)


@stages
def test_the_end_of_a_load_changes_only_a_loading_request(stage: Stage) -> None:
    ended = life.load_ended(stage, failed=True)
    assert (ended == stage) is not isinstance(stage, Loading)


@stages
def test_starting_over_keeps_failures_and_load_and_drops_waits(stage: Stage) -> None:
    past = Past(
        failed_loads=stage.past.failed_loads,
        room_limit=48,
        only_primary=True,
        waited_in_vain=True,
        stores_since_s=1.0,
        tier_since_s=2.0,
    )
    begun = life.start_over(life.allocated(Unsearched(past), 64 if isinstance(stage, Loading) else None))
    assert isinstance(begun, Loading) is isinstance(stage, Loading)
    assert begun.past == Past(failed_loads=stage.past.failed_loads, only_primary=True)


@stages
def test_changed_tokens_drop_the_search_and_keep_the_rest(stage: Stage) -> None:
    forgotten = life.forget_search(stage)
    assert forgotten.past == stage.past
    assert isinstance(forgotten, Searched | Holding) is False
    assert isinstance(stage, Searched | Holding) or forgotten is stage


def test_nothing_is_promoted_with_a_single_tier() -> None:
    alone = Facts(100, 0, 7, 50.0)
    assert life.resume(FOUND, alone, BOUNDS) == (FOUND, Offer(64))
    assert life.resume(FOUND, FACTS, BOUNDS) == (FOUND, Promote(64, 50.0, has_time=True))


def test_a_pending_answer_to_the_last_search_is_a_miss() -> None:
    _, step = life.searched(NEW_REQUEST, FACTS, BOUNDS, Search(100, only_primary=False, is_last=True), Pending(64))
    assert step is COMPUTE


def test_a_hit_without_gain_is_computed() -> None:
    found = Searched(Past(), 7, 100, 64, Hit(64), is_in_primary=True)
    assert life.resume(found, Facts(100, 64, 7, 0.0), BOUNDS)[1] is COMPUTE


def test_a_loading_request_is_retried_later() -> None:
    assert life.resume(LOADING, FACTS, BOUNDS) == (LOADING, RETRY_LATER)


def test_a_given_up_request_still_lets_others_pass() -> None:
    room = Room(10, 5, 0, False, 40, 40)
    stage, step = life.resume(GIVEN_UP, facts(room=room), BOUNDS)
    assert isinstance(stage, GivenUp) and step is RETRY_LATER
    assert life.resume(stage, FACTS, BOUNDS) == (stage, COMPUTE)
    assert life.answer_of(GIVEN_UP) == Miss(None, "3 loads of this request failed")


def test_a_loading_request_waits_for_its_load_beside_others() -> None:
    """Its blocks may still be written, so it is not computed after the limit of the wait for room."""
    room = Room(10, 5, 0, True, 40, 40)
    assert life.resume(LOADING, facts(room=room), BOUNDS) == (LOADING, RETRY_LATER)


@pytest.mark.parametrize("free_room", [None, Room(10, 0, 0, False, 40, 40)], ids=["idle", "admitted"])
@pytest.mark.parametrize("found", [FOUND_IN_PRIMARY, Holding(FOUND)], ids=["in_primary", "held"])
def test_an_offer_ends_the_wait_for_room(found: Stage, free_room: Room | None) -> None:
    """The engine had no room for the offered load. Short waits behind several failed loads do not add up."""
    passing = Room(10, 0, 5, False, 40, 40)
    hold = HoldState.READY if isinstance(found, Holding) else None
    stage, step = life.resume(found, facts(hold, passing, 0.0), BOUNDS)
    assert step is RETRY_LATER
    stage, step = life.resume(stage, facts(hold, free_room, 1.0), BOUNDS)
    assert step == Offer(64)
    stage, step = life.resume(stage, facts(hold, passing, MAX_GATE_S), BOUNDS)
    assert step is RETRY_LATER
    assert life.resume(stage, facts(hold, passing, 2 * MAX_GATE_S), BOUNDS)[1] is COMPUTE


def test_a_boundary_is_lowered_by_a_quarter_until_it_fits_a_few_times() -> None:
    world = World(secondary=set(range(1, 100)), fitting_tokens=30)
    stage, reply = ask(NEW_REQUEST, world, BOUNDS, 101)
    # 99, 73, 53, 38, 27
    assert reply is RETRY_LATER and isinstance(stage, Holding) and stage.found.answer == Hit(27)
    world = World(secondary=set(range(1, 10_000)), fitting_tokens=0)
    stage, reply = ask(NEW_REQUEST, world, BOUNDS, 10_001)
    assert reply is RETRY_LATER and isinstance(stage, Unsearched)
    assert stage.past.room_limit == 997, "not to zero at once: a tier without room may have some soon"


def test_the_deadline_of_the_secondary_tier_counts_from_the_first_wait() -> None:
    world = World(secondary={64, 32})
    stage, _ = ask(NEW_REQUEST, world, BOUNDS, 101)
    world.now_s, world.hold = 29.0, HoldState.LOST
    world.secondary, world.generation = {32}, 1
    stage, reply = ask(stage, world, BOUNDS, 101)
    assert reply is RETRY_LATER and stage.past.tier_since_s == 0.0
    world.now_s, world.hold = 30.0, HoldState.LOST
    stage, reply = ask(stage, world, BOUNDS, 101)
    assert reply is COMPUTE and stage.past.only_primary
    assert world.counts == ["timed out waiting for the secondary tier"]
