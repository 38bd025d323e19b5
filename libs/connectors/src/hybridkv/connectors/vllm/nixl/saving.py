"""Which blocks are copied between the engine and host memory, where the engine's own memory is a device's.

The scheduler's half decides what a producer copies out, step by step. A prompt is copied out in the step that computes
its last token, so before the request can have finished; what it generates behind that, in the step that computes it.
Whatever was not copied out is not handed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from hybridkv.connectors.vllm.nixl.messages import PromptLoad, Saved
from hybridkv.peers.spans import moved_span
from hybridkv.peers.tables import offered
from hybridkv.planner import GroupKind, GroupSpec

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from hybridkv.connectors.vllm.compat import BlockTables


class Saving:
    """Tokens by request that host memory holds.

    Args:
        groups: of the model.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = tuple(groups)
        self._requests: dict[str, Request] = {}
        self._saved_tokens: dict[str, int] = {}

    def begin(self, request: Request) -> None:
        """The engine runs a request that is to be handed over."""
        self._requests[request.request_id] = request

    def end(self, request: Request) -> int:
        """It has ended. How many of its tokens host memory holds."""
        if self._requests.pop(request.request_id, None) is None:
            return 0
        return self._saved_tokens.pop(request.request_id, 0)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """Their blocks are others' by now. What they are given again may be another request's copy of the same tokens,
        which host memory does not hold."""
        for request_id in request_ids:
            self._saved_tokens.pop(request_id, None)

    def of_step(self, scheduled_tokens: Mapping[str, int], tables: BlockTables) -> list[Saved]:
        """What is to be copied behind this step.

        Args:
            scheduled_tokens: of the requests of this step.
            tables: their blocks.
        """
        plans = []
        for name, request in self._requests.items():
            count = scheduled_tokens.get(name)
            before = request.num_computed_tokens
            if count is None or before + count < request.num_prompt_tokens:
                continue
            saved = self._saved_tokens.get(name, 0)
            # Fewer than were saved: it begins again, and its blocks are others.
            kept = saved if saved <= before else 0
            plans.append(Saved(name, self._blocks(tables(name), kept, before + count)))
            self._saved_tokens[name] = before + count
        return plans

    def _blocks(self, table: Sequence[Sequence[int]], kept: int, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Of every group, the blocks that tokens from `kept` on have changed, of those that are handed over."""
        found = offered(self._groups, table, num_tokens)
        blocks = []
        for group, first, ids in zip(self._groups, found.first_blocks, found.block_ids, strict=True):
            skipped = 0 if group.kind is GroupKind.RECURRENT else max(0, kept // group.block_tokens - first)
            blocks.append(tuple(ids[skipped:]))
        return tuple(blocks)


def loaded_blocks(groups: Sequence[GroupSpec], load: PromptLoad) -> tuple[tuple[int, ...], ...]:
    """Of every group, the blocks that a load writes.

    Args:
        groups: of this engine.
        load: what is read.
    """
    blocks = []
    for group, table in zip(groups, load.block_ids, strict=True):
        span = moved_span(group, group.block_tokens, load.num_tokens, load.computed_tokens)
        first, last = span.start // group.block_tokens, -(-span.end // group.block_tokens)
        blocks.append(tuple(table[first:last]) if span.num_tokens else ())
    return tuple(blocks)
