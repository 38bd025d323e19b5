"""Chooses the boundaries of a prompt at which a state is stored (stops), and returns the next one.

The last boundary comes first, if the engine does not stop there by itself. Then come boundaries at which earlier
requests diverged: a later request probably resumes there. All other stops are guesses: the expected savings of a stop
must be higher than the cost of its step and of its bytes. The stop with the highest savings is chosen first, then the
best one in addition to the chosen stops. So higher costs or tighter limits only shorten the same list of stops.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from hybridkv.planner.checkpoints.experience import DISTANCES, PRIOR_DIVERGENCES
from hybridkv.planner.checkpoints.values import (
    Costs,
    LeftOut,
    Limits,
    Placement,
    Prompt,
    Stop,
    StopReason,
    StoreUsage,
)

EXTRA_RETURN: Final = 150
"""Makes stops more expensive the more prefill they took recently: a stop must save 1 + EXTRA_RETURN * share times the
cost of its step. At the default limit, a share of 1/50, that is four times the cost. So a part of the
limit is left for good stops."""

KNOWN_TOKENS: Final = 1 << 16
"""Added to the computed tokens for the limit on stops at known divergences: at a share of 1/50 it allows 20 more stops
that cost 64 tokens each. So the second of a few short prompts with a common prefix stores a state in a new store."""


def plan_stops(boundary_tokens: int, prompt: Prompt, usage: StoreUsage, costs: Costs, limits: Limits) -> Placement:
    """Returns the stops of a prompt, ascending: multiples of `boundary_tokens` after the resumed tokens and before the
    last boundary. The last boundary is a stop too if the engine does not stop there by default.

    Raises:
        ValueError: `boundary_tokens` is not positive.
    """
    if boundary_tokens <= 0:
        raise ValueError(f"boundary_tokens must be positive, got {boundary_tokens}")
    price = price_tokens(usage, costs)
    known = _known_stops(boundary_tokens, prompt, costs.state_bytes * usage.experience.tokens_per_byte)
    worthy_known = [stop for stop in known if stop.num_tokens - prompt.resumed_tokens >= price]
    base = max(stop.num_tokens for stop in known) if known else prompt.held_tokens(boundary_tokens)
    guesses = _guesses(boundary_tokens, prompt, usage, base)
    is_prior = max(usage.experience.divergences) <= PRIOR_DIVERGENCES
    spaced = [Stop(tokens, StopReason.SPACED, is_prior) for tokens in spaced_stops(guesses, base, price)]
    if not usage.has_room(costs):
        worthy_known = [stop for stop in worthy_known if not stop.is_unproven]
        spaced = [stop for stop in spaced if not stop.is_unproven]
    worthy = [*worthy_known, *spaced]
    most = max(0, limits.max_stops)
    ends = _end_stop(boundary_tokens, prompt, price)[:most]
    affordable = max(
        _affordable(prompt, usage, costs, limits, len(worthy)),
        _affordable(prompt, usage, costs, limits, len(worthy_known), KNOWN_TOKENS),
    )
    made = worthy[: min(affordable, most - len(ends))]
    over_stops = max(0, len(worthy) - (most - len(ends)))
    left_out = LeftOut(over_stops, len(worthy) - len(made) - over_stops, len(known) + len(guesses) - len(worthy))
    stops = tuple(sorted([*made, *ends], key=lambda stop: stop.num_tokens))
    return Placement(stops, left_out, boundary_tokens, float(len(made) * costs.step_tokens))


def price_tokens(usage: StoreUsage, costs: Costs) -> float:
    """Minimum savings of a stop, in tokens. Infinite if a state is larger than the store."""
    if costs.state_bytes > usage.capacity_bytes:
        return float("inf")
    step_return = 1 + EXTRA_RETURN * usage.experience.extra_share
    return step_return * costs.step_tokens + costs.state_bytes * usage.experience.tokens_per_byte


def _known_stops(boundary_tokens: int, prompt: Prompt, displaced_tokens: float) -> list[Stop]:
    """Stops at known divergences: the junction, then branches, the deepest first because it saves most.

    Args:
        displaced_tokens: savings of other content with as many bytes as a state.
    """
    end = prompt.end_boundary(boundary_tokens)
    junction = prompt.junction_tokens // boundary_tokens * boundary_tokens
    reasons = {junction: StopReason.JUNCTION}
    for tokens in sorted(prompt.branches, reverse=True):
        reasons.setdefault(tokens // boundary_tokens * boundary_tokens, StopReason.BRANCH)
    resumed, share = prompt.resumed_tokens, prompt.reused_divergence_share

    def is_unproven(tokens: int) -> bool:
        return (prompt.is_divergence_unknown and tokens == junction) or share * (tokens - resumed) <= displaced_tokens

    return [Stop(tokens, reason, is_unproven(tokens)) for tokens, reason in reasons.items() if resumed < tokens < end]


def _end_stop(boundary_tokens: int, prompt: Prompt, price: float) -> list[Stop]:
    """The last boundary of the prompt, if the engine does not stop there by default. This stop is chosen first: without
    it a repeated prompt has no hit. It counts toward `max_stops`, but not toward `max_extra_share`."""
    end = prompt.end_boundary(boundary_tokens)
    if prompt.engine_stops_at_end or end <= prompt.resumed_tokens or price == float("inf"):
        return []
    return [Stop(end, StopReason.END)]


def _guesses(boundary_tokens: int, prompt: Prompt, usage: StoreUsage, base: int) -> list[tuple[int, float]]:
    """Boundaries after `base`, ascending, each with the expected number of requests that diverge there."""
    end = prompt.end_boundary(boundary_tokens)
    guesses = [
        (end - size * boundary_tokens, usage.experience.divergence_rate(index, end // boundary_tokens))
        for index, size in enumerate(DISTANCES)
        if end - size * boundary_tokens > base
    ]
    return guesses[::-1]


def spaced_stops(guesses: Sequence[tuple[int, float]], base: int, price: float) -> list[int]:
    """Returns the stops that save more than `price` tokens, the best first.

    A stop serves each request that diverges at it or after it, and before the next stop. It saves the tokens since the
    previous stop. The sum is submodular, so greedy selection is close to the optimum.

    Args:
        guesses: (boundary, expected number of requests that diverge there), ascending, all above `base`.
        base: boundary from which the savings are counted.
    """
    rates_before = [0.0, *accumulate(rate for _, rate in guesses)]
    chosen: list[int] = []  # indices in `guesses`
    while True:
        following, next_stops = len(guesses), [0] * len(guesses)
        for place in reversed(range(len(guesses))):
            next_stops[place] = following
            following = place if place in chosen else following
        best, best_saved, before = -1, price, base
        for place, (tokens, _) in enumerate(guesses):
            if place in chosen:
                before = tokens
                continue
            saved = (rates_before[next_stops[place]] - rates_before[place]) * (tokens - before)
            if saved > best_saved:
                best, best_saved = place, saved
        if best < 0:
            return [guesses[place][0] for place in chosen]
        chosen.append(best)


def _affordable(
    prompt: Prompt, usage: StoreUsage, costs: Costs, limits: Limits, num_wanted: int, more_tokens: int = 0
) -> int:
    """Number of stops within the limit on extra prefill, at most `num_wanted`, as if `more_tokens` more tokens had been
    computed."""
    if costs.step_tokens <= 0:
        return num_wanted
    experience = usage.experience
    computed = more_tokens + experience.computed_tokens + max(0, prompt.num_tokens - prompt.resumed_tokens)
    allowed = (limits.max_extra_share * computed - experience.extra_tokens) / costs.step_tokens
    return int(min(max(0.0, allowed), num_wanted))


def next_stop(placement: Placement, start_tokens: int) -> Stop | None:
    """The first stop after `start_tokens`, or None."""
    return next((stop for stop in placement.stops if stop.num_tokens > start_tokens), None)
