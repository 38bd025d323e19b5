"""From copies of engine blocks to pages of the server: which there are, and in which order it wants to hear of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridkv.connectors.vllm.lmcache.messages import PageCopy
from hybridkv.connectors.vllm.lmcache.site import Site
from hybridkv.lmcache.block_ids import NULL_BLOCK
from hybridkv.lmcache.geometry import Geometry


class ChunkSpan(NamedTuple):
    """The half-open run of chunks [start, end) of a prefix."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks of one group, each of which is one page.

    Args:
        group: among the site's.
        positions: of each block, counted from the first of the chunks that move.
        block_ids: of the engine.
    """

    group: int
    positions: list[int]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Parts:
    """All pages of one operation.

    Args:
        chunks: that move.
        parts: of each group that has a page.
        num_unkept: blocks of which a server keeps none.
    """

    chunks: ChunkSpan
    parts: tuple[Part, ...]
    num_unkept: int

    @property
    def numbers(self) -> dict[int, int]:
        """Pages of each group."""
        return {part.group: len(part.positions) for part in self.parts}


def parts_of(site: Site, geometry: Geometry, copies: Iterable[PageCopy], chunks: ChunkSpan) -> Parts:
    """The pages of the copies that lie in these chunks; others are passed over.

    Raises:
        ValueError: a copy is of a group that is not stored, or leaves its chunk, or two have a block in common.
    """
    found: dict[int, dict[int, int]] = {}
    num_unkept = 0
    for copy in copies:
        if not chunks.start <= copy.chunk < chunks.end:
            continue
        if copy.group_index not in site.group_indexes:
            raise ValueError(f"group {copy.group_index} is not stored")
        group = site.group_indexes.index(copy.group_index)
        blocks, kept = geometry.blocks_per_chunk[group], geometry.kept_per_chunk[group]
        if not 0 <= copy.first_block <= copy.first_block + len(copy.block_ids) <= blocks:
            raise ValueError(f"{len(copy.block_ids)} blocks from {copy.first_block} are not in a chunk of {blocks}")
        pages = found.setdefault(group, {})
        for block, block_id in enumerate(copy.block_ids, copy.first_block):
            if block < blocks - kept:
                num_unkept += 1
                continue
            position = (copy.chunk - chunks.start) * blocks + block
            if position in pages:
                raise ValueError(f"group {copy.group_index} has block {block} of chunk {copy.chunk} twice")
            pages[position] = block_id
    parts = (Part(group, list(pages), list(pages.values())) for group, pages in sorted(found.items()) if pages)
    return Parts(chunks, tuple(parts), num_unkept)


def tables_of(geometry: Geometry, parts: Parts, pages: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """What the server is told: for each group, in its order, a page for every block of the chunks.

    Args:
        geometry: of the groups.
        parts: of the operation.
        pages: that were taken for it, one for each block of each part.
    """
    num_chunks = parts.chunks.end - parts.chunks.start
    tables = [[NULL_BLOCK] * (num_chunks * blocks) for blocks in geometry.blocks_per_chunk]
    for part in parts.parts:
        table = tables[part.group]
        for position, page in zip(part.positions, pages[part.group], strict=True):
            table[position] = page
    return [tables[group] for group in geometry.order]
