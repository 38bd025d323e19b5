"""Choice between several stores for one request: a pure function of answers, weights and learned rates.

The module does no I/O, reads no clock and keeps no state. A rate is seconds per token, learned from observations; older
observations count less.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import msgspec

AUTO: Final = "auto"

Weight: TypeAlias = float | Literal["auto"]
"""Worth of a token of a store: positive and finite, or "auto": learned from the store's loads."""


class Unusable(enum.StrEnum):
    """Reason why a store has no usable answer."""

    RAISED = "raised"
    """The store raised an exception."""
    BARRED = "barred"
    """A load of this request from the store failed, so the store is not looked up again."""
    STORES_ONLY = "stores_only"
    """The store never loads, so it is not looked up."""


Answer: TypeAlias = int | Unusable | None
"""Tokens that a store can load (below 2**53; 0 or less: none), a reason for no answer, or None: needs more time."""


class Take(msgspec.Struct, frozen=True):
    """Load `tokens` from the store at position `child`."""

    child: int
    tokens: int


class Wait(msgspec.Struct, frozen=True):
    """Look up again later: these stores may still answer, and the wait is worth it."""

    children: tuple[int, ...]


class Pass(msgspec.Struct, frozen=True):
    """Load nothing: compute."""


Choice: TypeAlias = Take | Wait | Pass
PASS: Final = Pass()


class Rates(msgspec.Struct, frozen=True):
    """Learned rates in seconds per token; None: not known yet, or too old.

    Args:
        load_seconds_per_token: by position of the store; a store beyond the end has no known rate.
        prefill_seconds_per_token: time to compute a token instead.
    """

    load_seconds_per_token: tuple[float | None, ...] = ()
    prefill_seconds_per_token: float | None = None


UNKNOWN_RATES: Final = Rates()


def is_weight(value: object) -> bool:
    """True if a value can be the weight of a store."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return math.isfinite(value) and float(value) > 0
        except OverflowError:
            return False
    return value == AUTO


_NO_STORES: Final[Mapping[int, int]] = MappingProxyType({})


def choose(
    answers: Sequence[Answer],
    weights: Sequence[Weight],
    rates: Rates = UNKNOWN_RATES,
    *,
    may_wait: bool = True,
    soon: Mapping[int, int] = _NO_STORES,
) -> Choice:
    """Chooses the store with the highest score above zero; the first one on a tie. `Pass` if there is none.

    The score of a store with a weight is `tokens x weight`. With the weight "auto" it is the number of tokens that the
    load saves net: prefill seconds that the hit saves, minus seconds of the load, over the prefill seconds of one
    token. While either rate is unknown, it is the number of tokens.

    The choice is `Wait` only if `may_wait`, and in one of two cases: every usable store needs more time, or a store in
    `soon` without an answer could still have the highest score. An `Unusable` store has no part in the choice.

    Args:
        answers: answer of each store.
        weights: weight of each store.
        rates: learned rates, for stores with the weight "auto".
        may_wait: there is time left.
        soon: stores that answer in bounded time, by position, with the maximum number of tokens of each.

    Raises:
        ValueError: the number of weights is not the number of answers.
    """
    if len(answers) != len(weights):
        raise ValueError(f"expected a weight for each of {len(answers)} answers, got {len(weights)}")
    best: Take | None = None
    best_score = 0.0
    for child, answer in enumerate(answers):
        if isinstance(answer, int) and answer > 0:
            weight = weights[child]
            score = net_tokens(answer, child, rates) if isinstance(weight, str) else answer * weight
            if score > best_score:
                best, best_score = Take(child, answer), score
    if may_wait:
        better = tuple(
            child
            for child, most in soon.items()
            if answers[child] is None and most * _worth(weights[child]) > best_score
        )
        if better:
            return Wait(better)
    if best is not None:
        return best
    pending = tuple(child for child, answer in enumerate(answers) if answer is None)
    if pending and may_wait and not any(isinstance(answer, int) for answer in answers):
        return Wait(pending)
    return PASS


def _worth(weight: Weight) -> float:
    """Highest score of one token."""
    return 1.0 if isinstance(weight, str) else weight


def net_tokens(tokens: int, child: int, rates: Rates) -> float:
    """Tokens that a load saves, minus the tokens computed in the time of the load; negative: computing is faster.

    `tokens` while a rate is unknown.
    """
    prefill = rates.prefill_seconds_per_token
    load = rates.load_seconds_per_token[child] if child < len(rates.load_seconds_per_token) else None
    if load is None or prefill is None or not prefill > 0:
        return float(tokens)
    return tokens * (1.0 - load / prefill)


KEPT_SHARE: Final = 0.8
"""Factor on the weight of all earlier observations, for each new one."""
FORGET_AFTER_S: Final = 120.0
"""A rate without an observation for this long is unknown again, so that rejected options are retried."""
MIN_SECONDS_PER_TOKEN: Final = 1e-9
MAX_SECONDS_PER_TOKEN: Final = 1.0


class Rate(msgspec.Struct, frozen=True):
    """Weighted sums of tokens and of their seconds."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen_at_s: float = -math.inf


UNKNOWN_RATE: Final = Rate()


def observe(rate: Rate, num_tokens: int, seconds: float, now_s: float) -> Rate:
    """Rate after `num_tokens` took `seconds`, which are clamped to the bounds of a rate.

    Unchanged without tokens, or if a time is not finite. A rate that is unknown again begins anew.
    """
    if num_tokens <= 0 or not math.isfinite(seconds) or not math.isfinite(now_s):
        return rate
    bounded = min(max(seconds, num_tokens * MIN_SECONDS_PER_TOKEN), num_tokens * MAX_SECONDS_PER_TOKEN)
    kept = KEPT_SHARE if seconds_per_token(rate, now_s) is not None else 0.0
    return Rate(rate.tokens * kept + num_tokens, rate.seconds * kept + bounded, now_s)


def seconds_per_token(rate: Rate, now_s: float) -> float | None:
    """Seconds per token. None if never observed, or too long ago."""
    if rate.tokens <= 0 or now_s - rate.seen_at_s > FORGET_AFTER_S:
        return None
    return min(max(rate.seconds / rate.tokens, MIN_SECONDS_PER_TOKEN), MAX_SECONDS_PER_TOKEN)
