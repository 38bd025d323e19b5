"""From moves of blocks to runs of bytes: the last step before a copy engine, and the one place that pairs addresses."""

from collections.abc import Sequence

import numpy as np

from hybridkv.canonical import GroupPages
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
