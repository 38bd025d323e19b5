"""From copies to runs of bytes where chunks end inside blocks.

A chunk that cuts blocks is up to three pieces, one behind the other: what it has of its first block, its whole blocks,
and what it has of its last one. Each piece is laid out as a chunk of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from hybridkv.canonical import GroupPages, TokenRange
from hybridkv.connectors.vllm.copy_table import ChunkCopy
from hybridkv.connectors.vllm.lowering import Zeros, load_runs, require_whole, store_runs
from hybridkv.transfer import CopyRuns, Extent


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

    def pieces(self, copy: ChunkCopy) -> Iterator[tuple[GroupPages, int, int]]:
        """The pieces of the copy's chunk: their pages, the first stored block of each, and how many it has."""
        for part in self.parts(copy.stored_blocks, copy.lead_tokens, copy.trail_tokens):
            yield self.of(part.start, part.end), part.first_block, part.num_blocks


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
    require_whole(copy)
    return CopyRuns.concatenate([store_runs(*piece, zeros) for piece in _pieces(copy, blocks, extents)])


def _pieces(
    copy: ChunkCopy, blocks: GroupBlocks, extents: Sequence[Extent]
) -> Iterator[tuple[ChunkCopy, GroupPages, list[Extent]]]:
    """What is copied of each piece, as a copy of its own. The last one has the rest of the slot."""
    begin, copied = 0, range(copy.first_block, copy.first_block + len(copy.block_ids))
    for pages, first, count in blocks.pieces(copy):
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
