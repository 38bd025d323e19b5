"""Where the pages of a group lie, in memory and in a stored chunk, as plain numbers: no tensors, so no torch.

A layer's page is one region, or several where its bytes do not lie together; a region's pages lie a fixed stride apart.
A stored chunk is block-major: all pages of its first block, layer after layer, then those of the next. So a part of its
blocks is one stretch of it, and of an engine that keeps all layers of a block together a block is one run. Each page
begins at a multiple of `PAGE_ALIGN_BYTES`; what lies between it and the next is zeros, which `GroupPages.padding` names
and whoever writes a chunk writes. The engine's own padding is not stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

PAGE_ALIGN_BYTES = 16
"""Where pages of a stored chunk begin: the widest word that a lane of a GPU moves."""


def aligned_page_bytes(page_bytes: int) -> int:
    """What a layer's page takes up in a stored chunk, the zeros behind it included."""
    return -(-page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


class LayerLayout(NamedTuple):
    """What is known of a layer before its tensor is seen. Nothing of it is guessed from a shape.

    Args:
        name: as the engine registers it.
        page_bytes: of one block, without padding.
        block_dim: the dimension that counts blocks: 1 for split K/V, (2, blocks, ...). A size of 2 says nothing.
        interleaved: within a block, other layers' bytes lie between this one's (blocks that hold heads before layers).
            Without it such gaps are an error, since a sliced tensor looks the same.
        token_dim: the dimension that counts a block's tokens. With it a page has one order of bytes, whether the engine
            splits the manager's blocks for its kernels or not.
    """

    name: str
    page_bytes: int
    block_dim: int = 0
    interleaved: bool = False
    token_dim: int | None = None


class PageRegion(NamedTuple):
    """One page of every block.

    Args:
        address: of block 0's page.
        stride_bytes: from one block's page to the next block's.
        page_bytes: of content, without padding.
    """

    address: int
    stride_bytes: int
    page_bytes: int


class GroupPages:
    """All pages of one group.

    Args:
        pages: for each layer, in order, the regions that make up its page.
        num_blocks: blocks in the engine's pool.

    Raises:
        ValueError: there is no page, or none of a layer, or one does not fit its stride.
    """

    def __init__(self, pages: Sequence[Sequence[PageRegion]], num_blocks: int) -> None:
        if not pages or not all(pages) or num_blocks <= 0:
            raise ValueError(f"a group needs regions for each page and blocks, got {pages} and {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.regions = tuple(region for page in pages for region in page)
        for region in self.regions:
            if not 0 < region.page_bytes <= region.stride_bytes:
                raise ValueError(f"page_bytes must be positive and fit the stride, got {region}")
        content = np.array([sum(region.page_bytes for region in page) for page in pages], dtype=np.int64)
        taken = np.array([aligned_page_bytes(int(num_bytes)) for num_bytes in content], dtype=np.int64)
        self.block_bytes = int(taken.sum())
        """Bytes that one block of this group adds to a stored chunk, padding included."""
        self._addresses = np.array([region.address for region in self.regions], dtype=np.int64)
        self._strides = np.array([region.stride_bytes for region in self.regions], dtype=np.int64)
        self._sizes = np.array([region.page_bytes for region in self.regions], dtype=np.int64)
        # The regions of a page follow each other; each page begins where the zeros behind the one before it end.
        zeros_before = np.repeat(np.cumsum(taken - content) - (taken - content), [len(page) for page in pages])
        self._offsets = np.cumsum(self._sizes) - self._sizes + zeros_before
        is_padded = taken > content
        self._padding_offsets = (np.cumsum(taken) - taken + content)[is_padded]
        self._padding_sizes = (taken - content)[is_padded]

    def addresses(self, block_ids: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        """Addresses and sizes of the blocks' pages, in the order in which a chunk stores them.

        Args:
            block_ids: n blocks of this group.

        Returns:
            Two arrays of length n times the number of regions, block-major.

        Raises:
            ValueError: a block id is no integer, or outside the pool.
        """
        given = np.asarray(block_ids)
        # Not converted on the way in: that would make block 1 of 1.5 and of True. No ids make an array of floats.
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"block ids must be a list of integers, got {block_ids!r}")
        if given.size and (given.min() < 0 or given.max() >= self.num_blocks):
            raise ValueError(f"block ids must lie in [0, {self.num_blocks}), got {list(block_ids)}")
        ids: Int64Array = given.astype(np.int64, copy=False)
        addresses = self._addresses[None, :] + ids[:, None] * self._strides[None, :]
        return addresses.reshape(-1), np.tile(self._sizes, ids.size)

    def chunk_offsets(self, first_block: int, num_blocks: int, stored_blocks: int) -> Int64Array:
        """Where those pages lie within a stored chunk, in the order of `addresses`: ascending.

        Args:
            first_block: the first wanted block, counted within the chunk's stored blocks.
            num_blocks: how many are wanted.
            stored_blocks: how many the chunk holds.

        Raises:
            ValueError: the wanted blocks are not all in the chunk.
        """
        return self._of_blocks(self._offsets, first_block, num_blocks, stored_blocks)

    def padding(self, first_block: int, num_blocks: int, stored_blocks: int) -> tuple[Int64Array, Int64Array]:
        """Where zeros lie within a stored chunk, behind pages of those blocks, and how many: ascending.

        They are none where pages are multiples of `PAGE_ALIGN_BYTES`. Arguments and errors as of `chunk_offsets`.
        """
        offsets = self._of_blocks(self._padding_offsets, first_block, num_blocks, stored_blocks)
        return offsets, np.tile(self._padding_sizes, num_blocks)

    def _of_blocks(self, within: Int64Array, first_block: int, num_blocks: int, stored_blocks: int) -> Int64Array:
        if not 0 <= first_block <= first_block + num_blocks <= stored_blocks:
            raise ValueError(
                f"blocks {first_block} to {first_block + num_blocks} are not within a chunk of {stored_blocks}"
            )
        starts = np.arange(first_block, first_block + num_blocks, dtype=np.int64) * self.block_bytes
        offsets: Int64Array = (starts[:, None] + within[None, :]).reshape(-1)
        return offsets
