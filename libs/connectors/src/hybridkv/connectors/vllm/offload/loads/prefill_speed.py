"""Measured time in which the engine computes one token of a prompt, and the prompts that are worth a wait by it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Final

from hybridkv.planner.life import break_even_tokens
from hybridkv.planner.stages import LookupWait

logger = logging.getLogger("vllm.hybridkv.scheduler")

FIRST_TOKENS_PER_S: Final = 10_000.0
"""Assumed speed before the first measured step."""
MIN_REQUEST_TOKENS: Final = 16
"""A request with fewer tokens in a step decodes."""
MIN_STEP_TOKENS: Final = 64
"""Steps with fewer tokens of prompts are not measured: overhead would dominate."""
NUM_STEPS: Final = 15
"""Steps in the median. From the third on, one slow step does not change it."""
MAX_IN_FLIGHT: Final = 8
"""The oldest measured steps without an output are forgotten."""
BREAK_EVEN_S: Final = 1.0
"""Shortest time between two checks of the break-even lengths."""
LOG_AGAIN_S: Final = 60.0
"""Shortest time between two lines about one tier."""
LOG_FACTOR: Final = 2.0
"""A break-even length is logged again when it has changed by more than this factor."""


class PrefillSpeed:
    """Median over the last steps that computed prompts. A worker returns the number of each measured step.

    Args:
        clock: time in seconds.
        tokens_per_s: speed that the operator set; nothing is measured then. None measures.
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
    def is_measured(self) -> bool:
        """Whether the speed is known: measured, or set by the operator."""
        return self._is_fixed or bool(self._samples)

    def on_planned(self, num_scheduled_tokens: Mapping[str, int]) -> int:
        """A step was planned, with so many tokens of each request. Returns its number; 0 if it is not measured."""
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
        """A step has ended; 0 if it was not measured. If it was planned ahead, it began at the end of the last one."""
        now_s = self._clock()
        step = self._steps.pop(measured_step, None)
        if step is not None:
            planned_s, num_tokens = step
            self._samples.append((now_s - max(planned_s, self._last_end_s)) / num_tokens)
            self.seconds_per_token = median(self._samples)
        self._last_end_s = now_s


class BreakEvenLog:
    """Logs, for each tier with async lookups, the shortest hit that a request waits for. Silent until the tier has
    answered and the prefill speed is measured. `hybridkv explain` shows the last line of each tier.

    Args:
        clock: time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_s = clock()
        self._logged: dict[str, tuple[int | None, float]] = {}
        """Last logged length of each tier, and its time."""

    def is_due(self) -> bool:
        """Whether a second has passed since the last True."""
        now_s = self._clock()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + BREAK_EVEN_S
        return True

    def record(self, tier: str, wait: LookupWait, compute_s_per_token: float) -> None:
        """Logs the break-even length of a tier, if it is new or has changed much.

        Args:
            tier: name of the tier.
            wait: its measured wait.
            compute_s_per_token: measured prefill time.
        """
        tokens, now_s = break_even_tokens(wait), self._clock()
        if tier in self._logged:
            last, logged_s = self._logged[tier]
            if now_s < logged_s + LOG_AGAIN_S or last == tokens:
                return
            if last and tokens and last / LOG_FACTOR <= tokens <= last * LOG_FACTOR:
                return
        self._logged[tier] = tokens, now_s
        read_s_per_token = compute_s_per_token - wait.saved_s_per_token
        read_ms, compute_ms = 1e3 * (wait.read_s + 1e3 * read_s_per_token), 1e6 * compute_s_per_token
        costs = (
            f"an answer takes {1e3 * wait.answer_s:.1f} ms, a hit of 1,000 tokens {read_ms:.1f} ms to read and "
            f"{compute_ms:.1f} ms to compute"
        )
        if tokens is None:
            logger.info("break-even of %s: no request waits for a lookup (%s)", tier, costs)
        else:
            logger.info(
                "break-even of %s: requests wait for hits of %d tokens or more (%s); shorter ones are found if the "
                "answer comes while the request is queued",
                tier,
                tokens,
                costs,
            )
