"""What stores with other block grids than ours need: slices of their blocks.

Nothing in the product calls this yet: it is for connectors to servers whose chunks are not ours.
"""

from hybridkv.planner.foreign.slices import common_block_count, slice_group_blocks

__all__ = ["common_block_count", "slice_group_blocks"]
