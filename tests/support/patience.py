"""How long tests wait. A slow machine makes a run longer but does not make tests fail.

All deadlines of tests come from here: ten times what the wait takes on a quiet machine, and longer if the machine is
slow when the test begins. A deadline ends a wait that would hang; it does not measure speed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Final

MARGIN: Final = 10.0
"""Factor for every deadline. A machine that is quiet when a test begins may be busy later."""
MOST_SLOWNESS: Final = 10.0
"""Upper limit, so that a test that hangs ends in reasonable time."""

_ROUNDS: Final = 500_000
_QUIET_S: Final = 0.05
"""How long the rounds take on the reference machine when it is quiet."""
_POLL_S: Final = 0.005


@functools.cache
def slowness() -> float:
    """How many times slower this machine is than a quiet one. Measured once in each process."""
    began_s = time.monotonic()
    total = 0
    for number in range(_ROUNDS):
        total += number & 7
    return min(max((time.monotonic() - began_s) / _QUIET_S, 1.0), MOST_SLOWNESS)


def seconds(expected_s: float) -> float:
    """The deadline for something that takes `expected_s` on a quiet machine."""
    return expected_s * MARGIN * slowness()


def wait_until(is_so: Callable[[], object], what: str, expected_s: float = 10.0) -> None:
    """Wait until `is_so()` is true. Raises AssertionError with `what` on a timeout."""
    until_s = time.monotonic() + seconds(expected_s)
    while not is_so():
        assert time.monotonic() < until_s, f"not after {seconds(expected_s):.0f} s: {what}"
        time.sleep(_POLL_S)


__all__ = ["seconds", "slowness", "wait_until"]
