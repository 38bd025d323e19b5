"""From the copies of a job to runs of bytes: what a chunk takes of its blocks' pages, and where that lies in its slot.

Called when a job's turn has come, on the thread that copies, so that the engine's thread pays for none of it.

A chunk that cuts blocks is up to three pieces, one behind the other: what it has of its first block, its whole blocks,
and what it has of its last one. Each piece is laid out as a chunk of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.canonical import GroupPages, TokenRange
from hybridkv.connectors.vllm.copy_table import CopyTable
from hybridkv.connectors.vllm.lowering import Zeros
from hybridkv.tiers import SealedMemory
from hybridkv.transfer import CopyRuns, Lowering


class BlockPart(NamedTuple):
    """Tokens [start, end) of each of `num_blocks` stored blocks of a chunk, from its block `first_block` on."""

    start: int
    end: int
    first_block: int
    num_blocks: int


class GroupBlocks:
    """A group's blocks, whole or in part.

    Args:
        pages: of whole blocks.
        block_tokens: tokens in one.
        part: pages of some tokens of every block. A range is asked for once by each thread, at most.
    """

    def __init__(self, pages: GroupPages, block_tokens: int, part: Callable[[TokenRange], GroupPages]) -> None:
        self.pages = pages
        self.block_tokens = block_tokens
        self._part = part
        self._parts: dict[TokenRange, GroupPages] = {}

    def of(self, start: int, end: int) -> GroupPages:
        """The pages of tokens [start, end) of every block."""
        tokens = TokenRange(start, end, self.block_tokens)
        if tokens not in self._parts:
            self._parts[tokens] = self.pages if end - start == self.block_tokens else self._part(tokens)
        return self._parts[tokens]

    def parts(self, stored_blocks: int, lead_tokens: int, trail_tokens: int) -> Iterator[BlockPart]:
        """What a chunk has of its stored blocks, if it lacks so many tokens of the first one and of the last one."""
        size, end = self.block_tokens, self.block_tokens - trail_tokens
        if stored_blocks == 1:
            yield BlockPart(lead_tokens, end, 0, 1)
            return
        first, last = int(lead_tokens > 0), stored_blocks - int(end < size)
        if first:
            yield BlockPart(lead_tokens, size, 0, 1)
        if last > first:
            yield BlockPart(0, size, first, last - first)
        if last < stored_blocks:
            yield BlockPart(0, end, last, 1)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Where the two sides of a rank's copies lie.

    Args:
        pages: of whole blocks, of each stored group.
        cut: groups whose blocks chunks cut.
        zeros: where padding comes from.
        arena: that slots lie in.
    """

    pages: Mapping[int, GroupPages]
    cut: Mapping[int, GroupBlocks]
    zeros: Zeros
    arena: SealedMemory


class StoreRuns(NamedTuple):
    """The runs of a store.

    Args:
        runs: of every slot as a whole, one slot after the other. None is of two.
        ends: of each slot's, counted in runs.
        zero_bytes: that are no page's.
    """

    runs: CopyRuns
    ends: npt.NDArray[np.int64]
    zero_bytes: int


class JobLowering:
    """Makes the runs of a whole job, all at once. Any thread may call.

    Raises:
        ValueError: a slot is too small or not in the arena, a block is outside of the pool, or a chunk that is stored
            lacks some of its own.
    """

    def __init__(self, memory: RankMemory) -> None:
        arena, zeros = memory.arena, memory.zeros
        self._native = Lowering(arena.base_address, arena.capacity_bytes, zeros.address, zeros.num_bytes)
        self._cut = memory.cut
        for group_index, pages in memory.pages.items():
            cut = memory.cut.get(group_index)
            self._native.add_group(group_index, cut.block_tokens if cut is not None else 0, *_columns(pages))
        self._known: set[tuple[int, int, int, int]] = set()
        """Cuts whose parts were added."""

    def load(self, copies: CopyTable) -> CopyRuns:
        """Runs that write every page of the copies once: of those that come from the tier, then of those that come
        from blocks of the engine. No two of either could be joined."""
        self._add_parts(copies)
        arrays = self._native.lower(False, copies.shapes, copies.block_ids, copies.local_ids, copies.extents)
        return CopyRuns(*arrays[:3])

    def store(self, copies: CopyTable) -> StoreRuns:
        """Runs that write every byte of every slot once, in order. No two of one slot could be joined."""
        self._add_parts(copies)
        sources, destinations, num_bytes, ends, zero_bytes = self._native.lower(
            True, copies.shapes, copies.block_ids, copies.local_ids, copies.extents
        )
        return StoreRuns(CopyRuns(sources, destinations, num_bytes), ends, zero_bytes)

    def _add_parts(self, copies: CopyTable) -> None:
        """Pages of parts of blocks are looked at when they are first copied: of all parts that there could be, most
        never are."""
        for shape in copies.rows() if self._cut else ():
            cut = (shape.group_index, shape.stored_blocks, shape.lead_tokens, shape.trail_tokens)
            blocks = self._cut.get(shape.group_index)
            if blocks is None or cut in self._known:
                continue
            for part in blocks.parts(*cut[1:]):
                if part.end - part.start < blocks.block_tokens:
                    pages = blocks.of(part.start, part.end)
                    self._native.add_part(shape.group_index, part.start, part.end, *_columns(pages))
            self._known.add(cut)


def _columns(pages: GroupPages) -> tuple[bytes, int, int]:
    """Address, stride, size and place in a chunk's block of each page; then bytes of such a block, and the pool's
    number of blocks."""
    places = pages.chunk_offsets(0, 1, 1).tolist()
    rows = [
        (region.address, region.stride_bytes, region.page_bytes, place)
        for region, place in zip(pages.regions, places, strict=True)
    ]
    return np.array(rows, dtype=np.int64).tobytes(), pages.block_bytes, pages.num_blocks
