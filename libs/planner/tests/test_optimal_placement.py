"""The reference is optimal: compared with every subset in small cases; and the guesses are compared with it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from optimal_placement import lost_tokens, optimal_stops

from hybridkv.planner.checkpoints.placement import spaced_stops

Partings = list[tuple[int, float]]


@st.composite
def cases(draw: st.DrawFn, max_depths: int = 8) -> tuple[Partings, int]:
    base = draw(st.integers(0, 5))
    depths = draw(st.lists(st.integers(base + 1, 60), max_size=max_depths, unique=True))
    return [(depth, float(draw(st.integers(0, 9)))) for depth in sorted(depths)], base


@given(cases(), st.integers(0, 9), st.integers(0, 80))
def test_no_subset_of_stops_loses_less(case: tuple[Partings, int], max_stops: int, price: int) -> None:
    partings, base = case
    depths = [depth for depth, _ in partings]
    stops = optimal_stops(partings, base, max_stops, price)
    assert len(stops) <= max_stops and set(stops) <= set(depths) and list(stops) == sorted(stops)
    least = min(
        lost_tokens(partings, base, subset) + price * len(subset)
        for size in range(min(max_stops, len(depths)) + 1)
        for subset in itertools.combinations(depths, size)
    )
    assert lost_tokens(partings, base, stops) + price * len(stops) == least


def test_a_stop_between_two_divergences_would_lose_more() -> None:
    partings = [(10, 1.0), (20, 5.0)]
    assert optimal_stops(partings, 0, 1) == (20,)
    assert lost_tokens(partings, 0, (20,)) < lost_tokens(partings, 0, (15,)) < lost_tokens(partings, 0, (10,))


@given(cases(max_depths=18), st.integers(1, 80))
def test_guesses_save_at_least_the_classic_share_of_the_optimum(case: tuple[Partings, int], price: int) -> None:
    partings, base = case
    stops = spaced_stops(partings, base, price)
    nothing = lost_tokens(partings, base, ())
    saved = nothing - lost_tokens(partings, base, stops)
    best = nothing - lost_tokens(partings, base, optimal_stops(partings, base, len(stops)))
    assert saved >= (1 - 1 / 2.7182) * best - 1e-6
    assert saved > price * len(stops) or not stops


@given(cases(max_depths=18), st.integers(1, 80), st.integers(0, 80))
def test_a_higher_price_ends_the_same_row_of_stops_earlier(case: tuple[Partings, int], price: int, more: int) -> None:
    partings, base = case
    cheap, dear = spaced_stops(partings, base, price), spaced_stops(partings, base, price + more)
    assert cheap[: len(dear)] == dear


def test_a_single_likely_distance_gets_a_single_stop() -> None:
    assert spaced_stops([(100, 0.0), (200, 0.5), (300, 0.0)], 0, 50.0) == [200]
    assert spaced_stops([(100, 0.0), (200, 0.5), (300, 0.0)], 0, 100.0) == []
