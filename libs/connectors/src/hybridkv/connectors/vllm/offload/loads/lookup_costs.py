"""Costs of a wait for async lookups, and the shortest hits that are worth the wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.offload.loads.prefill_speed import PrefillSpeed
from hybridkv.planner import GroupKind, needed_parts
from hybridkv.planner.life import break_even_tokens
from hybridkv.planner.stages import LookupWait
from hybridkv.tiers.stack import TierStack

logger = logging.getLogger("vllm.hybridkv.scheduler")

_MANY_CHUNKS = 1024
"""Length of a hit, in chunks. A longer hit needs no more windows and states."""


CHECK_EVERY_S: Final = 1.0
"""Shortest time between two checks of the break-even lengths."""
LOG_AGAIN_S: Final = 60.0
"""Shortest time between two log lines about one tier."""
LOG_FACTOR: Final = 2.0
"""A break-even length is logged again when it has changed by more than this factor, or when requests begin or cease to
wait for lookups."""


def _bytes_of_hit(layout: CacheLayout) -> tuple[float, int]:
    """Bytes of one rank that a hit loads: for each token, and for windows and states."""
    spec = layout.spec
    size, full = layout.largest_chunk_bytes, GroupKind.FULL
    parts = needed_parts(spec, _MANY_CHUNKS * spec.chunk_tokens, 0)
    fixed = sum(size(group) for group, _ in parts if spec.groups[group].kind is not full)
    growing = sum(size(group) for group in spec.stored_groups if spec.groups[group].kind is full)
    return growing / spec.chunk_tokens, fixed


class LookupCosts:
    """Expected costs of a wait for async lookups, from the measured tiers and the prefill speed.

    Args:
        layout: the model's groups.
        stack: the tiers.
        prefill_speed: measured prefill time.
        clock: time in seconds.
    """

    def __init__(
        self, layout: CacheLayout, stack: TierStack, prefill_speed: PrefillSpeed, clock: Callable[[], float]
    ) -> None:
        self._stack = stack
        self._has_async_lookups = stack.has_async_lookups
        self._prefill_speed = prefill_speed
        self._break_even = BreakEvenLog(clock)
        self._bytes_per_token, self._fixed_bytes = _bytes_of_hit(layout)
        self._expected: tuple[float, float] | None = None
        """`TierStack.expected_lookup_times` in this step."""

    def begin_step(self) -> None:
        """Called when a step is planned. Logs the break-even lengths if a check is due."""
        self._expected = None
        if self._has_async_lookups and self._prefill_speed.is_known and self._break_even.is_due():
            for name, measured in self._stack.measured_lookups().items():
                self._break_even.record(name, self._wait_of(*measured), self._prefill_speed.seconds_per_token)

    def wait(self) -> LookupWait | None:
        """Expected cost and gain of a wait; None if no tier accepts lookups. Measured values are read once a step."""
        timeout_s = self._stack.lookup_wait_s
        if not timeout_s:
            return None
        if self._expected is None:
            self._expected = self._stack.expected_lookup_times()
        return self._wait_of(timeout_s, *self._expected)

    def _wait_of(self, timeout_s: float, answer_s: float, read_s_per_byte: float) -> LookupWait:
        saved_s = self._prefill_speed.seconds_per_token - self._bytes_per_token * read_s_per_byte
        return LookupWait(timeout_s, answer_s, self._fixed_bytes * read_s_per_byte, saved_s)


class BreakEvenLog:
    """Log of the break-even lengths: for each tier with async lookups, the shortest hit that a request waits for.

    Logs nothing until the tier has answered and the prefill speed is known. `hybridkv explain` shows the last line of
    each tier.

    Args:
        clock: time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_s = clock()
        self._logged: dict[str, tuple[int | None, float]] = {}
        """Last logged length of each tier, and its time."""

    def is_due(self) -> bool:
        """Whether a check is due: `CHECK_EVERY_S` after the last call that returned True."""
        now_s = self._clock()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + CHECK_EVERY_S
        return True

    def record(self, tier: str, wait: LookupWait, compute_s_per_token: float) -> None:
        """Logs the break-even length of a tier, if it is new or has changed much.

        Args:
            tier: name of the tier.
            wait: measured wait for the tier.
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
