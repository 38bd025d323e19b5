"""Runs of a job, chunk by chunk in plain loops: the reference for the native `JobLowering`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.common.copies.lowering import GroupBlocks, RankMemory, SlotMemory, StoreRuns, Zeros
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.tiers import Slot
from hybridkv.transfer import CopyRuns, Extent

Runs: TypeAlias = list[tuple[int, int, int]]
"""Source, destination and number of bytes of each run."""


class PlainLowering:
    """Has the members of `JobLowering`."""

    def __init__(self, memory: RankMemory[SlotMemory]) -> None:
        self._memory = memory

    def load(self, copies: CopyTable) -> CopyRuns:
        # Bytes from the tier and from the engine's blocks are never joined: the memory of one may end where that of
        # the other begins, and a run must lie in one registration.
        from_tier: Runs = []
        local: Runs = []
        for copy in copies:
            if copy.local_blocks:
                local += local_runs(copy, self._memory.pages[copy.group_index])
            else:
                from_tier += self._load(copy)
        return CopyRuns.of(joined(from_tier) + joined(local))

    def _load(self, copy: ChunkCopy) -> Runs:
        extents, cut = self._extents(copy.slot), self._memory.cut.get(copy.group_index)
        if cut is not None:
            return cut_load_runs(copy, cut, extents)
        return load_runs(copy, self._memory.pages[copy.group_index], extents)

    def store(self, copies: CopyTable) -> StoreRuns:
        zeros = self._memory.zeros
        runs: Runs = []
        ends: list[int] = []
        for copy in copies:
            # Joining runs of two chunks would join two records.
            runs += joined(self._store(copy, zeros))
            ends.append(len(runs))
        padding = range(zeros.address, zeros.address + zeros.num_bytes)
        zero_bytes = sum(num_bytes for source, _, num_bytes in runs if source in padding)
        return StoreRuns(CopyRuns.of(runs), np.array(ends, dtype=np.int64), zero_bytes)

    def _store(self, copy: ChunkCopy, zeros: Zeros) -> Runs:
        extents, cut = self._extents(copy.slot), self._memory.cut.get(copy.group_index)
        if cut is not None:
            return cut_store_runs(copy, cut, extents, zeros)
        return store_runs(copy, self._memory.pages[copy.group_index], extents, zeros)

    def _extents(self, slot: Slot) -> list[Extent]:
        arena = self._memory.arena
        for offset, num_bytes in slot.extents:
            if offset < 0 or num_bytes <= 0 or offset + num_bytes > arena.capacity_bytes:
                raise ValueError(f"{slot} does not lie in the arena")
        return [(arena.base_address + offset, num_bytes) for offset, num_bytes in slot.extents]


def joined(runs: Runs) -> Runs:
    """The same bytes in fewer runs: consecutive runs that are adjacent on both sides are one."""
    found: Runs = []
    for run in runs:
        source, destination, num_bytes = found[-1] if found else run
        if run[:2] == (source + num_bytes, destination + num_bytes):
            found[-1] = (source, destination, num_bytes + run[2])
        else:
            found.append(run)
    return found


def local_runs(copy: ChunkCopy, pages: GroupPages) -> Runs:
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
    return CopyRuns(sources, pages.addresses(copy.block_ids)[0], num_bytes).triples()


def load_runs(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent]) -> Runs:
    """Runs that load the blocks of a copy.

    Args:
        copy: blocks of a group and their place in a chunk.
        pages: the group's pages.
        extents: (address, num_bytes) of the chunk's slot, in the chunk's order.

    Returns:
        Runs that write every page of the copy once and nothing else, in the order of the chunk's bytes.

    Raises:
        ValueError: the slot is smaller than the chunk, or a block is outside the pool.
    """
    _require_room(copy, pages, extents)
    return [(stored, address, num_bytes) for address, stored, num_bytes in _placed(_pages_of(copy, pages), extents)]


def store_runs(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent], zeros: Zeros) -> Runs:
    """Runs that store a whole chunk.

    Args:
        copy: all blocks of a chunk.
        pages: the group's pages.
        extents: (address, num_bytes) of the chunk's slot, in the chunk's order.
        zeros: source of padding.

    Returns:
        Runs that write every byte of the slot once, in order: the pages, the zeros between them, and zeros after the
        chunk if its slot is longer.

    Raises:
        ValueError: the slot is smaller than the chunk, a block is outside the pool, or the copy lacks blocks of the
            chunk.
    """
    _require_all_blocks(copy)
    slot_bytes = _require_room(copy, pages, extents)
    pieces: list[tuple[int, int, int]] = []
    at = 0
    # The ends of the chunk and of the slot are pages without bytes.
    ends = [(0, copy.stored_blocks * pages.block_bytes, 0), (0, slot_bytes, 0)]
    for address, offset, num_bytes in [*_pages_of(copy, pages), *ends]:
        for gap in range(at, offset, zeros.num_bytes):
            pieces.append((zeros.address, gap, min(zeros.num_bytes, offset - gap)))
        pieces.append((address, offset, num_bytes))
        at = offset + num_bytes
    return list(_placed(pieces, extents))


def cut_load_runs(copy: ChunkCopy, blocks: GroupBlocks, extents: Sequence[Extent]) -> Runs:
    """As `load_runs`, for a chunk that may cut blocks.

    Raises:
        ValueError: as `load_runs` does.
    """
    return [run for piece in _pieces(copy, blocks, extents) for run in load_runs(*piece)]


def cut_store_runs(copy: ChunkCopy, blocks: GroupBlocks, extents: Sequence[Extent], zeros: Zeros) -> Runs:
    """As `store_runs`, for a chunk that may cut blocks.

    Raises:
        ValueError: as `store_runs` does.
    """
    _require_all_blocks(copy)
    return [run for piece in _pieces(copy, blocks, extents) for run in store_runs(*piece, zeros)]


def _require_all_blocks(copy: ChunkCopy) -> None:
    if copy.first_block or len(copy.block_ids) != copy.stored_blocks:
        raise ValueError(f"a store needs all {copy.stored_blocks} blocks of the chunk, got {copy.block_ids}")


def _require_room(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent]) -> int:
    """Checks that the chunk fits. Returns the bytes of the slot."""
    slot_bytes = sum(num_bytes for _, num_bytes in extents)
    chunk_bytes = copy.stored_blocks * pages.block_bytes
    if slot_bytes < chunk_bytes:
        raise ValueError(f"a chunk of {chunk_bytes} bytes does not fit a slot of {slot_bytes}")
    return slot_bytes


def _pages_of(copy: ChunkCopy, pages: GroupPages) -> list[tuple[int, int, int]]:
    """Address in the engine's blocks, offset in the chunk and bytes of each page, in the chunk's order."""
    addresses, sizes = pages.addresses(copy.block_ids)
    offsets = pages.chunk_offsets(copy.first_block, len(copy.block_ids), copy.stored_blocks)
    return list(zip(addresses.tolist(), offsets.tolist(), sizes.tolist(), strict=True))


def _placed(pieces: Sequence[tuple[int, int, int]], extents: Sequence[Extent]) -> Iterator[tuple[int, int, int]]:
    """Splits the pieces, as of `_pages_of`, at the ends of the slot's extents. Yields the address, the address in the
    slot and the bytes of each split piece."""
    for address, offset, num_bytes in pieces:
        done = 0
        for stored, size in _between(extents, offset, offset + num_bytes):
            yield address + done, stored, size
            done += size


def _pieces(
    copy: ChunkCopy, blocks: GroupBlocks, extents: Sequence[Extent]
) -> Iterator[tuple[ChunkCopy, GroupPages, list[Extent]]]:
    """The part of the copy in each piece, as a copy of its own. The last one has the rest of the slot."""
    begin, copied = 0, range(copy.first_block, copy.first_block + len(copy.block_ids))
    for start_token, end_token, first, count in blocks.parts(copy.stored_blocks, copy.lead_tokens, copy.trail_tokens):
        pages = blocks.of(start_token, end_token)
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
