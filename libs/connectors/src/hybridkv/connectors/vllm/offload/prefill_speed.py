"""Measured time in which the engine computes one token of a prompt."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Final

FIRST_TOKENS_PER_S: Final = 10_000.0
"""Assumed speed before the first measured step."""
MIN_REQUEST_TOKENS: Final = 16
"""A request with fewer tokens in a step decodes."""
MIN_STEP_TOKENS: Final = 64
"""Steps with fewer tokens of prompts are not measured: overhead would dominate."""
NUM_STEPS: Final = 15
"""Steps in the median. One slow step, such as the first, does not change it."""
MAX_IN_FLIGHT: Final = 8
"""More steps without an output mean that outputs were lost."""


class PrefillSpeed:
    """Median over the last steps that computed prompts.

    Args:
        clock: time in seconds.
        tokens_per_s: speed that the operator set; nothing is measured then. None measures.
    """

    def __init__(self, clock: Callable[[], float], tokens_per_s: float | None = None) -> None:
        self._clock = clock
        self._is_fixed = tokens_per_s is not None
        self.seconds_per_token = 1 / (tokens_per_s or FIRST_TOKENS_PER_S)
        self._steps: deque[tuple[float, int]] = deque()
        """Start and tokens of prompts of each step in flight."""
        self._last_end_s = 0.0
        self._samples: deque[float] = deque(maxlen=NUM_STEPS)

    def on_planned(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """A step was planned, with so many tokens of each request."""
        if self._is_fixed:
            return
        if len(self._steps) >= MAX_IN_FLIGHT:
            self._steps.clear()
        num_tokens = sum(number for number in num_scheduled_tokens.values() if number >= MIN_REQUEST_TOKENS)
        self._steps.append((self._clock(), num_tokens))

    def on_output(self) -> None:
        """The oldest step in flight has ended. With asynchronous scheduling it began when the step before it ended."""
        if not self._steps:
            return
        planned_s, num_tokens = self._steps.popleft()
        now_s = self._clock()
        if num_tokens >= MIN_STEP_TOKENS:
            self._samples.append((now_s - max(planned_s, self._last_end_s)) / num_tokens)
            self.seconds_per_token = median(self._samples)
        self._last_end_s = now_s
