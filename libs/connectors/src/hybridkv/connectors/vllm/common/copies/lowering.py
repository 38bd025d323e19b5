"""Lowering of copies to runs of bytes, the last step before a copy engine. No other module computes address pairs.

`JobLowering` lowers a whole job in native code. The numpy functions lower one chunk, for LMCache's pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.canonical import GroupPages, TokenRange
from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.tiers import SealedMemory
from hybridkv.transfer import CopyRuns, Extent, Lowering

Integers = npt.NDArray[np.int64]


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

    def num_bytes_in(self, runs: CopyRuns) -> int:
        """Bytes of the runs that have this memory as source."""
        is_zero = (runs.sources >= self.address) & (runs.sources < self.address + self.num_bytes)
        return int(runs.num_bytes[is_zero].sum())


class _Pieces(NamedTuple):
    """Pieces of memory and their places in a chunk, ascending by place.

    Args:
        addresses: address of each piece in the engine's blocks, or in the zeros.
        offsets: offsets of the pieces in the chunk, in bytes.
        sizes: bytes of each piece.
    """

    addresses: Integers
    offsets: Integers
    sizes: Integers


def load_runs(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent]) -> CopyRuns:
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
    engine, stored, num_bytes = _paired(_pages_of(copy, pages), extents)
    return CopyRuns(stored, engine, num_bytes)


def store_runs(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent], zeros: Zeros) -> CopyRuns:
    """Runs that store a whole chunk.

    Args:
        copy: all blocks of a chunk.
        pages: the group's pages.
        extents: (address, num_bytes) of the chunk's slot, in the chunk's order.
        zeros: source of padding.

    Returns:
        Runs that write every byte of the slot once, in order: the pages, the zeros between them, and zeros after the
        chunk if its slot is longer. So no earlier content remains in the slot.

    Raises:
        ValueError: the slot is smaller than the chunk, a block is outside the pool, or the copy lacks blocks of the
            chunk, so that the slot would keep earlier content in their places.
    """
    require_all_blocks(copy)
    slot_bytes = _require_room(copy, pages, extents)
    pieces = _with_zeros(_pages_of(copy, pages), _gaps(copy, pages, slot_bytes, zeros.num_bytes), zeros)
    return CopyRuns(*_paired(pieces, extents))


def require_all_blocks(copy: ChunkCopy) -> None:
    """Refuses a store of an incomplete chunk.

    Raises:
        ValueError: the copy lacks blocks of the chunk.
    """
    if copy.first_block or len(copy.block_ids) != copy.stored_blocks:
        got = f"{len(copy.block_ids)} blocks from block {copy.first_block} on"
        raise ValueError(f"a store needs all {copy.stored_blocks} blocks of the chunk, got {got}")


def _require_room(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent]) -> int:
    """Checks that the chunk fits. Returns the bytes of the slot."""
    slot_bytes = sum(num_bytes for _, num_bytes in extents)
    chunk_bytes = copy.stored_blocks * pages.block_bytes
    if slot_bytes < chunk_bytes:
        raise ValueError(f"a chunk of {chunk_bytes} bytes does not fit a slot of {slot_bytes}")
    return slot_bytes


def _pages_of(copy: ChunkCopy, pages: GroupPages) -> _Pieces:
    addresses, sizes = pages.addresses(copy.block_ids)
    return _Pieces(addresses, pages.chunk_offsets(copy.first_block, len(copy.block_ids), copy.stored_blocks), sizes)


def _gaps(copy: ChunkCopy, pages: GroupPages, slot_bytes: int, largest_bytes: int) -> tuple[Integers, Integers]:
    """Offsets and sizes, ascending, of the bytes of a chunk's slot that belong to no page. The rest of the slot after
    the chunk is split into pieces of at most `largest_bytes`."""
    offsets, sizes = pages.padding(0, copy.stored_blocks, copy.stored_blocks)
    offsets_after = np.arange(copy.stored_blocks * pages.block_bytes, slot_bytes, largest_bytes, dtype=np.int64)
    rest = np.minimum(slot_bytes - offsets_after, largest_bytes)
    return np.concatenate([offsets, offsets_after]), np.concatenate([sizes, rest])


def _with_zeros(pieces: _Pieces, gaps: tuple[Integers, Integers], zeros: Zeros) -> _Pieces:
    offsets, sizes = gaps
    if not offsets.size:
        return pieces
    places = np.searchsorted(pieces.offsets, offsets)
    return _Pieces(
        np.insert(pieces.addresses, places, zeros.address),
        np.insert(pieces.offsets, places, offsets),
        np.insert(pieces.sizes, places, sizes),
    )


def _paired(pieces: _Pieces, extents: Sequence[Extent]) -> tuple[Integers, Integers, Integers]:
    """Splits the pieces at the ends of the slot's extents. Returns the addresses, the addresses in the slot, and the
    sizes of the split pieces."""
    slot_addresses, slot_sizes = np.array(extents, dtype=np.int64).reshape(-1, 2).T
    slot_ends = np.cumsum(slot_sizes)
    slot_starts = slot_ends - slot_sizes
    ends = pieces.offsets + pieces.sizes
    first = np.searchsorted(slot_ends, pieces.offsets, side="right")
    cuts = np.searchsorted(slot_ends, ends - 1, side="right") - first + 1
    piece = np.repeat(np.arange(pieces.offsets.size), cuts)
    extent = first[piece] + np.arange(piece.size) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    low = np.maximum(pieces.offsets[piece], slot_starts[extent])
    high = np.minimum(ends[piece], slot_ends[extent])
    here = pieces.addresses[piece] + (low - pieces.offsets[piece])
    stored = slot_addresses[extent] + (low - slot_starts[extent])
    return here, stored, high - low


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


@dataclass(frozen=True, slots=True)
class RankMemory:
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
    arena: SealedMemory


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

    def __init__(self, memory: RankMemory) -> None:
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
