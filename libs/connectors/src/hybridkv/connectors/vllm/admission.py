"""Which loads may hold blocks of the engine at the same time, so that none of them waits for ever.

A request whose load has ended waits, with its blocks, until it is scheduled; nothing can take them from it. Two such
requests that both need more than is left would wait for each other. The engine reserves against that, but counts the
empty entries of a window group's table as blocks, so for such models it reserves too little. Here every load is counted
with all that its request needs to be scheduled, and loads that do not fit beside the others come later.
"""

from __future__ import annotations

import enum

from hybridkv.planner import CacheSpec, GroupKind, GroupSpec


class Verdict(enum.Enum):
    """Of a load that asks for blocks."""

    ADMIT = enum.auto()
    WAIT = enum.auto()
    """It does not fit beside the others yet."""
    REFUSE = enum.auto()
    """It would wait for itself: compute."""


class LoadAdmission:
    """Counts blocks of requests that were given blocks for a load and were not scheduled since.

    Args:
        spec: the model's groups.
        max_in_flight_tokens: tokens that the engine may schedule before it gives back blocks that left a window.
    """

    def __init__(self, spec: CacheSpec, max_in_flight_tokens: int) -> None:
        self._spec = spec
        self._max_in_flight_tokens = max_in_flight_tokens
        self._held: dict[str, int] = {}
        self._failed: dict[str, int] = {}

    def blocks(self, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` needs to be scheduled."""
        return sum(self._group_blocks(group, num_tokens) for group in self._spec.groups)

    def _group_blocks(self, group: GroupSpec, num_tokens: int) -> int:
        everything = -(-num_tokens // group.block_tokens) + 1
        match group.kind:
            case GroupKind.WINDOW | GroupKind.CHUNKED:
                kept = (group.window_tokens or group.align_tokens or 0) + self._max_in_flight_tokens
                return min(everything, -(-kept // group.block_tokens) + 1)
            case GroupKind.RECURRENT | GroupKind.SCRATCH:
                # The running state, the one before it, a copy of a shared one and a checkpoint.
                return min(everything, 4)
            case GroupKind.FULL:
                return everything

    def take(self, request_id: str, num_tokens: int) -> None:
        """A request was given blocks to load into."""
        self._held[request_id] = self.blocks(num_tokens)

    def fail(self, request_id: str, num_tokens: int) -> None:
        """Its load failed and its blocks are free, but the engine reserves for it until it is scheduled."""
        self._held.pop(request_id, None)
        self._failed[request_id] = self.blocks(num_tokens)

    def give_back(self, request_id: str) -> None:
        """It was scheduled, or is gone."""
        self._held.pop(request_id, None)
        self._failed.pop(request_id, None)

    def has_failed(self, request_id: str) -> bool:
        """Whether a load of this request failed, here or in a connector beside, and it was not scheduled since."""
        return request_id in self._failed

    def verdict(self, request_id: str, num_tokens: int, pool_blocks: int, free_blocks: int) -> Verdict:
        """Whether a request may be given blocks for a load now, in a pool of `pool_blocks`."""
        if not self._held and not self._failed:
            return Verdict.ADMIT
        has_failed, others = request_id in self._failed, self.held_by_others(request_id)
        needed = self.blocks(num_tokens)
        if self.must_let_pass(request_id) or (others and (has_failed or others + needed > pool_blocks)):
            return Verdict.WAIT
        if has_failed and needed + self.reserved_for_failed() > free_blocks:
            # The engine still reserves for its load that failed, and the next must fit beside that.
            return Verdict.REFUSE
        return Verdict.ADMIT

    def reserved_for_failed(self) -> int:
        """Blocks that the engine reserves for requests whose loads failed."""
        return sum(self._failed.values())

    def must_let_pass(self, request_id: str) -> bool:
        """Whether others wait whose loads failed, and this request is none of them.

        They wait until no request holds blocks for a load, so nobody new may.
        """
        return bool(self._failed) and request_id not in self._failed

    def held_by_others(self, request_id: str) -> int:
        """Blocks that the other requests with loads need."""
        return sum(blocks for other, blocks in self._held.items() if other != request_id)
