"""Loads that have begun and not ended. Follows them, and tells the admission of loads; chooses and counts nothing.

A load in the background ends when the workers report its request. One within a step ends with that step.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridkv.planner import LoadAdmission

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(slots=True)
class ChildLoad:
    """One request's load.

    Args:
        child: its position.
        request_tokens: of the whole request.
        num_tokens: that are loaded.
        num_bytes: of engine memory that they fill.
        begun_at_s: when the engine gave blocks for it.
        blocks: of the request, to find out whose blocks could not be loaded.
        step: within which it loads; None: in the background.
        has_failed: some of its blocks could not be loaded.
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
    """Loads by request.

    Args:
        num_children: who load.
        admission: of all loads of this engine; children may tell it the same.
    """

    def __init__(self, num_children: int, admission: LoadAdmission) -> None:
        self._admission = admission
        self.pending = [0] * num_children
        """Loads that have begun and not ended, by child."""
        self._loads: dict[str, ChildLoad] = {}
        self._begun: set[str] = set()
        """Since the last step was planned."""
        self._within_steps: list[str] = []

    def begin(self, request_id: str, load: ChildLoad) -> None:
        """A request was given blocks for a load. Until it is scheduled, nothing can take them from it."""
        self._loads[request_id] = load
        self._begun.add(request_id)
        self._admission.take(request_id, load.request_tokens)
        self.pending[load.child] += 1

    def is_loading(self, request_id: str) -> bool:
        """Whether a load of the request has not ended."""
        return request_id in self._loads

    def scheduled(self, request_ids: Collection[str], step: int) -> frozenset[int]:
        """These run in this step. A load of theirs that has just begun is within it; the children of such loads."""
        children = set()
        for request_id in self._begun.intersection(request_ids):
            load = self._loads[request_id]
            load.step = step
            self._within_steps.append(request_id)
            children.add(load.child)
        self._begun.clear()
        for request_id in request_ids:
            self._admission.give_back(request_id)
        return frozenset(children)

    def forget(self, request_id: str) -> None:
        """The request is gone, and no load of it has begun and not ended."""
        self._admission.give_back(request_id)

    def ended_within(self, step: int, output: KVConnectorOutput) -> list[tuple[str, ChildLoad]]:
        """Takes the loads within this step and those before it."""
        ended: list[tuple[str, ChildLoad]] = []
        open_still = []
        for request_id in self._within_steps:
            load = self._loads[request_id]
            if load.step is None or load.step > step:
                open_still.append(request_id)
                continue
            load.has_failed = _touches(load.blocks, output.invalid_block_ids)
            ended.append(self._take(request_id, load))
        self._within_steps = open_still
        return ended

    def reported(self, output: KVConnectorOutput) -> list[tuple[str, ChildLoad]]:
        """Takes the loads in the background that the workers report."""
        if output.invalid_block_ids:
            # Reported no later than the end of the load, which may be in a later step.
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
        self.pending[load.child] -= 1
        if load.has_failed and load.step is None:
            self._admission.fail(request_id, load.request_tokens)
        return request_id, load


def _touches(blocks: KVCacheBlocks, block_ids: set[int]) -> bool:
    return bool(block_ids) and any(block.block_id in block_ids for group in blocks.blocks for block in group)
