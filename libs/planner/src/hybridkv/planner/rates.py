"""Seconds per token, learned from what was seen: bounded, and fading with every new sight and with time.

A rate is a value; observing gives a new one. Time comes in as a parameter.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

KEPT_SHARE: Final = 0.8
"""What an observation leaves of the weight of all before it."""
FORGET_AFTER_S: Final = 120.0
"""A rate that was not seen for so long is not known any more: what it ruled out is tried again."""
MIN_SECONDS_PER_TOKEN: Final = 1e-9
MAX_SECONDS_PER_TOKEN: Final = 1.0


class Rate(msgspec.Struct, frozen=True):
    """Tokens and the seconds that they took, older ones counting less."""

    tokens: float = 0.0
    seconds: float = 0.0
    seen_at_s: float = -math.inf


UNKNOWN_RATE: Final = Rate()


def observe(rate: Rate, num_tokens: int, seconds: float, now_s: float) -> Rate:
    """The rate after `num_tokens` took `seconds`. What cannot be (no token, no finite time) changes nothing."""
    if num_tokens <= 0 or not math.isfinite(seconds) or not math.isfinite(now_s):
        return rate
    bounded = min(max(seconds, num_tokens * MIN_SECONDS_PER_TOKEN), num_tokens * MAX_SECONDS_PER_TOKEN)
    kept = KEPT_SHARE if seconds_per_token(rate, now_s) is not None else 0.0
    return Rate(rate.tokens * kept + num_tokens, rate.seconds * kept + bounded, now_s)


def seconds_per_token(rate: Rate, now_s: float) -> float | None:
    """What a token takes, or None: never seen, or too long ago."""
    if rate.tokens <= 0 or now_s - rate.seen_at_s > FORGET_AFTER_S:
        return None
    return min(max(rate.seconds / rate.tokens, MIN_SECONDS_PER_TOKEN), MAX_SECONDS_PER_TOKEN)
