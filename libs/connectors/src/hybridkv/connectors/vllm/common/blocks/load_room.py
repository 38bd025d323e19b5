"""Admission of loads by free blocks of the engine. `hybridkv.planner.admission` decides; this module calls it.

A loaded request keeps its blocks until it is scheduled. Without admission, two loaded requests that each need more
blocks than are free would wait for each other forever.

A child of HybridMultiConnector does no admission here: the parent admits the loads of all its children. If a child also
answered "later", the parent would choose a child without a hit, and the engine would compute the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hybridkv.planner.admission import NOT_WAITED, LoadAdmission, RoomBounds, RoomWait, Verdict, gate_load

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_BOUNDS = RoomBounds(polls=None)
"""A request waits for blocks for a time, not for a number of polls, because an idle step takes only a millisecond."""


class LoadRoom:
    """Blocks reserved for loads, by request.

    Args:
        admission: counts the blocks of each request; None if a parent connector admits loads.
        clock: returns the current time in seconds.
    """

    def __init__(self, admission: LoadAdmission | None, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock
        self._waits: dict[str, RoomWait] = {}
        self.pool: BlockPool | None = None
        """The engine's block pool, once it is bound."""

    def verdict(self, request_id: str, num_tokens: int) -> Verdict:
        """Decides whether a request may get blocks for its load now, and records the request's wait. ADMIT if a parent
        connector admits loads, or if no request holds blocks or waits after a failed load. ADMIT ends the wait."""
        if self._admission is None or self._admission.is_idle or self.pool is None:
            self._waits.pop(request_id, None)
            return Verdict.ADMIT
        pool_blocks, free_blocks = self.pool.num_gpu_blocks - 1, self.pool.get_num_free_blocks()
        room = self._admission.room(request_id, num_tokens, pool_blocks, free_blocks)
        verdict, wait = gate_load(room, self._waits.pop(request_id, NOT_WAITED), self._clock(), _BOUNDS)
        if verdict is not Verdict.ADMIT:
            self._waits[request_id] = wait
        return verdict

    def take(self, request_id: str, num_tokens: int) -> None:
        """Records that the request got the blocks."""
        self._waits.pop(request_id, None)
        if self._admission is not None:
            self._admission.take(request_id, num_tokens)

    def fail(self, request_id: str, num_tokens: int) -> None:
        """Records a failed load. The engine has freed the request's blocks, but reserves as many until the request is
        scheduled."""
        if self._admission is not None:
            self._admission.fail(request_id, num_tokens)

    def take_deferral(self, request_id: str) -> bool:
        """See `LoadAdmission.take_deferral`. False if a parent connector admits loads."""
        return self._admission is not None and self._admission.take_deferral(request_id)

    def release(self, request_ids: Iterable[str]) -> None:
        """Releases the blocks of requests that were scheduled or have ended."""
        if self._admission is None:
            return
        for request_id in request_ids:
            self._waits.pop(request_id, None)
            self._admission.give_back(request_id)
