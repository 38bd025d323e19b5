"""Learned rates: between the observed values, bounded, with older ones weighted less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.planner import UNKNOWN_RATE, Rate, observe, seconds_per_token
from hybridkv.planner.choice import FORGET_AFTER_S, KEPT_SHARE, MAX_SECONDS_PER_TOKEN, MIN_SECONDS_PER_TOKEN

observations = st.tuples(
    st.integers(1, 1 << 20), st.floats(min_value=0.0, max_value=1e9), st.floats(0.0, FORGET_AFTER_S)
)


def learn(seen: list[tuple[int, float, float]]) -> tuple[Rate, float]:
    rate, now_s = UNKNOWN_RATE, 0.0
    for num_tokens, seconds, later_s in seen:
        now_s += later_s
        rate = observe(rate, num_tokens, seconds, now_s)
    return rate, now_s


@given(st.lists(observations, min_size=1, max_size=20))
def test_a_rate_lies_between_its_observations_and_within_its_bounds(seen: list[tuple[int, float, float]]) -> None:
    rate, now_s = learn(seen)
    known = seconds_per_token(rate, now_s)
    assert known is not None
    bounded = [min(max(s / t, MIN_SECONDS_PER_TOKEN), MAX_SECONDS_PER_TOKEN) for t, s, _ in seen]
    assert min(bounded) * (1 - 1e-9) <= known <= max(bounded) * (1 + 1e-9)
    assert MIN_SECONDS_PER_TOKEN <= known <= MAX_SECONDS_PER_TOKEN


@given(st.lists(observations, max_size=10), st.integers(1, 1 << 20), st.floats(1e-6, 0.5))
def test_a_repeated_observation_becomes_the_rate(
    seen: list[tuple[int, float, float]], num_tokens: int, per_token: float
) -> None:
    rate, now_s = learn(seen)
    for _ in range(300):
        rate = observe(rate, num_tokens, num_tokens * per_token, now_s)
    assert seconds_per_token(rate, now_s) == pytest.approx(per_token, rel=1e-6)


def test_an_older_observation_counts_less() -> None:
    rate = observe(observe(UNKNOWN_RATE, 100, 1.0, 0.0), 100, 3.0, 1.0)
    assert seconds_per_token(rate, 1.0) == pytest.approx((KEPT_SHARE * 1.0 + 3.0) / (KEPT_SHARE * 100 + 100))


def test_a_rate_without_new_observations_is_forgotten() -> None:
    rate = observe(UNKNOWN_RATE, 100, 1.0, 10.0)
    assert seconds_per_token(rate, 10.0 + FORGET_AFTER_S) == 0.01
    late_s = 10.1 + FORGET_AFTER_S
    assert seconds_per_token(rate, late_s) is None
    assert seconds_per_token(observe(rate, 100, 50.0, late_s), late_s) == 0.5


def test_a_rate_without_observations_is_unknown() -> None:
    assert seconds_per_token(UNKNOWN_RATE, 0.0) is None


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "now_s"),
    [(0, 1.0, 0.0), (-5, 1.0, 0.0), (5, math.nan, 0.0), (5, math.inf, 0.0), (5, 1.0, math.nan)],
)
def test_an_impossible_observation_changes_nothing(num_tokens: int, seconds: float, now_s: float) -> None:
    rate = observe(UNKNOWN_RATE, 100, 1.0, 0.0)
    assert observe(rate, num_tokens, seconds, now_s) == rate
