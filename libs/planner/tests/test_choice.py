"""Choice between stores: scores, ties, stores that need more time, that raise, that change their answer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import AUTO, Answer, Pass, Rates, Take, Unusable, Wait, Weight, choose, is_weight

answers = st.none() | st.integers(-5, 1 << 20) | st.sampled_from(Unusable)
numbers = st.floats(min_value=1e-6, max_value=1e6)
seconds = st.none() | st.floats(min_value=1e-9, max_value=1.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Answer], list[Weight], Rates, bool]:
    count = draw(st.integers(0, 6))
    return (
        draw(st.lists(answers, min_size=count, max_size=count)),
        draw(st.lists(numbers | st.just(AUTO), min_size=count, max_size=count)),
        Rates(tuple(draw(st.lists(seconds, max_size=count))), draw(seconds)),
        draw(st.booleans()),
    )


def expected_score(child: int, answer: Answer, weight: Weight, rates: Rates) -> float:
    """Seconds of saved prefill where all rates are known, tokens otherwise: the definition, written out."""
    if not isinstance(answer, int) or answer <= 0:
        return 0.0
    if weight != AUTO:
        assert isinstance(weight, float)
        return answer * weight
    load = dict(enumerate(rates.load_seconds_per_token)).get(child)
    prefill = rates.prefill_seconds_per_token
    return float(answer) if load is None or prefill is None else answer * (1.0 - load / prefill)


@given(cases())
def test_the_choice_is_the_first_of_the_best_scores(case: tuple[list[Answer], list[Weight], Rates, bool]) -> None:
    given_answers, weights, rates, may_wait = case
    scores = [
        expected_score(child, *pair, rates) for child, pair in enumerate(zip(given_answers, weights, strict=True))
    ]
    choice = choose(given_answers, weights, rates, may_wait=may_wait)
    if max(scores, default=0.0) > 0:
        best = scores.index(max(scores))
        assert choice == Take(best, given_answers[best])
    elif may_wait and {type(answer) for answer in given_answers} - {Unusable} == {type(None)}:
        assert choice == Wait(tuple(child for child, answer in enumerate(given_answers) if answer is None))
    else:
        assert choice == Pass()


@given(cases(), st.integers(0, 6), st.sampled_from([None, *Unusable]))
def test_a_store_without_an_answer_changes_nothing_for_stores_with_a_hit(
    case: tuple[list[Answer], list[Weight], Rates, bool], place: int, absent: Answer
) -> None:
    given_answers, weights, _, may_wait = case
    weights = [1.0 if weight == AUTO else weight for weight in weights]
    before = choose(given_answers, weights, may_wait=may_wait)
    place = min(place, len(given_answers))
    after = choose(
        [*given_answers[:place], absent, *given_answers[place:]],
        [*weights[:place], 1.0, *weights[place:]],
        may_wait=may_wait,
    )
    if isinstance(before, Take):
        assert after == Take(before.child + (before.child >= place), before.tokens)
    else:
        assert not isinstance(after, Take)


@given(st.lists(st.none() | st.integers(1, 100), min_size=1, max_size=6))
def test_equal_scores_are_decided_by_the_configured_order(tokens: list[int | None]) -> None:
    best = max((t for t in tokens if t is not None), default=None)
    choice = choose(tokens, [1.0] * len(tokens))
    assert choice == (Take(tokens.index(best), best) if best else Wait(tuple(range(len(tokens)))))


@pytest.mark.parametrize("place", range(3))
def test_a_store_that_needs_time_does_not_delay_stores_with_a_hit(place: int) -> None:
    given_answers: list[Answer] = [64, 64, 64]
    given_answers[place] = None
    assert choose(given_answers, [1.0] * 3) == Take(0 if place else 1, 64)


@pytest.mark.parametrize("place", range(4))
def test_a_pending_store_is_awaited_while_all_others_are_unusable_and_time_remains(place: int) -> None:
    given_answers: list[Answer] = [*Unusable]
    given_answers.insert(place, None)
    assert choose(given_answers, [1.0] * 4) == Wait((place,))
    assert choose(given_answers, [1.0] * 4, may_wait=False) == Pass()


@pytest.mark.parametrize("nothing", [0, -1])
@pytest.mark.parametrize("place", range(3))
def test_a_store_that_needs_time_does_not_delay_a_store_without_a_hit(place: int, nothing: int) -> None:
    given_answers: list[Answer] = [nothing, Unusable.BARRED]
    given_answers.insert(place, None)
    assert choose(given_answers, [1.0] * 3) == Pass()


@given(cases())
def test_the_choice_waits_only_while_every_usable_store_needs_time(
    case: tuple[list[Answer], list[Weight], Rates, bool],
) -> None:
    given_answers, weights, rates, may_wait = case
    choice = choose(given_answers, weights, rates, may_wait=may_wait)
    usable = [child for child, answer in enumerate(given_answers) if not isinstance(answer, Unusable)]
    if isinstance(choice, Wait):
        assert may_wait and usable and list(choice.children) == usable
        assert all(given_answers[child] is None for child in usable)


def test_a_weight_outweighs_a_longer_hit() -> None:
    assert choose([1000, 400], [1.0, 3.0]) == Take(1, 400)
    assert choose([1000, 400], [3.0, 1.0]) == Take(0, 1000)


def test_a_hit_that_loads_slower_than_computing_is_not_taken() -> None:
    rates = Rates((0.002, None), prefill_seconds_per_token=0.001)
    assert choose([1000], [AUTO], rates) == Pass()
    assert choose([1000, 10], [AUTO, AUTO], rates) == Take(1, 10)
    assert choose([1000, None], [AUTO, 1.0], rates) == Pass()


def test_learned_stores_are_ordered_by_saved_minus_load_seconds() -> None:
    # 1000 tokens save 1 s and take 0.9 s to load; 500 save 0.5 s and take 0.05 s.
    assert choose([1000, 500], [AUTO, AUTO], Rates((0.0009, 0.0001), 0.001)) == Take(1, 500)


def test_a_store_with_an_unknown_rate_is_tried() -> None:
    assert choose([10], [AUTO], Rates((0.5,), None)) == Take(0, 10)
    assert choose([10], [AUTO], Rates((None,), 1e-9)) == Take(0, 10)
    assert choose([10], [AUTO]) == Take(0, 10)


def test_an_answer_may_change_between_calls() -> None:
    weights = [1.0, 1.0]
    assert choose([None, None], weights) == Wait((0, 1))
    assert choose([None, 0], weights) == Pass()
    assert choose([128, 0], weights) == Take(0, 128)
    assert choose([0, 64], weights) == Take(1, 64)
    assert choose([0, 0], weights) == Pass()


@given(st.lists(answers, max_size=4), st.lists(numbers, max_size=4))
def test_answers_and_weights_must_match(given_answers: list[Answer], weights: list[float]) -> None:
    if len(given_answers) == len(weights):
        choose(given_answers, weights)
    else:
        with pytest.raises(ValueError, match="a weight for each"):
            choose(given_answers, weights)


@pytest.mark.parametrize("value", [1, 1.0, 0.25, 1e300, 5e-324, AUTO])
def test_a_weight_is_positive_and_finite_or_auto(value: object) -> None:
    assert is_weight(value)


@pytest.mark.parametrize(
    "value", [0, 0.0, -1, -0.5, math.nan, math.inf, -math.inf, True, None, "1", "Auto", [], 10**400]
)
def test_any_other_value_is_no_weight(value: object) -> None:
    assert not is_weight(value)


def test_a_store_that_answers_soon_is_awaited_if_it_could_be_the_best() -> None:
    answers: list[Answer] = [64, None, 0]
    assert choose(answers, [1.0] * 3, soon={1: 65}) == Wait((1,))
    assert choose(answers, [1.0] * 3, soon={1: 64}) == Take(0, 64)
    assert choose(answers, [1.0, 2.0, 1.0], soon={1: 33}) == Wait((1,))
    assert choose(answers, [1.0, AUTO, 1.0], soon={1: 64}) == Take(0, 64)
    assert choose(answers, [1.0] * 3, soon={1: 65}, may_wait=False) == Take(0, 64)
    assert choose(answers, [1.0] * 3) == Take(0, 64)


def test_a_soon_store_that_has_answered_is_treated_like_the_others() -> None:
    assert choose([64, 100], [1.0] * 2, soon={1: 200}) == Take(1, 100)
    assert choose([0, 0], [1.0] * 2, soon={1: 200}) == Pass()
    assert choose([0, None], [1.0] * 2, soon={1: 200}) == Wait((1,))
    assert choose([64, Unusable.BARRED], [1.0] * 2, soon={1: 200}) == Take(0, 64)
