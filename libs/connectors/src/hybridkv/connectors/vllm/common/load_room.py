"""Which loads may hold blocks of the engine at the same time: what `hybridkv.planner.admission` decides, asked here.

A request that has loaded keeps its blocks until it is scheduled. Two that both need one more than is left would wait
for each other for ever.

Below HybridMultiConnector nothing is asked or counted here: it does both, for the loads of all its children. A child
that asked as well, and said "later", would be passed over for one that has nothing, and the prompt computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hybridkv.planner.admission import LoadAdmission, RoomBounds, RoomWait, Verdict, gate_load

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_BOUNDS = RoomBounds(polls=None)
"""A request waits for its turn by the clock: steps in which nothing runs take a millisecond."""


class LoadRoom:
    """Blocks of loads, by request.

    Args:
        admission: counts who holds what; None: a connector above does, and asks.
        clock: seconds.
    """

    def __init__(self, admission: LoadAdmission | None, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock
        self._waits: dict[str, RoomWait] = {}
        self.pool: BlockPool | None = None
        """The engine's blocks, once it has said so."""

    def verdict(self, request_id: str, num_tokens: int) -> Verdict:
        """Whether a request may be given blocks for its load now."""
        if self._admission is None or self._admission.is_idle or self.pool is None:
            return Verdict.ADMIT
        pool_blocks, free_blocks = self.pool.num_gpu_blocks - 1, self.pool.get_num_free_blocks()
        room = self._admission.room(request_id, num_tokens, pool_blocks, free_blocks)
        verdict, self._waits[request_id] = gate_load(
            room, self._waits.get(request_id, RoomWait()), self._clock(), _BOUNDS
        )
        return verdict

    def take(self, request_id: str, num_tokens: int) -> None:
        """It was given them."""
        self._waits.pop(request_id, None)
        if self._admission is not None:
            self._admission.take(request_id, num_tokens)

    def fail(self, request_id: str, num_tokens: int) -> None:
        """Its load has failed: its blocks are free, and the engine reserves for it."""
        if self._admission is not None:
            self._admission.fail(request_id, num_tokens)

    def give_back(self, request_ids: Iterable[str]) -> None:
        """They were scheduled, or are gone."""
        if self._admission is None:
            return
        for request_id in request_ids:
            self._waits.pop(request_id, None)
            self._admission.give_back(request_id)
