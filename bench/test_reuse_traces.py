"""The simulation on small traces that can be checked by hand, and its picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from reuse_files import Part, part_of
from reuse_files import chats as conversations
from reuse_plot import draw
from reuse_policies import Hindsight, Junctions, Ladder
from reuse_traces import row_of, run_size

from hybridkv.cli.simulation.policies import PlannerStops, PromptEnds
from hybridkv.cli.simulation.store import CostModel, RequestFacts, simulate
from hybridkv.cli.simulation.traces import Trace, chained

COSTS = CostModel(step_tokens=8)
ROOM = 100_000


def siblings(num: int = 40, shared: int = 20, own: int = 6) -> Trace:
    """Documents with about three questions each: a long common beginning, and a separate end for each question."""
    prompts = [
        (64 * (shared + own) + 1, [f"document {number // 3}"] * shared + [f"question {number}"] * own)
        for number in range(num)
    ]
    return chained("siblings", 64, prompts)


def test_a_junction_serves_the_third_sibling_and_hindsight_the_second() -> None:
    trace = siblings(num=3)
    hits = [
        simulate(trace, ROOM, COSTS, policy).hit_tokens
        for policy in (PromptEnds(), Junctions(), Hindsight(trace, ROOM, COSTS, 1.0, True))
    ]
    assert hits == [0, 20 * 64, 2 * 20 * 64]


def test_the_planner_learns_where_siblings_branch() -> None:
    trace = siblings()
    junctions = simulate(trace, ROOM, COSTS, Junctions()).hit_tokens
    budgeted = simulate(trace, ROOM, COSTS, PlannerStops(trace, ROOM, COSTS, 1_000))
    bound = simulate(trace, ROOM, COSTS, None).hit_tokens
    assert junctions < budgeted.hit_tokens <= bound
    assert budgeted.extra_share <= 0.02


def test_halves_are_traces_and_add_up_to_the_whole() -> None:
    trace = siblings(num=7)
    first, second = part_of(trace, Part.FIRST), part_of(trace, Part.SECOND)
    assert (len(first.requests), len(second.requests)) == (3, 4)
    assert first.requests + second.requests == part_of(trace, Part.WHOLE).requests == trace.requests
    assert (first.name, first.chunk_tokens) == (trace.name, trace.chunk_tokens)


def test_attention_only_is_the_upper_bound_and_budgeted_is_no_worse_than_ends() -> None:
    trace = siblings()
    rates = {name: outcome.hit_rate for name, outcome in run_size(trace, 100, COSTS).items()}
    assert rates["attention"] == max(rates.values())
    assert rates["optimal"] >= rates["budgeted"] >= rates["ends"]


def test_an_empty_store_hits_nothing() -> None:
    for policy in (PromptEnds(), Junctions(), Ladder(2), None):
        assert simulate(siblings(), 1, COSTS, policy).hit_tokens == 0


def test_the_picture_is_xml_with_a_panel_for_each_trace() -> None:
    trace = siblings(num=9)
    rows = [row_of(trace, size, run_size(trace, size, COSTS)) for size in (30, 100)]
    picture = ElementTree.fromstring(draw(rows))
    assert any("siblings" in (element.text or "") for element in picture.iter())


@pytest.mark.parametrize("has_answers", [True, False])
@pytest.mark.parametrize("keeps", [74, 148], ids=["half_an_answer", "whole_histories"])
def test_a_small_store_serves_chats_no_worse_than_with_prompt_ends_only(keeps: int, has_answers: bool) -> None:
    """Six chats of four turns, with stores from far too small to large: within three points at every size."""
    trace, costs = (
        conversations(6, 4, first=600, more=60, answer=148, keeps=keeps),
        CostModel(state_chunks=1, step_tokens=50),
    )
    gains = []
    for capacity in range(20, 130, 5):
        policy = PlannerStops(trace, capacity, costs, 10_000, has_answers=has_answers)
        ours, ends = (simulate(trace, capacity, costs, each).hit_rate for each in (policy, PromptEnds()))
        gains.append(ours - ends)
        assert ours >= ends - 0.03, capacity
    # States of answers help only if histories contain the complete answers.
    assert (max(gains) > 0.1) == (has_answers and keeps == 148)


class StoreAllAnswers(PlannerStops):
    """Stores every state of an answer, even if it evicts others."""

    def _is_unproven(self, facts: RequestFacts) -> bool:
        return False


def test_states_of_unused_answers_would_evict_others() -> None:
    trace, costs = (
        conversations(6, 4, first=600, more=60, answer=148, keeps=74),
        CostModel(state_chunks=1, step_tokens=50),
    )
    lost = [
        simulate(trace, capacity, costs, PromptEnds()).hit_rate
        - simulate(trace, capacity, costs, StoreAllAnswers(trace, capacity, costs, 10_000)).hit_rate
        for capacity in range(20, 130, 5)
    ]
    assert max(lost) > 0.1
