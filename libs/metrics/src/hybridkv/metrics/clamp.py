"""Token counts that came out below zero, taken as zero and said aloud. A counter that goes backwards raises in the
metrics loop of an engine; accounting skew is no reason to end it. Counts nothing else and reads no clock of its own."""

from __future__ import annotations

from collections.abc import Callable

WARNING_INTERVAL_S = 60.0


class TokenClamp:
    """Clamps at zero, and warns at most once an interval.

    Args:
        warn: takes a sentence with the numbers.
        clock: seconds that only grow.
        interval_s: between two warnings; what is clamped meanwhile is in the next one.
    """

    def __init__(
        self, warn: Callable[[str], None], clock: Callable[[], float], interval_s: float = WARNING_INTERVAL_S
    ) -> None:
        self._warn = warn
        self._clock = clock
        self._interval_s = interval_s
        self._warned_at_s: float | None = None
        self._num_clamped = 0
        self._below_zero: float = 0

    def clamp(self, source: str, value: float) -> tuple[float, float]:
        """(`value`, 0) from zero on; (0, how far below zero it is) otherwise."""
        if value >= 0:
            return value, 0
        self._num_clamped += 1
        self._below_zero -= value
        now_s = self._clock()
        if self._warned_at_s is None or now_s - self._warned_at_s >= self._interval_s:
            self._warned_at_s = now_s
            self._warn(
                f"{source} counted {value} tokens, taken as 0; {self._num_clamped} counts were below zero since the "
                f"last such warning, {-self._below_zero} tokens together"
            )
            self._num_clamped, self._below_zero = 0, 0
        return 0, -value
