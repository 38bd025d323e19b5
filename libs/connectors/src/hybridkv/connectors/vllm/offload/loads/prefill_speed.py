"""Measured prefill time of one token."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Final

FIRST_TOKENS_PER_S: Final = 10_000.0
"""Assumed speed before the first measured step."""
MIN_REQUEST_TOKENS: Final = 16
"""A request with fewer tokens in a step counts as decoding."""
MIN_STEP_TOKENS: Final = 64
"""Steps with fewer tokens of prompts are not measured: overhead would dominate."""
NUM_STEPS: Final = 15
"""Number of steps in the median. With three or more steps, one slow step hardly changes it."""
MAX_IN_FLIGHT: Final = 8
"""Maximum number of measured steps without an output. The oldest are forgotten."""


class PrefillSpeed:
    """Median prefill time of one token over the last measured steps, or the time that the operator set. A worker
    returns the number of a measured step.

    Args:
        clock: time in seconds.
        tokens_per_s: speed that the operator set; None: the speed is measured.
    """

    def __init__(self, clock: Callable[[], float], tokens_per_s: float | None = None) -> None:
        self._clock = clock
        self._is_fixed = tokens_per_s is not None
        self.seconds_per_token = 1 / (tokens_per_s or FIRST_TOKENS_PER_S)
        self._number = 0
        self._steps: dict[int, tuple[float, int]] = {}
        """Start and tokens of prompts of each measured step in flight, by its number."""
        self._last_end_s = 0.0
        self._samples: deque[float] = deque(maxlen=NUM_STEPS)

    @property
    def is_known(self) -> bool:
        """Whether the speed is known: measured, or set by the operator."""
        return self._is_fixed or bool(self._samples)

    def on_planned(self, num_scheduled_tokens: Mapping[str, int]) -> int:
        """Called when a step is planned. Returns its number; 0 if it is not measured."""
        if self._is_fixed:
            return 0
        num_tokens = sum(number for number in num_scheduled_tokens.values() if number >= MIN_REQUEST_TOKENS)
        if num_tokens < MIN_STEP_TOKENS:
            return 0
        self._number += 1
        self._steps[self._number] = (self._clock(), num_tokens)
        if len(self._steps) > MAX_IN_FLIGHT:
            del self._steps[next(iter(self._steps))]
        return self._number

    def on_output(self, measured_step: int) -> None:
        """Called when a step has ended; with 0 if it was not measured.

        A step that was planned ahead began at the end of the last step.
        """
        now_s = self._clock()
        step = self._steps.pop(measured_step, None)
        if step is not None:
            planned_s, num_tokens = step
            self._samples.append((now_s - max(planned_s, self._last_end_s)) / num_tokens)
            self.seconds_per_token = median(self._samples)
        self._last_end_s = now_s
