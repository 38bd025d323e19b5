"""Pages of a group as numbers: addresses in memory and offsets in a stored chunk. No tensors, no torch.

A region has, for every block, the page of a layer or one contiguous part of that page, at a fixed stride. A layer has
several regions if the bytes of its page are not contiguous. A stored chunk is block-major: all pages of its first
block, layer by layer, then those of the next block. So consecutive blocks of a chunk are one byte range, and a block is
one run if the engine stores all its layers together without gaps. Each page starts at a multiple of `PAGE_ALIGN_BYTES`.
The gap before the next page contains zeros, which the writer of the chunk writes. The engine's own padding is not
stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

PAGE_ALIGN_BYTES = 16
"""Alignment of pages in a stored chunk: the widest word that a GPU thread moves."""


def aligned_page_bytes(page_bytes: int) -> int:
    """Bytes of a page in a stored chunk, including the zeros after it."""
    return -(-page_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES


class LayerLayout(NamedTuple):
    """Layout facts of a layer, given by the caller and never inferred from a shape. Blocks are dimension 0.

    Args:
        name: the engine's name of the layer.
        page_bytes: bytes of this layer in one block, without padding.
        interleaved: True if bytes of other layers lie between those of this layer within a block (heads before layers).
            Otherwise such gaps are an error, because a sliced tensor looks the same.
        token_dim: dimension of the tokens of a block, if known. If it is set, the order of bytes in a page does not
            depend on whether the engine splits blocks into kernel blocks.
    """

    name: str
    page_bytes: int
    interleaved: bool = False
    token_dim: int | None = None


class PageRegion(NamedTuple):
    """Region with the page of every block, or with one contiguous part of that page.

    Args:
        address: address of the page, or part, of block 0.
        stride_bytes: distance from one block to the next.
        page_bytes: bytes of the page, or part, without padding.
    """

    address: int
    stride_bytes: int
    page_bytes: int


class GroupPages:
    """All pages of one group.

    Args:
        pages: for each layer, in order, the regions of its page.
        num_blocks: blocks in the engine's pool.

    Raises:
        ValueError: there is no page, a layer has no region, `num_blocks` is not positive, or the `page_bytes` of a
            region are not positive or exceed its stride.
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
        """Bytes of one block of this group in a stored chunk, including padding."""
        self._addresses = np.array([region.address for region in self.regions], dtype=np.int64)
        self._strides = np.array([region.stride_bytes for region in self.regions], dtype=np.int64)
        self._sizes = np.array([region.page_bytes for region in self.regions], dtype=np.int64)
        # The regions of a page are contiguous in a chunk; each page starts after the zeros of the previous page.
        zeros_before = np.repeat(np.cumsum(taken - content) - (taken - content), [len(page) for page in pages])
        self._offsets = np.cumsum(self._sizes) - self._sizes + zeros_before

    def addresses(self, block_ids: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        """Addresses and sizes of some blocks in each region, in the order of a stored chunk.

        Args:
            block_ids: n blocks of this group.

        Returns:
            Two arrays of n times the number of regions, block-major.

        Raises:
            ValueError: a block id is not an integer, or is outside the pool.
        """
        given = np.asarray(block_ids)
        # Not converted to int64 here: that would turn 1.5 and True into block 1. An empty list gives floats.
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"block ids must be a list of integers, got {block_ids!r}")
        if given.size and (given.min() < 0 or given.max() >= self.num_blocks):
            raise ValueError(f"block ids must lie in [0, {self.num_blocks}), got {list(block_ids)}")
        ids: Int64Array = given.astype(np.int64, copy=False)
        addresses = self._addresses[None, :] + ids[:, None] * self._strides[None, :]
        return addresses.reshape(-1), np.tile(self._sizes, ids.size)

    def chunk_offsets(self, first_block: int, num_blocks: int, stored_blocks: int) -> Int64Array:
        """Offsets within a stored chunk for some blocks and each region, ascending, in the order of `addresses`.

        Args:
            first_block: index of the first block among the stored blocks of the chunk.
            num_blocks: number of blocks.
            stored_blocks: number of blocks that the chunk stores.

        Raises:
            ValueError: a block is not in the chunk.
        """
        if not 0 <= first_block <= first_block + num_blocks <= stored_blocks:
            raise ValueError(
                f"blocks {first_block} to {first_block + num_blocks} are not within a chunk of {stored_blocks}"
            )
        starts = np.arange(first_block, first_block + num_blocks, dtype=np.int64) * self.block_bytes
        offsets: Int64Array = (starts[:, None] + self._offsets[None, :]).reshape(-1)
        return offsets
