"""Which of several stores a request loads from. Pure: answers, weights and learned rates in, a choice out.

Asks nobody, reads no clock and remembers nothing; `rates.py` says how rates are learned.
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
"""What a token of a store is worth: positive and finite, or learned from its loads."""


class Unusable(enum.StrEnum):
    """Why a store's answer is no answer."""

    RAISED = "raised"
    """It raised when it was asked."""
    BARRED = "barred"
    """Its load for this request failed; it was not asked again."""
    STORES_ONLY = "stores_only"
    """It never loads; it was not asked."""


Answer: TypeAlias = int | Unusable | None
"""Tokens that a store can load (below 2**53; 0 or less: none), why it is of no use, or None: it needs more time."""


class Take(msgspec.Struct, frozen=True):
    """Load `tokens` from this store, by its position."""

    child: int
    tokens: int


class Wait(msgspec.Struct, frozen=True):
    """Ask again: these may yet answer, and it is worth it."""

    children: tuple[int, ...]


class Pass(msgspec.Struct, frozen=True):
    """Load nothing: compute."""


Choice: TypeAlias = Take | Wait | Pass
PASS: Final = Pass()


class Rates(msgspec.Struct, frozen=True):
    """What was learned, in seconds per token; None is not known (yet, or any more).

    Args:
        load_seconds_per_token: by position of the store; a store beyond the end is not known.
        prefill_seconds_per_token: of computing a token instead.
    """

    load_seconds_per_token: tuple[float | None, ...] = ()
    prefill_seconds_per_token: float | None = None


UNKNOWN_RATES: Final = Rates()


def is_weight(value: object) -> bool:
    """Whether a value can be a store's weight."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return math.isfinite(value) and float(value) > 0
        except OverflowError:
            return False
    return value == AUTO


_NOBODY: Final[Mapping[int, int]] = MappingProxyType({})


def choose(
    answers: Sequence[Answer],
    weights: Sequence[Weight],
    rates: Rates = UNKNOWN_RATES,
    *,
    may_wait: bool = True,
    soon: Mapping[int, int] = _NOBODY,
) -> Choice:
    """The store with the highest score above zero; the first of them on a tie.

    A weighted store scores `tokens x weight`. A store that is weighted "auto" scores the prefill seconds that a hit
    saves minus the seconds that its load takes, over the prefill seconds of one token: the tokens that it saves net,
    so that both kinds compare. While either rate is unknown that is all its tokens.

    A store that needs more time holds up nobody who has answered, with tokens or with none: only if every store that
    is of use needs more time and `may_wait`, the choice is to wait. What is `Unusable` has not answered. A store that
    answers `soon` is waited for beside others, too, where it could still be the best.

    Args:
        answers: of each store.
        weights: of each store.
        rates: what was learned of those that are weighted "auto".
        may_wait: whether there is time left.
        soon: stores that bound the time of their answer themselves, by position, with the most tokens that one of them
            could have.

    Raises:
        ValueError: there are not as many weights as answers.
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
    """Of a token at most."""
    return 1.0 if isinstance(weight, str) else weight


def net_tokens(tokens: int, child: int, rates: Rates) -> float:
    """Tokens that a load saves beyond those that could be computed while it runs; negative: computing is faster."""
    prefill = rates.prefill_seconds_per_token
    load = rates.load_seconds_per_token[child] if child < len(rates.load_seconds_per_token) else None
    if load is None or prefill is None or not prefill > 0:
        return float(tokens)
    return tokens * (1.0 - load / prefill)
