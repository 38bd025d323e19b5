"""From moves of blocks to runs of bytes: the last step before a copy engine, and the one place that pairs addresses.

A chunk that cuts blocks is up to three pieces, one behind the other: what it has of its first block, its whole blocks,
and what it has of its last one. Each piece is laid out as a chunk of its own.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from hybridkv.canonical import GroupPages, TokenRange
from hybridkv.connectors.vllm.messages import Move
from hybridkv.transfer import CopyRuns


def runs_of(move: Move, pages: GroupPages, extents: Sequence[tuple[int, int]], to_engine: bool) -> CopyRuns:
    """The copies that carry out a move.

    Args:
        move: blocks of a group and their place in a chunk.
        pages: where the group's pages lie.
        extents: (address, num_bytes) of the chunk's slot, in the chunk's order.
        to_engine: True loads, False stores.

    Returns:
        Runs that cover every page of the move once, in the order of the chunk's bytes.

    Raises:
        ValueError: the slot is smaller than the chunk, or a block is outside the pool.
    """
    slot_addresses, slot_sizes = np.array(extents, dtype=np.int64).reshape(-1, 2).T
    slot_ends = np.cumsum(slot_sizes)
    slot_starts = slot_ends - slot_sizes
    chunk_bytes = move.stored_blocks * pages.block_bytes
    if slot_sizes.sum() < chunk_bytes:
        raise ValueError(f"a chunk of {chunk_bytes} bytes does not fit a slot of {slot_sizes.sum()}")
    page_addresses, page_sizes = pages.addresses(move.block_ids)
    starts = pages.chunk_offsets(move.first_block, len(move.block_ids), move.stored_blocks)
    ends = starts + page_sizes
    # A page is cut wherever its place in the slot is.
    first = np.searchsorted(slot_ends, starts, side="right")
    cuts = np.searchsorted(slot_ends, ends - 1, side="right") - first + 1
    page = np.repeat(np.arange(starts.size), cuts)
    extent = first[page] + np.arange(page.size) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    low = np.maximum(starts[page], slot_starts[extent])
    high = np.minimum(ends[page], slot_ends[extent])
    engine = page_addresses[page] + (low - starts[page])
    stored = slot_addresses[extent] + (low - slot_starts[extent])
    sources, destinations = (stored, engine) if to_engine else (engine, stored)
    return CopyRuns(sources, destinations, high - low)


class GroupBlocks:
    """A group's blocks, whole or in part.

    Args:
        pages: of whole blocks.
        block_tokens: tokens in one.
        part: pages of some tokens of every block; each range is asked for once.
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

    def pieces(self, move: Move) -> Iterator[tuple[GroupPages, int, int]]:
        """The pieces of the move's chunk: their pages, the first stored block of each, and how many it has."""
        size, blocks, lead = self.block_tokens, move.stored_blocks, move.lead_tokens
        end = size - move.trail_tokens
        if blocks == 1:
            yield self.of(lead, end), 0, 1
            return
        first, last = int(lead > 0), blocks - int(end < size)
        if first:
            yield self.of(lead, size), 0, 1
        if last > first:
            yield self.pages, first, last - first
        if last < blocks:
            yield self.of(0, end), last, 1


def cut_runs_of(move: Move, blocks: GroupBlocks, extents: Sequence[tuple[int, int]], to_engine: bool) -> CopyRuns:
    """As `runs_of`, for a chunk that may cut blocks.

    Args:
        move: blocks of a group and their place in a chunk.
        blocks: where they lie.
        extents: (address, num_bytes) of the chunk's slot, in the chunk's order.
        to_engine: True loads, False stores.

    Raises:
        ValueError: the slot is smaller than the chunk, or a block is outside the pool.
        LayoutError: the tokens of a block cannot be told apart.
    """
    runs = []
    begin, moved = 0, range(move.first_block, move.first_block + len(move.block_ids))
    for pages, first, count in blocks.pieces(move):
        num_bytes = count * pages.block_bytes
        own = range(max(first, moved.start), min(first + count, moved.stop))
        if own:
            ids = move.block_ids[own.start - moved.start : own.stop - moved.start]
            piece = msgspec.structs.replace(move, first_block=own.start - first, stored_blocks=count, block_ids=ids)
            runs.append(runs_of(piece, pages, _cut(extents, begin, begin + num_bytes), to_engine))
        begin += num_bytes
    return CopyRuns.concatenate(runs)


def _cut(extents: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Bytes [begin, end) of a slot."""
    found, at = [], 0
    for address, num_bytes in extents:
        low, high = max(begin, at), min(end, at + num_bytes)
        if low < high:
            found.append((address + low - at, high - low))
        at += num_bytes
    return found
