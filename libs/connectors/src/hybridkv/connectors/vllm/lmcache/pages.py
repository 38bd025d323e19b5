"""Pages of one operation: from copies of engine blocks to the block tables that the server expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.connectors.vllm.lmcache.messages import PageCopy
from hybridkv.connectors.vllm.lmcache.session_spec import SessionSpec
from hybridkv.lmcache.geometry import NULL_BLOCK, Geometry


class ChunkSpan(NamedTuple):
    """Half-open range of chunks [start, end) of a prefix."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TransferPart:
    """Blocks of one group. Each block is one page.

    Args:
        group: index among the session's groups.
        positions: position of each block, from the first block of the first chunk.
        block_ids: engine's blocks.
    """

    group: int
    positions: list[int]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class PageTransfer:
    """All pages of one operation.

    Args:
        chunks: chunks of the operation.
        parts: one per group with a page.
        num_not_kept: number of blocks that a server does not keep.
    """

    chunks: ChunkSpan
    parts: tuple[TransferPart, ...]
    num_not_kept: int

    @property
    def num_pages_by_group(self) -> dict[int, int]:
        """Number of pages of each group."""
        return {part.group: len(part.positions) for part in self.parts}


def page_transfer(spec: SessionSpec, geometry: Geometry, copies: Iterable[PageCopy], chunks: ChunkSpan) -> PageTransfer:
    """Pages of the copies in these chunks. Other copies are skipped.

    Raises:
        ValueError: a copy has a group that is not stored or blocks outside its chunk, or two copies of a group have the
            same block position of the same chunk.
    """
    found: dict[int, dict[int, int]] = {}
    num_not_kept = 0
    for copy in copies:
        if not chunks.start <= copy.chunk < chunks.end:
            continue
        if copy.group_index not in spec.group_indexes:
            raise ValueError(f"group {copy.group_index} is not stored")
        group = spec.group_indexes.index(copy.group_index)
        blocks, kept = geometry.blocks_per_chunk[group], geometry.kept_per_chunk[group]
        if not 0 <= copy.first_block <= copy.first_block + len(copy.block_ids) <= blocks:
            raise ValueError(f"{len(copy.block_ids)} blocks from {copy.first_block} are not in a chunk of {blocks}")
        pages = found.setdefault(group, {})
        for block, block_id in enumerate(copy.block_ids, copy.first_block):
            if block < blocks - kept:
                num_not_kept += 1
                continue
            position = (copy.chunk - chunks.start) * blocks + block
            if position in pages:
                raise ValueError(f"group {copy.group_index} has block {block} of chunk {copy.chunk} twice")
            pages[position] = block_id
    parts = (TransferPart(group, list(pages), list(pages.values())) for group, pages in sorted(found.items()) if pages)
    return PageTransfer(chunks, tuple(parts), num_not_kept)


def block_tables(geometry: Geometry, transfer: PageTransfer, pages: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Block tables for the server: per group in registration order, one entry for each block of the chunks: its page,
    or NULL_BLOCK if the operation has no page for it.

    Args:
        geometry: geometry of the groups.
        transfer: pages of the operation.
        pages: for each group, pages taken from the pool, one for each of `TransferPart.positions`.
    """
    num_chunks = transfer.chunks.end - transfer.chunks.start
    tables = [[NULL_BLOCK] * (num_chunks * blocks) for blocks in geometry.blocks_per_chunk]
    for part in transfer.parts:
        table = tables[part.group]
        for position, page in zip(part.positions, pages[part.group], strict=True):
            table[position] = page
    return [tables[group] for group in geometry.order]
