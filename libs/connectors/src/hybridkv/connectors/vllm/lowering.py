"""From copies of blocks to runs of bytes: the last step before a copy engine, the one place that pairs addresses."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybridkv.canonical import GroupPages
from hybridkv.connectors.vllm.copy_table import ChunkCopy
from hybridkv.transfer import CopyRuns, Extent

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
