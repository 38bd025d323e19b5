"""The end of an engine whose halves are in one process: what was to go to slower tiers goes, while there is time.

vLLM ends its workers before its scheduler, and with several processes neither half can reach the other then; there the
scheduler keeps the engine stepping instead (`has_work_in_flight`), which is how vLLM's own end waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hybridkv.connectors.vllm.offload.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.offload.worker import DRAIN_S, OffloadWorker

PAUSE_S = 0.0005
CLOSE_S = 2.0
"""Of `DRAIN_S`, what is kept for chunks that are on their way when the time for those that wait is over."""


def flush_and_close(
    scheduler: OffloadScheduler | None, worker: OffloadWorker, clock: Callable[[], float] = time.monotonic
) -> None:
    """The worker's end, within `DRAIN_S`. It gives up its memory and its threads whatever the flush meets.

    Args:
        scheduler: the other half, None where it is out of reach.
        worker: this half.
        clock: seconds.
    """
    if scheduler is None:
        worker.close(DRAIN_S)
        return
    left_s = 0.0
    try:
        left_s = flush(scheduler, worker, DRAIN_S - CLOSE_S, clock)
    finally:
        worker.close(CLOSE_S + left_s)


def flush(
    scheduler: OffloadScheduler, worker: OffloadWorker, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> float:
    """Carry on as steps without requests would, until nothing is left to do or the time is over.

    Once in any case: what an engine without requests let wait may go by now.

    Returns:
        Seconds that are left of `timeout_s`.
    """
    ends_s = clock() + timeout_s
    is_left = True
    while is_left and clock() < ends_s:
        plan = scheduler.plan_moves()
        worker.start_stores(plan)
        worker.start_moves(plan)
        worker.results()
        outcome = worker.outcome()
        if outcome is None:
            time.sleep(PAUSE_S)
        else:
            scheduler.on_outcome(outcome)
        is_left = scheduler.has_stores_in_flight()
    return max(ends_s - clock(), 0.0)
