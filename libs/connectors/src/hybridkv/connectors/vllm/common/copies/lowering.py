"""Lowering of copies to runs of bytes, the last step before a copy engine. No other module computes address pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hybridkv.canonical import GroupPages, TokenRange
from hybridkv.connectors.vllm.common.copies.table import CopyTable
from hybridkv.transfer import CopyRuns, Lowering


class Zeros(NamedTuple):
    """Memory with zeros: the source of the padding of stored chunks. Its content never changes.

    The job that copies the pages also copies the padding. So the padding is written before the chunk is sealed,
    checksums that are taken during the copy include it, and it passes a GPU's staging memory with the pages around it.

    Args:
        address: address of the first byte.
        num_bytes: bytes of the memory; larger padding is copied in several runs.
    """

    address: int
    num_bytes: int


class BlockPart(NamedTuple):
    """Tokens [start, end) in each of `num_blocks` stored blocks of a chunk, from block `first_block`."""

    start: int
    end: int
    first_block: int
    num_blocks: int


class GroupBlocks:
    """Pages of a group's whole blocks and of token ranges in its blocks.

    Args:
        pages: pages of whole blocks.
        block_tokens: tokens in a block.
        part: returns the pages of a token range of every block. Each thread calls `part` at most once for a range.
    """

    def __init__(self, pages: GroupPages, block_tokens: int, part: Callable[[TokenRange], GroupPages]) -> None:
        self.pages = pages
        self.block_tokens = block_tokens
        self._part = part
        self._parts: dict[TokenRange, GroupPages] = {}

    def of(self, start: int, end: int) -> GroupPages:
        """Pages of tokens [start, end) of every block."""
        tokens = TokenRange(start, end, self.block_tokens)
        if tokens not in self._parts:
            self._parts[tokens] = self.pages if end - start == self.block_tokens else self._part(tokens)
        return self._parts[tokens]

    def parts(self, stored_blocks: int, lead_tokens: int, trail_tokens: int) -> Iterator[BlockPart]:
        """Parts of the blocks of a chunk.

        Args:
            stored_blocks: number of blocks of the chunk.
            lead_tokens: tokens that the chunk lacks at the start of its first block.
            trail_tokens: tokens that the chunk lacks at the end of its last block.
        """
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


class SlotMemory(Protocol):
    """Memory that contains slots."""

    @property
    def base_address(self) -> int:
        """Address of offset 0."""
        ...

    @property
    def capacity_bytes(self) -> int: ...


Arena_co = TypeVar("Arena_co", bound=SlotMemory, covariant=True)


@dataclass(frozen=True, slots=True)
class RankMemory(Generic[Arena_co]):
    """Memory on both sides of a rank's copies.

    Args:
        pages: pages of whole blocks, by stored group.
        cut: `GroupBlocks` of each group with blocks that chunks cut.
        zeros: source of padding.
        arena: memory of the slots.
    """

    pages: Mapping[int, GroupPages]
    cut: Mapping[int, GroupBlocks]
    zeros: Zeros
    arena: Arena_co


class StoreRuns(NamedTuple):
    """Runs of a store.

    Args:
        runs: runs that write whole slots, one slot after the other. No run spans two slots.
        ends: for each slot, the number of runs up to the end of the slot.
        zero_bytes: bytes of padding in the runs.
    """

    runs: CopyRuns
    ends: npt.NDArray[np.int64]
    zero_bytes: int


class JobLowering:
    """Lowers a whole job in one call. Any thread may call the methods.

    Raises:
        ValueError: a slot is too small or outside the arena, a block is outside the pool, or a chunk to be stored is
            incomplete.
    """

    def __init__(self, memory: RankMemory[SlotMemory]) -> None:
        arena, zeros = memory.arena, memory.zeros
        self._native = Lowering(arena.base_address, arena.capacity_bytes, zeros.address, zeros.num_bytes)
        self._cut = memory.cut
        for group_index, pages in memory.pages.items():
            cut = memory.cut.get(group_index)
            self._native.add_group(group_index, cut.block_tokens if cut is not None else 0, *_columns(pages))
        self._known: set[tuple[int, int, int, int]] = set()
        """Cut shapes with parts that the native code has already: (group, stored blocks, lead and trail tokens)."""

    def load(self, copies: CopyTable) -> CopyRuns:
        """Runs that write every page of the copies once: first copies from the tier, then copies from blocks of the
        engine. Runs are as long as possible."""
        self._add_parts(copies)
        return self._lower(copies, is_store=False).runs

    def store(self, copies: CopyTable) -> StoreRuns:
        """Runs that write every byte of every slot once, in order. Runs within a slot are as long as possible."""
        self._add_parts(copies)
        return self._lower(copies, is_store=True)

    def _lower(self, copies: CopyTable, *, is_store: bool) -> StoreRuns:
        rows, num_runs, total_bytes, spans, ends, zero_bytes = self._native.lower(
            is_store, copies.shapes, copies.block_ids, copies.local_ids, copies.extents
        )
        return StoreRuns(CopyRuns.of_rows(rows, num_runs, total_bytes, spans), ends, zero_bytes)

    def _add_parts(self, copies: CopyTable) -> None:
        """Gives the native code the pages of partial blocks when these are first copied. Most possible parts are never
        used."""
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
    """Arguments for the native code: for each page of a block its (address, stride, bytes, offset in a chunk's block);
    bytes of a block in a chunk; number of blocks in the pool."""
    places = pages.chunk_offsets(0, 1, 1).tolist()
    rows = [
        (region.address, region.stride_bytes, region.page_bytes, place)
        for region, place in zip(pages.regions, places, strict=True)
    ]
    return np.array(rows, dtype=np.int64).tobytes(), pages.block_bytes, pages.num_blocks
