"""Uncomputed blocks: blocks that the engine has hashed, but does not compute.

The engine hashes blocks when it schedules their tokens. With priority scheduling, it may then preempt the request in
the same step, to give blocks to a more important request. The step computes nothing for the preempted request, but the
request's blocks keep their hashes in the engine's prefix cache. A later request that hits these blocks computes wrong
content, and a connector would store this content under correct keys (vllm-project/vllm#57580).

The engine admits no request in a step with such a preemption. So these blocks have served no hit when they are evicted
in the plan of this step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.common import compat

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class UncomputedBlocks:
    """Evicts uncomputed blocks from the engine's prefix cache.

    Args:
        num_groups: number of the engine's groups.
        max_tokens: see `compat.max_uncomputed_tokens`. 0: this object does nothing.
    """

    def __init__(self, num_groups: int, max_tokens: int) -> None:
        self._num_groups = num_groups
        self._max_tokens = max_tokens
        self._requests: dict[str, Request] = {}
        self._ends: dict[str, int] = {}
        """Computed tokens of each running request after its last step, or fewer: without the drafts of its last two
        steps. With asynchronous scheduling, the engine counts drafts as computed until it rejects them."""
        self._num_drafts: dict[str, int] = {}
        """Drafts of each running request in its last step."""

    def track(self, request: Request) -> None:
        """Starts to track a request. Ignores a tracked request."""
        if not self._max_tokens or self._requests.get(request.request_id) is request:
            return
        self._requests[request.request_id] = request
        self._forget_steps(request.request_id)

    def follow_step(self, output: SchedulerOutput, pool: BlockPool | None) -> None:
        """Evicts the uncomputed blocks of the requests that this step preempts. Must be called in every step, because
        it records where each request's step ends. Forgets ended requests."""
        if not self._max_tokens:
            return
        for request_id in compat.preempted_ids(output):
            end = self._forget_steps(request_id)
            request = self._requests.get(request_id)
            # The engine preempts between steps too, and may then resume the request in this step.
            if request is not None and pool is not None and request_id not in output.num_scheduled_tokens:
                compat.evict_beyond(pool, self._num_groups, request.block_hashes, end, self._max_tokens)
        for request_id in compat.finished_ids(output):
            request = self._requests.get(request_id)
            if request is not None and request.is_finished():  # else a new request has taken the id
                del self._requests[request_id]
                self._forget_steps(request_id)
        drafts = compat.draft_tokens(output)
        for request_id, (_, end) in compat.computed_tokens(output).items():
            if request_id in self._requests:
                self._ends[request_id] = end - self._num_drafts.get(request_id, 0)
                self._num_drafts[request_id] = len(drafts.get(request_id, ()))

    def _forget_steps(self, request_id: str) -> int:
        """Forgets a request's steps. Returns the entry of `_ends`; 0 without one."""
        self._num_drafts.pop(request_id, None)
        return self._ends.pop(request_id, 0)
