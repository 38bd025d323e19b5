"""Runs of a job, chunk by chunk with numpy: the reference for the native `JobLowering`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.common.copies.lowering import (
    GroupBlocks,
    RankMemory,
    StoreRuns,
    Zeros,
    load_runs,
    require_all_blocks,
    store_runs,
)
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.transfer import CopyRuns, Extent


class PlainLowering:
    """Has the members of `JobLowering`."""

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory

    def load(self, copies: CopyTable) -> CopyRuns:
        each = list(copies)
        return joined_loads(each, [self._load(copy) for copy in each])

    def _load(self, copy: ChunkCopy) -> CopyRuns:
        memory = self._memory
        if copy.local_blocks:
            return local_runs(copy, memory.pages[copy.group_index])
        extents, cut = memory.arena.addresses(copy.slot), memory.cut.get(copy.group_index)
        if cut is not None:
            return cut_load_runs(copy, cut, extents)
        return load_runs(copy, memory.pages[copy.group_index], extents)

    def store(self, copies: CopyTable) -> StoreRuns:
        parts = [self._store(copy).coalesce() for copy in copies]
        # Joining runs of two chunks would join two records.
        runs = CopyRuns.concatenate(parts)
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return StoreRuns(runs, ends, self._memory.zeros.num_bytes_in(runs))

    def _store(self, copy: ChunkCopy) -> CopyRuns:
        memory = self._memory
        extents, cut = memory.arena.addresses(copy.slot), memory.cut.get(copy.group_index)
        if cut is not None:
            return cut_store_runs(copy, cut, extents, memory.zeros)
        return store_runs(copy, memory.pages[copy.group_index], extents, memory.zeros)


def local_runs(copy: ChunkCopy, pages: GroupPages) -> CopyRuns:
    """The runs that copy the blocks of a copy from others of the engine.

    Args:
        copy: blocks of a group, and as many that hold the same.
        pages: where the group's pages lie.

    Returns:
        Runs that write every page of the copy once and nothing else.

    Raises:
        ValueError: there are not as many of one as of the other, one is both, or a block is outside the pool.
    """
    if len(copy.local_blocks) != len(copy.block_ids) or set(copy.local_blocks) & set(copy.block_ids):
        raise ValueError(f"expected as many other blocks as {copy.block_ids}, got {copy.local_blocks}")
    sources, num_bytes = pages.addresses(copy.local_blocks)
    return CopyRuns(sources, pages.addresses(copy.block_ids)[0], num_bytes)


def joined_loads(copies: Sequence[ChunkCopy], parts: Sequence[CopyRuns]) -> CopyRuns:
    """The runs of a load's copies, as few as possible. Bytes from the tier and from the engine's blocks are never
    joined: the memory of one may end where that of the other begins, and a run must lie in one registration."""
    from_tier = [part for copy, part in zip(copies, parts, strict=True) if not copy.local_blocks]
    local = [part for copy, part in zip(copies, parts, strict=True) if copy.local_blocks]
    return CopyRuns.concatenate([CopyRuns.concatenate(each).coalesce() for each in (from_tier, local)])


def cut_load_runs(copy: ChunkCopy, blocks: GroupBlocks, extents: Sequence[Extent]) -> CopyRuns:
    """As `load_runs`, for a chunk that may cut blocks.

    Raises:
        ValueError: as `load_runs` does.
    """
    return CopyRuns.concatenate([load_runs(*piece) for piece in _pieces(copy, blocks, extents)])


def cut_store_runs(copy: ChunkCopy, blocks: GroupBlocks, extents: Sequence[Extent], zeros: Zeros) -> CopyRuns:
    """As `store_runs`, for a chunk that may cut blocks.

    Raises:
        ValueError: as `store_runs` does.
    """
    require_all_blocks(copy)
    return CopyRuns.concatenate([store_runs(*piece, zeros) for piece in _pieces(copy, blocks, extents)])


def pieces_of(copy: ChunkCopy, blocks: GroupBlocks) -> Iterator[tuple[GroupPages, int, int]]:
    """The pieces of the copy's chunk: their pages, the first stored block of each, and how many it has."""
    for part in blocks.parts(copy.stored_blocks, copy.lead_tokens, copy.trail_tokens):
        yield blocks.of(part.start, part.end), part.first_block, part.num_blocks


def _pieces(
    copy: ChunkCopy, blocks: GroupBlocks, extents: Sequence[Extent]
) -> Iterator[tuple[ChunkCopy, GroupPages, list[Extent]]]:
    """The part of the copy in each piece, as a copy of its own. The last one has the rest of the slot."""
    begin, copied = 0, range(copy.first_block, copy.first_block + len(copy.block_ids))
    for pages, first, count in pieces_of(copy, blocks):
        is_last = first + count == copy.stored_blocks
        end = sum(num_bytes for _, num_bytes in extents) if is_last else begin + count * pages.block_bytes
        own = range(max(first, copied.start), min(first + count, copied.stop))
        if own:
            ids = copy.block_ids[own.start - copied.start : own.stop - copied.start]
            piece = msgspec.structs.replace(copy, first_block=own.start - first, stored_blocks=count, block_ids=ids)
            yield piece, pages, _between(extents, begin, end)
        begin = end


def _between(extents: Sequence[Extent], begin: int, end: int) -> list[Extent]:
    """Bytes [begin, end) of a slot."""
    found, at = [], 0
    for address, num_bytes in extents:
        low, high = max(begin, at), min(end, at + num_bytes)
        if low < high:
            found.append((address + low - at, high - low))
        at += num_bytes
    return found
