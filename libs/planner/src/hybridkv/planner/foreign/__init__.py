"""What stores with other block grids than ours need: slices of their blocks, and transfers clipped to what is read.

Nothing in the product calls this yet: it is for connectors to peers and to servers whose chunks are not ours.
"""

from hybridkv.planner.foreign.clipping import ClippedBlocks, clip_blocks, read_blocks, window_blocks
from hybridkv.planner.foreign.slices import common_block_count, slice_group_blocks

__all__ = [
    "ClippedBlocks",
    "clip_blocks",
    "common_block_count",
    "read_blocks",
    "slice_group_blocks",
    "window_blocks",
]
