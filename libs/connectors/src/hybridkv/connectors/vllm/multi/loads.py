"""Running loads of children: tracks them and updates the load admission. Chooses no child and counts no metrics.

An asynchronous load ends when the workers report its request. A synchronous load ends with its step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.planner import LoadAdmission

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(slots=True)
class ChildLoad:
    """Load of one request.

    Args:
        child: position of the child.
        request_tokens: tokens of the whole request.
        num_tokens: tokens to load.
        num_bytes: bytes of these tokens in the engine's blocks, over all ranks.
        started_s: time at which the engine allocated the blocks, in seconds of the clock.
        blocks: blocks of the request, to find loads with invalid blocks.
        step: step of a synchronous load; None for an asynchronous load.
        has_failed: workers reported an invalid block of the request, or the failure of the load.
    """

    child: int
    request_tokens: int
    num_tokens: int
    num_bytes: int
    started_s: float
    blocks: KVCacheBlocks
    step: int | None = None
    has_failed: bool = False


class ChildLoads:
    """Running loads, by request.

    Args:
        num_children: number of children.
        admission: admission of all loads of this engine; children may update it too.
    """

    def __init__(self, num_children: int, admission: LoadAdmission) -> None:
        self._num_children = num_children
        self._admission = admission
        self._loads: dict[str, ChildLoad] = {}
        self._begun: set[str] = set()
        """Requests with a load that started after the last step was planned."""

    @property
    def pending(self) -> list[int]:
        """Number of running loads, by child."""
        counts = Counter(load.child for load in self._loads.values())
        return [counts[child] for child in range(self._num_children)]

    def begin(self, request_id: str, load: ChildLoad) -> None:
        """Adds a load of a request with allocated blocks. The request keeps the blocks until it is scheduled.

        Replaces a synchronous load of the request: vLLM's reset of the prefix cache preempts running requests, and the
        next step may load them again before the end of the earlier step.
        """
        self._loads[request_id] = load
        self._begun.add(request_id)
        self._admission.take(request_id, load.request_tokens)

    def is_loading(self, request_id: str) -> bool:
        """Whether a load of the request is running."""
        return request_id in self._loads

    def scheduled(self, request_ids: Collection[str], step: int) -> frozenset[int]:
        """Handles requests that run in this step: their new loads are synchronous, and they need no admission any more.
        Returns children with such loads."""
        children = set()
        for request_id in self._begun.intersection(request_ids):
            load = self._loads[request_id]
            load.step = step
            children.add(load.child)
        self._begun.clear()
        for request_id in request_ids:
            self._admission.give_back(request_id)
        return frozenset(children)

    def forget(self, request_id: str) -> None:
        """Handles the end of a request without a running load."""
        self._admission.give_back(request_id)

    def ended_within(self, step: int, output: KVConnectorOutput) -> list[tuple[str, ChildLoad]]:
        """Removes and returns the synchronous loads of this step and of earlier steps."""
        ended = []
        for request_id, load in list(self._loads.items()):
            if load.step is not None and load.step <= step:
                load.has_failed = _touches(load.blocks, output.invalid_block_ids)
                ended.append(self._take(request_id, load))
        return ended

    def reported(self, output: KVConnectorOutput) -> list[tuple[str, ChildLoad]]:
        """Removes and returns the asynchronous loads that the workers report as ended."""
        if output.invalid_block_ids:
            # Workers report invalid blocks before or with the end of the load.
            for load in self._loads.values():
                if load.step is None and _touches(load.blocks, output.invalid_block_ids):
                    load.has_failed = True
        ended = []
        for request_id in output.finished_recving or ():
            reported = self._loads.get(request_id)
            if reported is not None and reported.step is None:
                reported.has_failed = reported.has_failed or request_id in (output.failed_recving or ())
                ended.append(self._take(request_id, reported))
        return ended

    def _take(self, request_id: str, load: ChildLoad) -> tuple[str, ChildLoad]:
        del self._loads[request_id]
        self._begun.discard(request_id)
        if load.has_failed and load.step is None:
            self._admission.fail(request_id, load.request_tokens)
        return request_id, load


def _touches(blocks: KVCacheBlocks, block_ids: set[int]) -> bool:
    return bool(block_ids) and any(block.block_id in block_ids for group in blocks.blocks for block in group)
