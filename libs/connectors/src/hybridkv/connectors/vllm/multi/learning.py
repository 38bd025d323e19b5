"""How long things take here: each child's loads, and computing instead. For `load_weight: "auto"` only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from hybridkv.planner import UNKNOWN_RATE, Rates, observe, seconds_per_token

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MIN_PREFILL_TOKENS: Final = 32
"""A step with fewer says more about its overhead than about its tokens."""
MAX_OPEN_STEPS: Final = 64
"""Steps whose end is awaited; older ones are forgotten."""


class Learning:
    """Seconds per token of loads and of prefill.

    Args:
        num_children: whose loads are timed.
        clock: seconds that only grow.
    """

    def __init__(self, num_children: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads = [UNKNOWN_RATE] * num_children
        self._prefill = UNKNOWN_RATE
        self._open_steps: dict[int, tuple[float, int]] = {}
        """Step to the time at which it was planned, and its tokens: 0 where they teach nothing."""
        self._ended_at_s = 0.0

    def rates(self) -> Rates:
        """What is known now."""
        now_s = self._clock()
        loads = tuple(seconds_per_token(rate, now_s) for rate in self._loads)
        return Rates(loads, seconds_per_token(self._prefill, now_s))

    def loaded(self, child: int, num_tokens: int, seconds: float) -> None:
        """A child has loaded."""
        self._loads[child] = observe(self._loads[child], num_tokens, seconds, self._clock())

    def step_planned(self, step: int, scheduler_output: SchedulerOutput, has_sync_loads: bool) -> None:
        """A step is about to run. One that computes little, or loads as well, teaches nothing about computing."""
        total = scheduler_output.total_num_scheduled_tokens
        prefill = _prefill_tokens(scheduler_output)
        teaches = not has_sync_loads and prefill >= MIN_PREFILL_TOKENS and 2 * prefill >= total
        self._open_steps[step] = (self._clock(), total if teaches else 0)
        while len(self._open_steps) > MAX_OPEN_STEPS:
            del self._open_steps[next(iter(self._open_steps))]

    def step_ended(self, step: int) -> None:
        """All ranks are done with a step. Steps may be planned before earlier ones have ended."""
        now_s = self._clock()
        planned = self._open_steps.pop(step, None)
        if planned is not None and planned[1]:
            self._prefill = observe(self._prefill, planned[1], now_s - max(planned[0], self._ended_at_s), now_s)
        for older in [each for each in self._open_steps if each < step]:
            del self._open_steps[older]
        self._ended_at_s = now_s


def _prefill_tokens(scheduler_output: SchedulerOutput) -> int:
    scheduled = scheduler_output.num_scheduled_tokens
    tokens = sum(scheduled.get(new.req_id, 0) for new in scheduler_output.scheduled_new_reqs)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, num_outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if num_outputs == 0:
            tokens += scheduled.get(request_id, 0)
    return tokens
