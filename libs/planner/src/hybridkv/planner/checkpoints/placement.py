"""Which boundaries of a prompt get a state, and the next of them.

Where the store has seen requests part, a state is as good as asked for: those come first. What remains is a guess, and
has to pay: a stop must promise more tokens than its step and its bytes cost. Each stop is the one that promises most
beside those before it, so that higher costs or tighter limits end the same row of stops earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from hybridkv.planner.checkpoints.experience import DOUBTED_PARTINGS, RUNGS
from hybridkv.planner.checkpoints.values import (
    Costs,
    LeftOut,
    Limits,
    Market,
    Placement,
    Prompt,
    Stop,
    StopReason,
)

EXTRA_RETURN: Final = 150
"""A stop must promise what its step costs, and so many times that for the whole share of prefill that stops took of
late: four times in all at the fiftieth part that is allowed by default. So good ones find some of it left."""

KNOWN_TOKENS: Final = 1 << 16
"""Stops where requests have parted are allowed as if so much more had been computed: 20 of 64 tokens beyond a share of
a fiftieth. So the second of a few short prompts that share a beginning leaves its state on a fresh store, too."""


def plan_stops(boundary_tokens: int, prompt: Prompt, market: Market, costs: Costs, limits: Limits) -> Placement:
    """The stops of a prompt, ascending: multiples of `boundary_tokens` above what is resumed and below its last one,
    which is one of them where the engine does not stop there of itself.

    Raises:
        ValueError: `boundary_tokens` is not positive.
    """
    if boundary_tokens <= 0:
        raise ValueError(f"boundary_tokens must be positive, got {boundary_tokens}")
    price = price_tokens(market, costs)
    known = _known_stops(boundary_tokens, prompt, costs.state_bytes * market.experience.tokens_per_byte)
    worthy_known = [stop for stop in known if stop.num_tokens - prompt.resumed_tokens >= price]
    base = max(stop.num_tokens for stop in known) if known else prompt.held_tokens(boundary_tokens)
    guesses = _guesses(boundary_tokens, prompt, market, base)
    is_doubted = max(market.experience.partings) <= DOUBTED_PARTINGS
    spaced = [Stop(tokens, StopReason.SPACED, is_doubted) for tokens in spaced_stops(guesses, base, price)]
    if not market.has_room(costs):
        worthy_known = [stop for stop in worthy_known if not stop.is_unproven]
        spaced = [stop for stop in spaced if not stop.is_unproven]
    worthy = [*worthy_known, *spaced]
    most = max(0, limits.max_stops)
    ends = _end_stop(boundary_tokens, prompt, price)[:most]
    affordable = max(
        _affordable(prompt, market, costs, limits, len(worthy)),
        _affordable(prompt, market, costs, limits, len(worthy_known), KNOWN_TOKENS),
    )
    made = worthy[: min(affordable, most - len(ends))]
    over_stops = max(0, len(worthy) - (most - len(ends)))
    left_out = LeftOut(over_stops, len(worthy) - len(made) - over_stops, len(known) + len(guesses) - len(worthy))
    stops = tuple(sorted([*made, *ends], key=lambda stop: stop.num_tokens))
    return Placement(stops, left_out, boundary_tokens, float(len(made) * costs.step_tokens))


def price_tokens(market: Market, costs: Costs) -> float:
    """What a stop must save to be worth it, in tokens: infinite where the store has no room for a state at all."""
    if costs.state_bytes > market.capacity_bytes:
        return float("inf")
    step_return = 1 + EXTRA_RETURN * market.experience.extra_share
    return step_return * costs.step_tokens + costs.state_bytes * market.experience.tokens_per_byte


def _known_stops(boundary_tokens: int, prompt: Prompt, displaced_tokens: float) -> list[Stop]:
    """Where requests have parted: the junction, then branches, the deepest first, for it saves most.

    Args:
        displaced_tokens: what others save with the bytes of a state.
    """
    end = prompt.end_boundary(boundary_tokens)
    junction = prompt.junction_tokens // boundary_tokens * boundary_tokens
    reasons = {junction: StopReason.JUNCTION}
    for tokens in sorted(prompt.branches, reverse=True):
        reasons.setdefault(tokens // boundary_tokens * boundary_tokens, StopReason.BRANCH)
    resumed, share = prompt.resumed_tokens, prompt.known_share

    def is_unproven(tokens: int) -> bool:
        return (prompt.is_cut and tokens == junction) or share * (tokens - resumed) <= displaced_tokens

    return [Stop(tokens, reason, is_unproven(tokens)) for tokens, reason in reasons.items() if resumed < tokens < end]


def _end_stop(boundary_tokens: int, prompt: Prompt, price: float) -> list[Stop]:
    """The prompt's last boundary, if the engine does not stop there of itself. It is taken first and is no part of the
    share, as little as the engine's own last stop: without it a prompt that comes again hits nothing."""
    end = prompt.end_boundary(boundary_tokens)
    if prompt.keeps_end or end <= prompt.resumed_tokens or price == float("inf"):
        return []
    return [Stop(end, StopReason.END)]


def _guesses(boundary_tokens: int, prompt: Prompt, market: Market, base: int) -> list[tuple[int, float]]:
    """Boundaries behind `base`, ascending, and how many requests are expected to part there."""
    end = prompt.end_boundary(boundary_tokens)
    guesses = [
        (end - size * boundary_tokens, market.experience.parting_rate(rung, end // boundary_tokens))
        for rung, size in enumerate(RUNGS)
        if end - size * boundary_tokens > base
    ]
    return guesses[::-1]


def spaced_stops(guesses: Sequence[tuple[int, float]], base: int, price: float) -> list[int]:
    """The stops that are worth more than `price` tokens, the best first.

    A stop saves, for each request that parts at it or behind it and before the next stop, the tokens from the stop
    before it on. That is a sum with diminishing returns, for which taking the best one again and again is close to the
    optimum.

    Args:
        guesses: (boundary, requests that are expected to part there), ascending, all above `base`.
        base: where there is a state already.
    """
    rates_before = [0.0, *accumulate(rate for _, rate in guesses)]
    chosen: list[int] = []  # places in `guesses`
    while True:
        behind, next_stops = len(guesses), [0] * len(guesses)
        for place in reversed(range(len(guesses))):
            next_stops[place] = behind
            behind = place if place in chosen else behind
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
    prompt: Prompt, market: Market, costs: Costs, limits: Limits, num_wanted: int, more_tokens: int = 0
) -> int:
    """How many stops the share of extra prefill allows, if so many more tokens had been computed."""
    if costs.step_tokens <= 0:
        return num_wanted
    experience = market.experience
    computed = more_tokens + experience.computed_tokens + max(0, prompt.num_tokens - prompt.resumed_tokens)
    allowed = (limits.max_extra_share * computed - experience.extra_tokens) / costs.step_tokens
    return int(min(max(0.0, allowed), num_wanted))


def next_stop(placement: Placement, start_tokens: int) -> Stop | None:
    """The first stop above `start_tokens`, or None."""
    return next((stop for stop in placement.stops if stop.num_tokens > start_tokens), None)
