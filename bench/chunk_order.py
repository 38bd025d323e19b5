"""Cost of the order of a chunk: copies the same blocks to layer-major chunks (the old order) and block-major chunks.

Part of `cpu_copy.py`, which runs and prints it. Copies 256 of 1,024 blocks, in chunks of 8; a block has 32 layers with
pages of 32 KiB. An engine keeps all layers of a block together (vLLM's BLHNC, `block-outer`) or each layer separately
(LBHNC, `layer-outer`). The blocks are scattered, as in an engine that has run for some time, or in a row, as after a
start. `store` is `MemoryCopier.copy_and_digest` with a record for each chunk, `load` is `MemoryCopier.copy`, both with
coalesced runs, in thread CPU time. `lower` is the time to create these runs in Python. All rows alternate in each
round.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridkv.canonical import GroupPages, PageRegion
from hybridkv.native import MemoryCopier, copy_with_memcpy
from hybridkv.transfer import CopyRuns

LAYERS, PAGE_BYTES, CHUNK_BLOCKS, POOL_BLOCKS, MOVED_BLOCKS = 32, 32 * 1024, 8, 1024, 256
CHUNK_BYTES = CHUNK_BLOCKS * LAYERS * PAGE_BYTES
MOVED_BYTES = MOVED_BLOCKS * LAYERS * PAGE_BYTES
LAYOUTS = ("block-outer", "layer-outer")
BLOCKS = {
    "scattered": np.random.default_rng(2).permutation(POOL_BLOCKS)[:MOVED_BLOCKS],
    "in a row": np.arange(MOVED_BLOCKS),
}
ORDERS = ("layer-major", "block-major")
Lower = Callable[[], tuple[CopyRuns, np.ndarray]]


def group_pages(layout: str, base: int) -> GroupPages:
    if layout == "block-outer":
        regions = [PageRegion(base + i * PAGE_BYTES, LAYERS * PAGE_BYTES, PAGE_BYTES) for i in range(LAYERS)]
    else:
        regions = [PageRegion(base + i * POOL_BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES) for i in range(LAYERS)]
    return GroupPages([[region] for region in regions], POOL_BLOCKS)


def lowering(pages: GroupPages, ids: np.ndarray, order: str, buffer: int) -> Lower:
    """Returns a function that creates the runs of a store, and the number of runs up to the end of each chunk."""

    def chunk(number: int) -> tuple[np.ndarray, ...]:
        addresses, sizes = pages.addresses(ids[number * CHUNK_BLOCKS : (number + 1) * CHUNK_BLOCKS])
        if order == "layer-major":
            addresses = addresses.reshape(CHUNK_BLOCKS, LAYERS).T.reshape(-1)
            offsets = np.cumsum(sizes) - sizes
        else:
            offsets = pages.chunk_offsets(0, CHUNK_BLOCKS, CHUNK_BLOCKS)
        return coalesced(addresses, buffer + number * CHUNK_BYTES + offsets, sizes)

    def lower() -> tuple[CopyRuns, np.ndarray]:
        parts = [chunk(number) for number in range(MOVED_BLOCKS // CHUNK_BLOCKS)]
        ends = np.cumsum([len(sizes) for *_, sizes in parts], dtype=np.int64)
        return CopyRuns(*(np.concatenate(column) for column in zip(*parts, strict=True))), ends

    return lower


def coalesced(sources: np.ndarray, destinations: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """The same bytes in fewer runs: joins consecutive runs that are adjacent on both sides."""
    is_next = (np.diff(sources) == sizes[:-1]) & (np.diff(destinations) == sizes[:-1])
    starts = np.append(0, np.flatnonzero(~is_next) + 1)
    return sources[starts], destinations[starts], np.add.reduceat(sizes, starts)


def measure(pool: np.ndarray, buffer: np.ndarray, rounds: int) -> list[dict[str, Any]]:
    """A row for each layout, choice of blocks, and order of a chunk."""
    copier = MemoryCopier()
    lowers: dict[tuple[str, str, str], Lower] = {
        (layout, blocks, order): lowering(
            group_pages(layout, pool.ctypes.data), BLOCKS[blocks], order, buffer.ctypes.data
        )
        for layout, blocks, order in itertools.product(LAYOUTS, BLOCKS, ORDERS)
    }
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    memcpy_s: list[float] = []
    seconds: dict[tuple[str, str, str], dict[str, list[float]]] = {
        name: {"lower": [], "store": [], "load": []} for name in lowers
    }
    for _ in range(rounds):
        memcpy_s.append(timed(lambda: copy_with_memcpy(pool.ctypes.data, buffer.ctypes.data, MOVED_BYTES)))
        for name, lower in lowers.items():
            runs, ends = lower()
            back = CopyRuns(*coalesced(runs.destinations, runs.sources, runs.num_bytes))
            found[name] = {"runs": len(runs), "runs_of_loads": len(back)}
            store = (runs.sources, runs.destinations, runs.num_bytes, ends)
            load = (back.sources, back.destinations, back.num_bytes)
            seconds[name]["lower"].append(timed(lower))
            seconds[name]["store"].append(timed(lambda store=store: copier.copy_and_digest(*store)))
            seconds[name]["load"].append(timed(lambda load=load: copier.copy(*load)))
    rows = []
    for name, times in seconds.items():
        row = dict(zip(("layout", "blocks", "order"), name, strict=True)) | found[name]
        row["lower_us"] = round(1e6 * min(times["lower"]))
        for direction in ("store", "load"):
            row[f"{direction}_gb_per_s"] = round(MOVED_BYTES / min(times[direction]) / 1e9, 2)
            ratio = statistics.median(a / b for a, b in zip(memcpy_s, times[direction], strict=True))
            row[f"{direction}_ratio_to_memcpy"] = round(ratio, 3)
        rows.append(row)
    return rows


def timed(run: Callable[[], object]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started


def show(rows: list[dict[str, Any]]) -> None:
    print("\nchunks, pages of 32 KiB in 32 layers")
    for row in rows:
        name = f"{row['layout']}, {row['blocks']}, {row['order']}"
        store, load = (f"{row[f'{way}_gb_per_s']:6.2f} GB/s" for way in ("store", "load"))
        print(f"  {name:36} {row['runs']:6} runs, lowered in {row['lower_us']:6} us   store {store}   load {load}")
