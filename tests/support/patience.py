"""How long a test waits for what must come. A slow machine makes a run long, and turns no test red.

A deadline of a test is here alone: ten times what the wait takes on a quiet machine, and longer on one that is slower
than that when the test begins. It ends a wait that would not end; it is no claim about speed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

MARGIN: Final = 10.0
"""Of every deadline. A machine that was quiet when a test began may be busy in its middle."""
MOST_SLOWNESS: Final = 10.0
"""Beyond it no more is allowed, or a test that hangs ends long after its reader."""

_ROUNDS: Final = 500_000
_QUIET_S: Final = 0.05
"""What the rounds take on the machine of which expectations are said, when it is quiet."""
_POLL_S: Final = 0.005


@functools.cache
def slowness() -> float:
    """By how much this machine is slower than a quiet one. Measured once in each process."""
    began_s = time.monotonic()
    total = 0
    for number in range(_ROUNDS):
        total += number & 7
    return min(max((time.monotonic() - began_s) / _QUIET_S, 1.0), MOST_SLOWNESS)


def seconds(expected_s: float) -> float:
    """The deadline of what takes `expected_s` on a quiet machine."""
    return expected_s * MARGIN * slowness()


def wait_until(is_so: Callable[[], object], what: str, expected_s: float = 10.0) -> None:
    """Wait for what another thread or process does. AssertionError with `what` where it does not come."""
    until_s = time.monotonic() + seconds(expected_s)
    while not is_so():
        assert time.monotonic() < until_s, f"not in {seconds(expected_s):.0f} s: {what}"
        time.sleep(_POLL_S)


__all__ = ["seconds", "slowness", "wait_until"]
