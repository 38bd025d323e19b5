"""Blocks of the engine that do not hold what their hash says, and the requests that went on from them.

Where the engine's own hit ends inside a block it copies that block, and vLLM 0.32 does so wrongly in two ways: of every
layer it copies what the first one at its address has in a page (see `compat.copies_whole_blocks`), and it reads all
sources before it writes any, though one copy of a step may be made from another. What a request computes behind such a
copy is wrong, and the engine keeps it under right hashes; so whoever hits one of these blocks goes on from it as well.
Nothing of these requests may get into a tier, or to a peer.

It mends nothing of what the engine answers, and it does not look at bytes. Where in doubt a block counts as wrong.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.requests import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

    from hybridkv.connectors.vllm.layout import CacheLayout

logger = logging.getLogger("vllm.hybridkv.scheduler")


def partly_copied_groups(vllm_config: VllmConfig, layout: CacheLayout) -> frozenset[int]:
    """Groups of whose blocks the engine may copy only a part: their pages are not the smallest."""
    smallest = min((layer.page_bytes for layers in layout.layers for layer in layers), default=0)
    larger = frozenset(
        index for index, layers in enumerate(layout.layers) if any(layer.page_bytes > smallest for layer in layers)
    )
    if not larger or compat.has_blocks_outermost(vllm_config) or compat.copies_whole_blocks():
        return frozenset()
    return larger


class MisledCounter(Protocol):
    """Counts requests that went on from a wrong block."""

    def misled(self, cause: str) -> None: ...


class WrongBlocks:
    """Follows what the engine copies wrongly, from step to step.

    Args:
        block_tokens: of each of the engine's groups.
        recorder: counts the requests.
    """

    def __init__(self, block_tokens: Sequence[int], recorder: MisledCounter) -> None:
        self._block_tokens = tuple(block_tokens)
        self._recorder = recorder
        self.partly_copied: Container[int] = ()
        """Groups of whose blocks the engine copies only a part."""
        self._pool: BlockPool | None = None
        self._wrong: dict[int, Any] = {}
        """Blocks, and the hash that each had when it was last looked at. No more than the engine has blocks."""
        self._misled: dict[str, list[int]] = {}
        """Requests that run and went on from such a block: where in the table of each group blocks begin whose hash may
        still change."""
        self._has_warned = False

    @property
    def misled(self) -> Iterable[str]:
        """Requests that went on from a wrong block, and have not started over since."""
        return self._misled.keys()

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks."""
        self._pool = pool

    def holds(self, block_id: int) -> bool:
        """Whether a block is wrong. One that has got another hash since has been given to somebody else."""
        return block_id in self._wrong and self._wrong[block_id] == self._hash(block_id)

    def take_loaded(self, blocks: KVCacheBlocks, computed_tokens: int) -> None:
        """The engine gave a request its blocks from there on, and what is loaded into them is right."""
        if self._wrong:
            self._take_fresh([[block.block_id for block in group] for group in blocks.blocks], computed_tokens)

    def _take_fresh(self, table: Sequence[Sequence[int]], computed_tokens: int) -> None:
        for block_tokens, block_ids in zip(self._block_tokens, table, strict=True):
            for block_id in block_ids[-(-computed_tokens // block_tokens) :]:
                self._wrong.pop(block_id, None)

    def follow_step(self, output: SchedulerOutput, tables: compat.BlockTables) -> None:
        """What the step's copies make wrong, and who goes on from it; to be called before its stores are planned."""
        for request_id in (*(output.preempted_req_ids or ()), *(output.finished_req_ids or ())):
            # It starts over, or has ended. Its blocks stay what they are.
            self._misled.pop(request_id, None)
        copies = compat.block_copies(output)
        if not copies and not self._wrong:
            return
        for request_id in self._misled.keys() & output.num_scheduled_tokens.keys():
            self._record(request_id, tables(request_id))
        for request_id, block_ids in compat.added_blocks(output).items():
            if request_id not in self._misled:
                for block_id in block_ids:
                    self._wrong.pop(block_id, None)
        self._follow_copies(copies, compat.boundary_states(output))
        # In the order in which they were admitted: each may have hit what those before it are to compute.
        for request_id, computed_tokens in compat.admitted(output).items():
            self._admit(request_id, computed_tokens, tables(request_id), copies)

    def _hash(self, block_id: int) -> Any:
        return None if self._pool is None else self._pool.blocks[block_id].block_hash

    def _add(self, block_id: int) -> None:
        if block_id != NULL_BLOCK:
            self._wrong[block_id] = self._hash(block_id)

    def _follow_copies(
        self, copies: Sequence[tuple[int, int]], handed_over: Mapping[str, Sequence[tuple[int, int, int]]]
    ) -> None:
        """A copy of a wrong block is wrong. Blocks that are copied to have just been given out."""
        destinations = {destination for _, destination in copies}
        for destination in destinations:
            self._wrong.pop(destination, None)
        for source, destination in copies:
            if source in destinations or self.holds(source):
                self._add(destination)
        for states in handed_over.values():
            for group, block_id, _ in states:
                if group in self.partly_copied and block_id in destinations:
                    self._add(block_id)

    def _admit(
        self, request_id: str, computed_tokens: int, table: Sequence[Sequence[int]], copies: Sequence[tuple[int, int]]
    ) -> None:
        self._misled.pop(request_id, None)
        cause = self._cause(computed_tokens, table, copies)
        if cause is None:
            self._take_fresh(table, computed_tokens)
            return
        self._misled[request_id] = [computed_tokens // block_tokens for block_tokens in self._block_tokens]
        self._record(request_id, table)
        self._recorder.misled(cause)
        self._warn(request_id, cause)

    def _cause(
        self, computed_tokens: int, table: Sequence[Sequence[int]], copies: Sequence[tuple[int, int]]
    ) -> str | None:
        """What is wrong with what a request begins with, None where nothing is."""
        sources = {destination: source for source, destination in copies}
        cause = None
        for group, (block_tokens, block_ids) in enumerate(zip(self._block_tokens, table, strict=True)):
            for block_id in block_ids[: -(-computed_tokens // block_tokens)]:
                source = sources.get(block_id)
                if source in sources:
                    return "copied_copy"
                if self.holds(block_id) or (source is not None and self.holds(source)):
                    cause = "wrong_block"
                elif source is not None and group in self.partly_copied:
                    cause = cause or "partial_copy"
        return cause

    def _record(self, request_id: str, table: Sequence[Sequence[int]]) -> None:
        """Whatever the request computes is wrong: its blocks from where it began, as soon as it has them."""
        first = self._misled[request_id]
        for group, block_ids in enumerate(table):
            is_settled = True
            for place in range(first[group], len(block_ids)):
                self._add(block_ids[place])
                is_settled = is_settled and self._is_settled(group, block_ids[place])
                if is_settled:
                    first[group] = place + 1

    def _is_settled(self, group: int, block_id: int) -> bool:
        """Whether a block has the last hash that it gets: one inside it gives way to that of the full block."""
        if block_id == NULL_BLOCK:
            return True
        block = None if self._pool is None else self._pool.blocks[block_id]
        num_tokens = getattr(block, "block_hash_num_tokens", None)
        return num_tokens is not None and num_tokens % self._block_tokens[group] == 0

    def _warn(self, request_id: str, cause: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "request %s went on from a block that this version of vLLM copies wrongly (%s), so it may be answered "
            "wrongly, and nothing that it computes is stored or handed on; further ones are only counted, in "
            "vllm:hybridkv_misled_requests_total; unset prefix_match_unit, or use a vLLM with that fixed",
            request_id,
            cause,
        )
