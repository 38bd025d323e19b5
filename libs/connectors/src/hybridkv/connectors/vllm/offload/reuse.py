"""Estimated hits with host memory of other sizes, as gauges and as a log line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from hybridkv.connectors.config import format_size
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.connectors.vllm.common.requests import TrackedRequest, state_groups
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.metrics import ReuseEstimator, ReuseReport
from hybridkv.planner import GroupKind, last_boundary
from hybridkv.tiers.stack import TierStack

logger = logging.getLogger("vllm.hybridkv.scheduler")

MULTIPLES: Final = (0.25, 0.5, 1, 2, 4, 8)
"""Sizes of host memory, as multiples of the configured one."""
REPORTED_SHARE: Final = 0.95
"""Share of the reused tokens for which the needed size of host memory is reported."""
RECORD_S: Final = 1.0
"""Shortest time between two estimates for the gauges."""
LOG_S: Final = 3600.0
"""Shortest time between two log lines, except the line at shutdown. Counts are halved as often."""


class ReuseMeter:
    """Passes the requests of one engine to the estimator, and reports the estimate.

    Counts whole chunks of the prompt. States at boundaries inside a chunk do not count. An error switches the meter off
    and does not reach the engine.

    Args:
        layout: the model's groups.
        stack: the tiers.
        metrics: the connector's metrics.
        clock: time in seconds.
    """

    def __init__(
        self, layout: CacheLayout, stack: TierStack, metrics: ConnectorMetrics, clock: Callable[[], float]
    ) -> None:
        self._spec, self._num_ranks = layout.spec, layout.world_size
        self._metrics = metrics
        self._clock = clock
        chunk_tokens, states = self._spec.chunk_tokens, state_groups(self._spec)
        attention = [index for index in self._spec.stored_groups if index not in states]
        full = [index for index in attention if self._spec.groups[index].kind is GroupKind.FULL]
        self._attention = next(iter([*full, *attention]), None)
        self._states = next(iter(states), None)

        def size(groups: list[int] | tuple[int, ...]) -> int:
            return sum(stack.primary.cost(layout.chunk_bytes(index, chunk_tokens)) for index in groups)

        self._capacity_bytes = stack.primary.capacity_bytes
        self._estimator = ReuseEstimator(self._capacity_bytes, size(attention), chunk_tokens, size(states))
        self._admitted: set[str] = set()
        self._is_on = True
        self._is_changed = False
        self._estimate: tuple[dict[str, float], int] | None = None
        """Values of the gauges; None before the first estimate."""
        self._recorded_s = self._logged_s = clock()

    def on_admitted(self, tracked: TrackedRequest) -> None:
        """Measures a prompt at its first admission."""
        self._try(lambda: self._measure(tracked))

    def on_request_finished(self, tracked: TrackedRequest) -> None:
        """Records the chunks of an ended request as used."""
        self._try(lambda: self._use(tracked))

    def record(self) -> None:
        """Sets the gauges, with a new estimate every `RECORD_S`, and logs the estimate every `LOG_S`, at most."""
        self._try(self._record)

    def log(self) -> None:
        """Logs the estimate, if any prompt was seen."""
        self._try(self._log)

    def _try(self, action: Callable[[], None]) -> None:
        if not self._is_on:
            return
        try:
            action()
        except Exception:
            self._is_on = False
            logger.exception("the estimate of reuse failed and is switched off")

    def _measure(self, tracked: TrackedRequest) -> None:
        if tracked.request_id in self._admitted:
            return
        self._admitted.add(tracked.request_id)
        num_tokens, keys = tracked.request.num_prompt_tokens, tracked.keys()
        num_chunks = last_boundary(self._spec, num_tokens) // self._spec.chunk_tokens
        chunks, states = (
            keys.between(group, 0, num_chunks) if group is not None and num_chunks else ()
            for group in (self._attention, self._states)
        )
        self._estimator.count_prompt(num_tokens, chunks, states)

    def _use(self, tracked: TrackedRequest) -> None:
        self._admitted.discard(tracked.request_id)
        chunk_tokens, keys = self._spec.chunk_tokens, tracked.chain.keys
        if keys:
            whole = [(part[0], key) for part, key in keys.items() if part[1] % chunk_tokens == 0]
            chunks = [key for group, key in whole if group == self._attention]
            self._estimator.record_use(chunks, [key for group, key in whole if group == self._states])
            self._is_changed = True

    def _record(self) -> None:
        now_s = self._clock()
        if self._is_changed and now_s - self._recorded_s >= RECORD_S:
            self._is_changed, self._recorded_s = False, now_s
            report = self._estimator.report()
            if report.prompt_tokens:
                self._estimate = self._shares(report), self._needed_bytes(report)
        if self._estimate is not None:
            self._metrics.reuse(*self._estimate)
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            self._log()
            self._estimator.fade()

    def _log(self) -> None:
        report = self._estimator.report()
        if not report.prompt_tokens:
            return
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self._shares(report).items())
        needed = self._needed_bytes(report)
        most = f"; {format_size(needed)} would restore most of what prompts share" if needed else ""
        metrics = self._metrics
        logger.info(
            "reuse of %d prompt tokens, by size of host memory (1x is %s): %s%s; so far %d tokens were restored, which "
            "saved %.0f s of prefill, and requests waited %.1f s",
            report.prompt_tokens,
            format_size(self._capacity_bytes * self._num_ranks),
            shares,
            most,
            metrics.restored_tokens,
            metrics.saved_s,
            metrics.waited_s,
        )

    def forget(self) -> None:
        """Forgets all chunks, after the tiers were cleared."""
        self._estimator.forget_chunks()

    def _shares(self, report: ReuseReport) -> dict[str, float]:
        sizes = {f"{multiple:g}x": self._capacity_bytes * multiple for multiple in MULTIPLES}
        tokens = {name: report.restored_tokens(num_bytes) for name, num_bytes in sizes.items()}
        tokens["unbounded"] = report.reused_tokens
        return {name: number / report.prompt_tokens for name, number in tokens.items()}

    def _needed_bytes(self, report: ReuseReport) -> int:
        """Size of host memory, over all ranks, that restores `REPORTED_SHARE` of the reused tokens. 0 if nothing is
        reused, or if the size is above all measured sizes."""
        return round((report.bytes_for(REPORTED_SHARE) or 0.0) * self._num_ranks)
