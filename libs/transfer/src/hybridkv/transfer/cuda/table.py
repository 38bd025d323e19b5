"""The table of fragments that the copy kernel reads: `FragmentRun` of csrc/cuda/fragments.h, row by row.

Pure arithmetic on arrays. A row is eight 64-bit words: source, destination, the strides of both, the bytes of a
fragment, how many fragments, how many tiles all rows before hold, and the tiles of one fragment. A tile is what one
warp copies at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridkv.transfer.runs import CopyRuns, Integers

ROW_WORDS = 8
MAX_TILES = 2**32 - 1
"""The kernel counts tiles in 32 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class FragmentTable:
    """`rows` is int64 of shape (n, 8), contiguous and read-only; `num_tiles` is what all of them hold."""

    rows: Integers
    num_tiles: int


def fragment_table(runs: CopyRuns, tile_bytes: int) -> FragmentTable:
    """The same copies as a table.

    Runs of one size whose sources and destinations each go on in equal steps become one row: the layers of a block,
    which lie equally apart in the engine's memory and follow each other in a chunk.

    Raises:
        ValueError: the runs hold more tiles than the kernel can count.
    """
    if not len(runs):
        return FragmentTable(np.empty((0, ROW_WORDS), dtype=np.int64), 0)
    starts = _row_starts(runs)
    counts = np.diff(np.append(starts, len(runs)))
    second = np.minimum(starts + 1, len(runs) - 1)
    is_single = counts == 1
    rows = np.empty((len(starts), ROW_WORDS), dtype=np.int64)
    rows[:, 0] = runs.sources[starts]
    rows[:, 1] = runs.destinations[starts]
    rows[:, 2] = np.where(is_single, 0, runs.sources[second] - rows[:, 0])
    rows[:, 3] = np.where(is_single, 0, runs.destinations[second] - rows[:, 1])
    rows[:, 4] = runs.num_bytes[starts]
    rows[:, 5] = counts
    rows[:, 7] = -(-rows[:, 4] // tile_bytes)
    tiles = np.cumsum(rows[:, 5] * rows[:, 7])
    rows[0, 6] = 0
    rows[1:, 6] = tiles[:-1]
    if tiles[-1] > MAX_TILES:
        raise ValueError(f"runs: expected at most {MAX_TILES} tiles of {tile_bytes} bytes, got {tiles[-1]}")
    rows.setflags(write=False)
    return FragmentTable(rows, int(tiles[-1]))


def _row_starts(runs: CopyRuns) -> Integers:
    """Where a new row begins. Each run is in one row, and the runs of a row are equally apart on both sides."""
    # keeps_step[i]: runs i - 2, i - 1 and i have one size and are equally apart.
    keeps_step = np.zeros(len(runs) + 1, dtype=bool)
    if len(runs) > 2:
        same_size = runs.num_bytes[1:] == runs.num_bytes[:-1]
        keeps_step[2:-1] = (
            same_size[1:] & same_size[:-1] & (np.diff(runs.sources, n=2) == 0) & (np.diff(runs.destinations, n=2) == 0)
        )
    # A run joins the row before it when it keeps its step, or when it is the second of a row that the next run makes
    # and the one before it is not the last of another row.
    joins = keeps_step[:-1] | (keeps_step[1:] & ~np.roll(keeps_step[:-1], 1))
    joins[0] = False
    return np.flatnonzero(~joins)
