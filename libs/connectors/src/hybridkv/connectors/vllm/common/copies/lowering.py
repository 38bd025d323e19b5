"""Lowering of copies to runs of bytes, the last step before a copy engine. No other module pairs addresses.

`JobLowering` lowers a whole job in native code. The functions with numpy lower one chunk, for LMCache's pages.
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
    """Memory that is zero and stays so, from which the padding of stored chunks is copied.

    A copy like any other: so padding is written before a chunk is sealed, is part of a checksum that is taken on the
    way, and passes a GPU's staging memory together with the pages around it.

    Args:
        address: of its first byte.
        num_bytes: what takes more is copied in several runs.
    """

    address: int
    num_bytes: int

    def num_bytes_in(self, runs: CopyRuns) -> int:
        """Bytes of runs that are copied from here."""
        is_zero = (runs.sources >= self.address) & (runs.sources < self.address + self.num_bytes)
        return int(runs.num_bytes[is_zero].sum())


class _Pieces(NamedTuple):
    """Bytes and their places in a chunk, ascending.

    Args:
        addresses: of the bytes that are not the slot's.
        offsets: in the chunk.
        sizes: of each piece.
    """

    addresses: Integers
    offsets: Integers
    sizes: Integers


def load_runs(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent]) -> CopyRuns:
    """The runs that load the blocks of a copy.

    Args:
        copy: blocks of a group and their place in a chunk.
        pages: where the group's pages lie.
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
    """The runs that store a chunk.

    Args:
        copy: all blocks of a chunk.
        pages: where the group's pages lie.
        extents: (address, num_bytes) of the chunk's slot, in the chunk's order.
        zeros: where padding comes from.

    Returns:
        Runs that write every byte of the slot once, in order: the pages, the zeros between them, and zeros behind the
        chunk where its slot is longer. So nothing that was in the slot before is in it afterwards.

    Raises:
        ValueError: the slot is smaller than the chunk, a block is outside the pool, or blocks of the chunk are missing,
            whose places would keep what was there before.
    """
    require_whole(copy)
    slot_bytes = _require_room(copy, pages, extents)
    pieces = _with_zeros(_pages_of(copy, pages), _gaps(copy, pages, slot_bytes, zeros.num_bytes), zeros)
    return CopyRuns(*_paired(pieces, extents))


def require_whole(copy: ChunkCopy) -> None:
    """Refuses a store of a part of a chunk.

    Raises:
        ValueError: blocks of the chunk are missing.
    """
    if copy.first_block or len(copy.block_ids) != copy.stored_blocks:
        blocks = f"{len(copy.block_ids)} from the one at {copy.first_block}"
        raise ValueError(f"a chunk of {copy.stored_blocks} blocks is stored as a whole, got {blocks}")


def _require_room(copy: ChunkCopy, pages: GroupPages, extents: Sequence[Extent]) -> int:
    """Bytes of the slot."""
    slot_bytes = sum(num_bytes for _, num_bytes in extents)
    chunk_bytes = copy.stored_blocks * pages.block_bytes
    if slot_bytes < chunk_bytes:
        raise ValueError(f"a chunk of {chunk_bytes} bytes does not fit a slot of {slot_bytes}")
    return slot_bytes


def _pages_of(copy: ChunkCopy, pages: GroupPages) -> _Pieces:
    addresses, sizes = pages.addresses(copy.block_ids)
    return _Pieces(addresses, pages.chunk_offsets(copy.first_block, len(copy.block_ids), copy.stored_blocks), sizes)


def _gaps(copy: ChunkCopy, pages: GroupPages, slot_bytes: int, largest_bytes: int) -> tuple[Integers, Integers]:
    """Offsets and sizes, ascending, of what a chunk's pages leave of its slot."""
    offsets, sizes = pages.padding(0, copy.stored_blocks, copy.stored_blocks)
    behind = np.arange(copy.stored_blocks * pages.block_bytes, slot_bytes, largest_bytes, dtype=np.int64)
    rest = np.minimum(slot_bytes - behind, largest_bytes)
    return np.concatenate([offsets, behind]), np.concatenate([sizes, rest])


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
    """For each piece its address, its address in the slot, and its size; cut wherever its place in the slot is."""
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
