"""Loads of other connectors within a step. The failure of such a load is known only after the step.

A connector of another project may load a request's blocks in the step that computes the request. If this load fails,
the workers report the blocks with the output of the step (`invalid_block_ids`). By then the engine has computed with
wrong content, and stores of the step have begun. No store ends before this report: a store ends with the output of its
step or of a later step. So the report comes in time to drop these stores.

The request, and each request that uses its blocks, stores nothing more until it starts over. The engine computes the
request again in the same blocks, but with asynchronous scheduling it may use wrong tokens for that. The blocks are
evicted from the engine's prefix cache, because the engine may free them before it has computed them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

    from hybridkv.connectors.vllm.common.requests import Requests

STORE_FAILURE = "another connector failed to load blocks of the request"
"""Why a store is dropped."""
STORE_FAILURE_REASON = "failed_load"
"""The same, as a label of `vllm:hybridkv_store_failures_total`."""


def first_failed(table: Sequence[Sequence[int]], failed_blocks: AbstractSet[int]) -> list[tuple[int, int]]:
    """The first of these blocks in each group of a block table, as (group, position). Groups without one are absent."""
    found = []
    for group, block_ids in enumerate(table):
        place = next((place for place, block_id in enumerate(block_ids) if block_id in failed_blocks), None)
        if place is not None:
            found.append((group, place))
    return found


class StepLoads:
    """Finds the requests that a failed load within a step has reached.

    Args:
        requests: the tracked requests.
    """

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._pool: BlockPool | None = None
        self._are_seen = False
        """Whether a step had a load within it. Engines without such loads do not pay for the copies of tables."""

    def bind(self, pool: BlockPool) -> None:
        """Sets the engine's block pool."""
        self._pool = pool

    def follow_step(self, output: SchedulerOutput, tables: compat.BlockTables) -> None:
        """Records the blocks of requests that start in this step with computed tokens. Must be called before the step's
        stores are planned."""
        self._are_seen = self._are_seen or compat.has_loads_within(output)
        if not self._are_seen:
            return
        for request_id, computed_tokens in compat.admitted(output).items():
            tracked = self._requests.get(request_id)
            if tracked is not None:
                table = tables(request_id) if computed_tokens else ()
                tracked.admitted_blocks = tuple(tuple(block_ids) for block_ids in table)

    def on_failed(self, failed_blocks: AbstractSet[int]) -> None:
        """Stops the stores of requests that use blocks of failed loads. Evicts these blocks, and those that the
        requests computed from them, from the engine's prefix cache."""
        wrong_blocks = set(failed_blocks)  # also those of a request that has ended before this report
        for tracked in self._requests.all():
            for group, place in first_failed(tracked.admitted_blocks, failed_blocks):
                tracked.is_storable = False
                wrong_blocks.update(tracked.admitted_blocks[group][place:])
        if self._pool is not None:
            compat.evict_cached_blocks(self._pool, wrong_blocks)
