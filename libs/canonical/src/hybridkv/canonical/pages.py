"""Where the pages of a group lie in memory, as plain numbers: no tensors, so no torch.

A group's block is one page in each of its regions, and a region's pages lie a fixed stride apart. A stored chunk is
the pages of its blocks, region after region, without the engine's padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class LayerLayout(NamedTuple):
    """What is known of a layer before its tensor is seen. Nothing of it is guessed from a shape.

    Args:
        name: as the engine registers it.
        page_bytes: of one block, without padding.
        block_dim: the dimension that counts blocks: 1 for split K/V, (2, blocks, ...). A size of 2 says nothing.
        interleaved: within a block, other layers' bytes lie between this one's (blocks that hold heads before layers).
            Without it such gaps are an error, since a sliced tensor looks the same.
    """

    name: str
    page_bytes: int
    block_dim: int = 0
    interleaved: bool = False


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
    """All regions of one group.

    Args:
        regions: in layer order.
        num_blocks: blocks in the engine's pool.

    Raises:
        ValueError: there is no region, or a page does not fit its stride.
    """

    def __init__(self, regions: Sequence[PageRegion], num_blocks: int) -> None:
        if not regions or num_blocks <= 0:
            raise ValueError(f"a group needs regions and blocks, got {len(regions)} regions and {num_blocks} blocks")
        for region in regions:
            if not 0 < region.page_bytes <= region.stride_bytes:
                raise ValueError(f"page_bytes must be positive and fit the stride, got {region}")
        self.num_blocks = num_blocks
        self.regions = tuple(regions)
        self.block_bytes = sum(region.page_bytes for region in regions)
        """Bytes that one block of this group adds to a stored chunk."""
        self._addresses = np.array([region.address for region in regions], dtype=np.int64)
        self._strides = np.array([region.stride_bytes for region in regions], dtype=np.int64)
        self._sizes = np.array([region.page_bytes for region in regions], dtype=np.int64)

    def addresses(self, block_ids: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        """Addresses and sizes of the blocks' pages, in the order in which a chunk stores them.

        Args:
            block_ids: n blocks of this group.

        Returns:
            Two arrays of length n times the number of regions, region-major.

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
        addresses = self._addresses[:, None] + ids[None, :] * self._strides[:, None]
        return addresses.reshape(-1), np.repeat(self._sizes, ids.size)

    def chunk_offsets(self, first_block: int, num_blocks: int, stored_blocks: int) -> Int64Array:
        """Where those pages lie within a stored chunk, in the order of `addresses`.

        Args:
            first_block: the first wanted block, counted within the chunk's stored blocks.
            num_blocks: how many are wanted.
            stored_blocks: how many the chunk holds.

        Raises:
            ValueError: the wanted blocks are not all in the chunk.
        """
        if not 0 <= first_block <= first_block + num_blocks <= stored_blocks:
            raise ValueError(
                f"blocks {first_block} to {first_block + num_blocks} are not within a chunk of {stored_blocks}"
            )
        starts = np.concatenate(([0], np.cumsum(self._sizes)[:-1])) * stored_blocks
        within = np.arange(first_block, first_block + num_blocks, dtype=np.int64)
        offsets: Int64Array = (starts[:, None] + within[None, :] * self._sizes[:, None]).reshape(-1)
        return offsets
