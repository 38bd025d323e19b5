"""Loads of other connectors within a step. The failure of such a load is known only after the step.

A connector of another project may load a request's blocks in the step that computes the request. If this load fails,
the workers report the blocks with the output of the step (`invalid_block_ids`). By then the engine has computed with
wrong content, and stores of the step have begun. No store ends before this report: a store ends with the output of its
step or of a later step. So the report comes in time to drop these stores.

The request, and each request that uses its blocks, stores nothing more until it starts over. The engine computes the
request again in the same blocks, but with asynchronous scheduling it may use wrong tokens for that. The content is
evicted from the engine's prefix cache, because the engine may free the blocks before it has computed them again. The
request may have ended or started over when the report comes, so `StepLoads` keeps its blocks and hashes until then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.requests import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

    from hybridkv.connectors.vllm.common.layout import CacheLayout
    from hybridkv.connectors.vllm.common.requests import Requests, TrackedRequest

STORE_FAILURE = "another connector failed to load blocks of the request"
"""Why a store is dropped."""
STORE_FAILURE_REASON = "failed_load"
"""The same, as a label of `vllm:hybridkv_store_failures_total`."""
STEPS_IN_FLIGHT: Final = 2
"""Maximum number of steps whose output the engine has not handled, including the planned step: 1, or 2 with
asynchronous scheduling. Engines with pipeline parallelism, which have more, are refused. When a step is planned, the
engine has handled the output of the step before the last, even if that output had nothing for a connector."""


@dataclass(slots=True, eq=False)
class StepLoad:
    """Start of a request from computed tokens, which another connector may have loaded within a step."""

    tracked: TrackedRequest
    table: Sequence[Sequence[int]]
    """Block table at the start, by group."""
    step: int
    """Number of the step in which the request started."""
    is_open: bool = True
    """Whether the failure of the load may still be reported."""
    has_failed: bool = False
    """Whether the load has failed. Stores of the request must be dropped then."""


class StepLoads:
    """Finds the requests that a failed load within a step has reached.

    Args:
        requests: the tracked requests.
        layout: layout of the engine's groups.
    """

    def __init__(self, requests: Requests, layout: CacheLayout) -> None:
        self._requests = requests
        self._block_tokens = tuple(group.block_tokens for group in layout.spec.groups)
        self._hash_tokens = layout.hash_block_tokens
        self._pool: BlockPool | None = None
        self._step = 0
        self._last_load_step = -STEPS_IN_FLIGHT
        """Last step with a load within it. Steps without such loads in flight do not pay for the copies of tables."""
        self._open: deque[StepLoad] = deque()
        """Open loads in order of their starts, also of requests that have ended or started over."""

    def bind(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._pool = pool

    def follow_step(self, output: SchedulerOutput, tables: compat.BlockTables) -> None:
        """Records the requests that start in this step with computed tokens, and closes the loads of steps with handled
        outputs. Must be called in each step, before the step's stores are planned."""
        self._step += 1
        while self._open and self._open[0].step <= self._step - STEPS_IN_FLIGHT:
            load = self._open.popleft()
            load.is_open = False
            if load.tracked.step_load is load:
                load.tracked.step_load = None
        if compat.has_loads_within(output):
            self._last_load_step = self._step
        if self._last_load_step <= self._step - STEPS_IN_FLIGHT:
            return
        for request_id, computed_tokens in compat.admitted(output).items():
            tracked = self._requests.get(request_id)
            if tracked is not None and computed_tokens:
                table = tuple(tuple(block_ids) for block_ids in tables(request_id))
                tracked.step_load = StepLoad(tracked, table, self._step)
                self._open.append(tracked.step_load)

    def on_failed(self, failed_blocks: AbstractSet[int]) -> None:
        """Stops the stores of requests that use blocks of failed loads, or content that was computed from them, until
        these requests start over. Evicts the blocks, and the later blocks of these requests, from the engine's prefix
        cache. Must be called before the stores that ended in the same step are settled."""
        failed_blocks = failed_blocks - {NULL_BLOCK}
        wrong_hashes = set()
        """First wrong hash of each prefix. Of a prefix that left the window, a later request may have no block."""
        for load in self._open:
            hashes = load.tracked.request.block_hashes
            starts = [place for place, block_hash in enumerate(hashes) if block_hash in wrong_hashes]
            for tokens, block_ids in zip(self._block_tokens, load.table, strict=False):
                starts += [
                    at * tokens // self._hash_tokens for at, each in enumerate(block_ids) if each in failed_blocks
                ]
            if not starts:
                continue
            load.has_failed = True
            if load.tracked.step_load is load:  # else the request has started over
                load.tracked.is_storable = False
            wrong_hashes.update(hashes[min(starts) :][:1])
            if self._pool is not None:
                compat.evict_beyond(
                    self._pool,
                    len(self._block_tokens),
                    hashes,
                    min(starts) * self._hash_tokens,
                    load.tracked.request.num_tokens,
                )
        if self._pool is not None:
            num_blocks = len(self._pool.blocks)
            compat.evict_cached_blocks(self._pool, [each for each in failed_blocks if 0 <= each < num_blocks])
