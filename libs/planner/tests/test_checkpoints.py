"""Placement of prefill stops: valid positions, priorities, limits and prices, and the learned statistics."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import (
    NO_EXPERIENCE,
    Costs,
    Experience,
    Limits,
    Placement,
    Prompt,
    Stop,
    StopReason,
    StoreUsage,
    learn_request,
    learn_stored,
    next_stop,
    plan_stops,
)
from hybridkv.planner.checkpoints.experience import DISTANCES
from hybridkv.planner.checkpoints.placement import KNOWN_TOKENS, price_tokens

FREE = Limits(1_000, 1e9)
KNOWN = (StopReason.JUNCTION, StopReason.BRANCH)
rates = st.lists(st.floats(0.0, 3.0), min_size=len(DISTANCES), max_size=len(DISTANCES))
numbers = st.floats(0.0, 1e9)
experiences = st.builds(
    Experience,
    divergences=rates.map(tuple),
    prompts=st.just((1.0,) * len(DISTANCES)),
    aged_tokens=numbers,
    stored_bytes=numbers,
    computed_tokens=st.just(0.0) | st.floats(1.0, 1e9),  # every request computes at least one
    extra_tokens=st.floats(0.0, 1e5),
)
usages = st.builds(StoreUsage, capacity_bytes=st.integers(0, 1 << 40), experience=experiences)
costs = st.builds(
    Costs, state_bytes=st.integers(0, 1 << 24), token_bytes=st.integers(1, 1 << 16), step_tokens=st.integers(0, 500)
)
limits = st.builds(Limits, max_stops=st.integers(0, 10), max_extra_share=st.floats(0.0, 0.2))
sizes = st.sampled_from([16, 128, 512, 784])


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    num_tokens = draw(st.integers(1, 60_000))
    inside = st.integers(0, num_tokens)
    return Prompt(num_tokens, draw(inside), draw(inside), tuple(draw(st.lists(inside, max_size=4))))


@given(sizes, prompts(), usages, costs, limits)
def test_stops_are_computed_boundaries_before_the_engines_own_last_state(
    boundary: int, prompt: Prompt, usage: StoreUsage, cost: Costs, limit: Limits
) -> None:
    tokens = [stop.num_tokens for stop in plan_stops(boundary, prompt, usage, cost, limit).stops]
    assert tokens == sorted(set(tokens))
    assert all(prompt.resumed_tokens < at < prompt.end_boundary(boundary) and at % boundary == 0 for at in tokens)


@given(sizes, prompts(), usages, costs, limits)
def test_the_last_boundary_is_a_stop_where_the_engine_keeps_no_state(
    boundary: int, prompt: Prompt, usage: StoreUsage, cost: Costs, limit: Limits
) -> None:
    """Whatever it costs, unless the store has no room for a state. The other stops are as they would be with one fewer
    allowed."""
    end = prompt.end_boundary(boundary)
    placement = plan_stops(boundary, msgspec.structs.replace(prompt, engine_stops_at_end=False), usage, cost, limit)
    is_made = end > prompt.resumed_tokens and cost.state_bytes <= usage.capacity_bytes and limit.max_stops > 0
    assert [stop for stop in placement.stops if stop.num_tokens >= end] == [Stop(end, StopReason.END)][:is_made]
    fewer = Limits(limit.max_stops - is_made, limit.max_extra_share)
    others = plan_stops(boundary, prompt, usage, cost, fewer)
    assert placement.stops[: len(placement.stops) - is_made] == others.stops
    assert placement.extra_tokens == others.extra_tokens


@given(sizes, prompts(), usages, costs, limits)
def test_limits_hold_for_the_request_and_for_recent_requests_together(
    boundary: int, prompt: Prompt, usage: StoreUsage, cost: Costs, limit: Limits
) -> None:
    placement = plan_stops(boundary, prompt, usage, cost, limit)
    assert len(placement.stops) <= limit.max_stops
    assert placement.extra_tokens == len(placement.stops) * cost.step_tokens
    learned = usage.experience
    computed = learned.computed_tokens + prompt.num_tokens - prompt.resumed_tokens
    if all(stop.reason in KNOWN for stop in placement.stops):
        computed += KNOWN_TOKENS
    if placement.extra_tokens:
        assert learned.extra_tokens + placement.extra_tokens <= limit.max_extra_share * computed + 1e-6


def test_the_second_of_a_few_short_siblings_stops_at_their_junction_in_a_fresh_store() -> None:
    cost, room = Costs(1 << 20, 1 << 10, 64), StoreUsage(1 << 40)
    first = plan_stops(16, Prompt(329), room, cost, Limits())
    assert first.stops == ()
    learned = learn_request(NO_EXPERIENCE, Prompt(329), first)
    second = plan_stops(16, Prompt(329, junction_tokens=224), StoreUsage(1 << 40, 0, learned), cost, Limits())
    assert second.stops == (Stop(224, StopReason.JUNCTION, is_unproven=True),)


def test_short_prompts_that_all_diverge_stay_near_the_allowed_share() -> None:
    """Each diverges at a place of its own, where no request returns."""
    cost, limit, learned, stops = Costs(1 << 20, 1 << 10, 64), Limits(), NO_EXPERIENCE, 0
    for _ in range(1_000):
        prompt = Prompt(2_000, junction_tokens=1_600)
        placement = plan_stops(16, prompt, StoreUsage(1 << 40, 0, learned), cost, limit)
        learned, stops = learn_request(learned, prompt, placement), stops + len(placement.stops)
    assert stops * cost.step_tokens <= limit.max_extra_share * (1_000 * 2_000 + 3 * KNOWN_TOKENS)


@given(sizes, prompts(), usages, costs, limits, st.integers(0, 10))
def test_junctions_and_branches_come_before_guesses(
    boundary: int, prompt: Prompt, usage: StoreUsage, cost: Costs, limit: Limits, max_stops: int
) -> None:
    free = Limits(1000, 1e9)
    wanted = plan_stops(boundary, prompt, usage, cost, free).stops
    made = plan_stops(boundary, prompt, usage, cost, msgspec.structs.replace(free, max_stops=max_stops)).stops
    assert set(made) <= set(wanted)
    if any(stop.reason is StopReason.SPACED for stop in made):
        assert {stop for stop in wanted if stop.reason in KNOWN} <= set(made)
    if any(stop.reason is StopReason.BRANCH for stop in made):
        assert {stop for stop in wanted if stop.reason is StopReason.JUNCTION} <= set(made)


@given(sizes, prompts(), usages, costs, limits, st.integers(0, 1 << 24), st.integers(0, 10), st.floats(0.0, 1.0))
def test_a_tighter_budget_never_adds_stops(
    boundary: int,
    prompt: Prompt,
    usage: StoreUsage,
    cost: Costs,
    limit: Limits,
    more_bytes: int,
    fewer: int,
    share: float,
) -> None:
    wide = plan_stops(boundary, prompt, usage, cost, limit)
    dear = msgspec.structs.replace(cost, state_bytes=cost.state_bytes + more_bytes)
    tight = Limits(max(0, limit.max_stops - fewer), limit.max_extra_share * share)
    assert len(plan_stops(boundary, prompt, usage, dear, limit).stops) <= len(wide.stops)
    assert set(plan_stops(boundary, prompt, usage, cost, tight).stops) <= set(wide.stops)


@given(sizes, prompts(), usages, costs, limits)
def test_left_out_stops_are_counted_by_cause(
    boundary: int, prompt: Prompt, usage: StoreUsage, cost: Costs, limit: Limits
) -> None:
    placement = plan_stops(boundary, prompt, usage, cost, limit)
    free = plan_stops(boundary, prompt, usage, cost, Limits(1000, 1e9))
    left_out = placement.left_out
    assert min(left_out.stops, left_out.share, left_out.worth) >= 0
    assert left_out.stops + left_out.share == len(free.stops) - len(placement.stops)
    assert left_out.worth == free.left_out.worth


def test_a_store_without_room_for_a_state_gets_no_stop() -> None:
    prompt, cost = Prompt(50_000, junction_tokens=20_480), Costs(1_000, 1, 64)
    assert plan_stops(512, prompt, StoreUsage(1_000), cost, Limits()).stops
    assert plan_stops(512, prompt, StoreUsage(999), cost, Limits()).stops == ()


@pytest.mark.parametrize(
    "changes", [{}, {"reused_divergence_share": 0.5, "is_divergence_unknown": True}], ids=["new", "cut"]
)
def test_an_unproven_junction_gets_a_stop_only_while_the_store_has_room(changes: dict[str, float]) -> None:
    prompt, costs = msgspec.structs.replace(Prompt(9_000, 512, 5_000), **changes), Costs(2_048, 1, 16)
    placed, in_full = (plan_stops(512, prompt, StoreUsage(1 << 30, used), costs, Limits(1)) for used in (0, 1 << 30))
    assert placed.stops == (Stop(4_608, StopReason.JUNCTION, is_unproven=True),)
    assert in_full.stops == () and in_full.left_out.worth > placed.left_out.worth
    proven = msgspec.structs.replace(prompt, reused_divergence_share=0.5, is_divergence_unknown=False)
    assert plan_stops(512, proven, StoreUsage(1 << 30, 1 << 30), costs, Limits(1)).stops != ()


def test_a_proven_junction_gets_a_stop_with_its_reason() -> None:
    prompt = Prompt(9_000, 512, 5_000, reused_divergence_share=0.5)
    placement = plan_stops(512, prompt, StoreUsage(1 << 30), Costs(2_048, 1, 16), Limits(1))
    assert placement.stops == (Stop(4_608, StopReason.JUNCTION),)


def test_guesses_become_rare_as_old_content_of_the_store_gains_value() -> None:
    def num_stops(aged_tokens: float) -> int:
        learned = msgspec.structs.replace(NO_EXPERIENCE, aged_tokens=aged_tokens, stored_bytes=1e6)
        return len(
            plan_stops(512, Prompt(100_000), StoreUsage(1 << 30, 0, learned), Costs(2_048, 1, 8), Limits()).stops
        )

    counts = [num_stops(aged) for aged in (0, 1e7, 1e8, 1e9)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 0 == counts[-1]


def test_a_distance_of_divergence_is_learned_and_forgotten() -> None:
    cost, limit, learned = Costs(2_048, 1, 8), Limits(max_stops=1), NO_EXPERIENCE
    nothing = Placement(boundary_tokens=512)
    for _ in range(20):
        learned = learn_request(learned, Prompt(30_000), nothing)
        learned = learn_request(learned, Prompt(30_000, 0, 26_624, earlier_rest_tokens=6 * 512), nothing)
    usage = StoreUsage(1 << 30, 0, learned)
    assert plan_stops(512, Prompt(40_001), usage, cost, limit).stops == (
        Stop((40_000 // 512 - 6) * 512, StopReason.SPACED),
    )
    for _ in range(5_000):
        learned = learn_request(learned, Prompt(30_000), nothing)
    assert learned.divergence_rate(DISTANCES.index(6), 58) < 0.001


def test_learned_distances_count_most_for_prompts_of_similar_length() -> None:
    learned, nothing = NO_EXPERIENCE, Placement(boundary_tokens=512)
    for _ in range(200):
        learned = learn_request(learned, Prompt(100_000), nothing)
        learned = learn_request(learned, Prompt(100_000, 0, 512 * 192, earlier_rest_tokens=3 * 512), nothing)
        learned = learn_request(learned, Prompt(10_000), nothing)
    long, middle, short = (learned.divergence_rate(DISTANCES.index(3), number) for number in (195, 80, 19))
    assert long > middle > short > 0


def test_a_divergence_where_the_prompt_had_no_rung_is_not_learned_for_that_rung() -> None:
    """Near the beginning: the last 50 of 59 boundaries differ, and the next distance is 64."""
    nothing = Placement(boundary_tokens=512)
    learned = learn_request(NO_EXPERIENCE, Prompt(30_001, 0, 9 * 512, earlier_rest_tokens=50 * 512), nothing)
    assert learned.divergences[DISTANCES.index(64)] == NO_EXPERIENCE.divergences[DISTANCES.index(64)]
    learned = learn_request(NO_EXPERIENCE, Prompt(60_001, 0, 20 * 512, earlier_rest_tokens=50 * 512), nothing)
    assert learned.divergences[DISTANCES.index(64)] > NO_EXPERIENCE.divergences[DISTANCES.index(64)]


def test_a_stop_must_gain_more_the_more_time_stops_have_taken() -> None:
    def num_stops(extra_tokens: float) -> int:
        learned = Experience(computed_tokens=1e6, extra_tokens=extra_tokens)
        return len(plan_stops(512, Prompt(9_000), StoreUsage(1 << 30, 0, learned), Costs(2_048, 1, 200), FREE).stops)

    counts = [num_stops(extra) for extra in (0, 1e4, 1e5)]
    assert counts[0] > counts[1] > counts[2]


@given(st.lists(prompts(), max_size=30), usages, st.integers(-5, 1 << 40))
def test_experience_stays_bounded_and_finite(requests: list[Prompt], usage: StoreUsage, num_bytes: int) -> None:
    learned = learn_stored(usage.experience, num_bytes)
    for prompt in requests:
        learned = learn_request(learned, prompt, Placement(boundary_tokens=128, extra_tokens=64.0))
    assert len(learned.divergences) == len(learned.prompts) == len(DISTANCES)
    assert all(number >= 0 for number in learned.divergences) and all(number >= 1 for number in learned.prompts)
    for of_one in learned.by_length:
        assert len(of_one.divergences) == len(of_one.prompts) == len(DISTANCES)
        assert min(*of_one.divergences, *of_one.prompts) >= 0
    assert all(0 <= learned.divergence_rate(index, 1 << index) < float("inf") for index in range(len(DISTANCES)))
    assert learned.computed_tokens <= usage.experience.computed_tokens + sum(p.num_tokens for p in requests)
    assert price_tokens(StoreUsage(1 << 50, 0, learned), Costs(1, 1, 1)) >= 0


def test_a_restarted_request_costs_again_and_teaches_no_divergence() -> None:
    asked = Prompt(30_000, 0, 26_624, earlier_rest_tokens=6 * 512)
    placement = Placement(boundary_tokens=512, extra_tokens=64.0)
    once = learn_request(NO_EXPERIENCE, asked, placement)
    again = learn_request(once, msgspec.structs.replace(asked, starts_over=True), placement)
    assert (again.divergences, again.prompts, again.by_length) == (once.divergences, once.prompts, once.by_length)
    assert once.divergences != NO_EXPERIENCE.divergences
    assert again.computed_tokens > once.computed_tokens and again.extra_tokens > once.extra_tokens


def test_an_empty_placement_teaches_nothing() -> None:
    assert learn_request(NO_EXPERIENCE, Prompt(1_000), Placement()) == NO_EXPERIENCE


def test_a_boundary_of_zero_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="boundary_tokens"):
        plan_stops(0, Prompt(10), StoreUsage(0), Costs(1, 1, 1), Limits())


placements = st.lists(st.integers(1, 40), unique=True).map(
    lambda tokens: Placement(tuple(Stop(at, StopReason.SPACED) for at in sorted(tokens)))
)


@given(placements, st.integers(0, 40))
def test_every_planned_stop_comes_in_order(placement: Placement, start: int) -> None:
    stops, at = [], start
    while (stop := next_stop(placement, at)) is not None:
        assert stop.num_tokens > at
        at = stop.num_tokens
        stops.append(at)
    assert stops == [stop.num_tokens for stop in placement.stops if stop.num_tokens > start]
