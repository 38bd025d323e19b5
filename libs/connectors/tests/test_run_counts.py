"""Numbers of copies for the chunks of a prompt, in every memory order of vLLM: the cost of the byte order of a chunk.

800 blocks of 32 layers with pages of 32 KiB, 8 blocks per chunk. Each count is the minimum that the order of a chunk
allows; a change of that order must change a count here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from hybridkv.canonical import GroupPages, LayerLayout
from hybridkv.canonical.torch_view import canonical_kv_caches
from hybridkv.connectors.vllm.common.copies.lowering import JobLowering, RankMemory, Zeros
from hybridkv.connectors.vllm.common.copies.table import ChunkPart, CopyRun, CopyTable
from hybridkv.tiers import Slot
from hybridkv.transfer import CopyRuns

torch = pytest.importorskip("torch", reason="it makes the tensors of these tests")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="vLLM makes the layouts of these tests")
kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
KVCacheLayout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout

BLOCKS, LAYERS, HEADS, PAGE_BYTES = 800, 32, 8, 32 * 1024
CHUNK_BLOCKS = 8
SLOT_STRIDE_BYTES = 2 * CHUNK_BLOCKS * LAYERS * PAGE_BYTES
"""Slots with gaps: runs joined over two chunks would not depend on the order of either."""
SCATTERED = np.random.default_rng(7).permutation(BLOCKS).tolist()
"""Blocks of an engine that has been running: no two are adjacent, and no three are equally spaced."""
IN_A_ROW = list(range(BLOCKS))
"""Blocks of an engine that has just started."""
TILE_BYTES = 16 * 1024


def group_pages(order: str) -> GroupPages:
    """Pages of one group of full attention, as laid out by vLLM's model runner. The memory is never touched."""
    layout = KVCacheLayout[order]
    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=HEADS, head_size=64, dtype=torch.bfloat16)
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=BLOCKS,
    )
    config = SimpleNamespace(cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None))
    names = [f"layers.{i}" for i in range(LAYERS)]
    placed = kv_cache_utils.get_kv_cache_config_from_groups(config, [interface.KVCacheGroupSpec(names, spec)], 1 << 40)
    memory = torch.empty(placed.kv_cache_tensors[0].size, dtype=torch.int8)
    views = {}
    for tensor in placed.kv_cache_tensors:
        made = interface.create_kv_cache_views(memory, spec, BLOCKS, layout, tensor, None)
        views.update(zip(tensor.layers, made, strict=True))
    layers = [LayerLayout(name, PAGE_BYTES, interleaved=order == "BHLNC") for name in names]
    return canonical_kv_caches(views, [layers], BLOCKS).pages(0)


def runs_of(pages: GroupPages, block_ids: Sequence[int], to_engine: bool) -> CopyRuns:
    """Runs that a worker submits for a whole prompt."""
    num_chunks, slot_bytes = len(block_ids) // CHUNK_BLOCKS, CHUNK_BLOCKS * pages.block_bytes
    arena = SimpleNamespace(base_address=0, capacity_bytes=num_chunks * SLOT_STRIDE_BYTES)
    lowering = JobLowering(RankMemory({0: pages}, {}, Zeros(0, 64), arena))
    slots = [Slot(((number * SLOT_STRIDE_BYTES, slot_bytes),)) for number in range(num_chunks)]
    run = CopyRun(ChunkPart(0, 0, CHUNK_BLOCKS, 0, 0), num_chunks, block_ids)
    table = CopyTable.of_runs([run], [b"key"] * num_chunks, slots)
    return lowering.load(table) if to_engine else lowering.store(table).runs


def equal_steps(runs: CopyRuns) -> int:
    """Rows of a GPU kernel's table: sequences of runs of one size with equal steps on both sides."""
    rows, size, count, last, step = 0, 0, 0, (0, 0), (0, 0)
    for source, destination, num_bytes in runs.triples():
        new_step = source - last[0], destination - last[1]
        if num_bytes == size and (count == 1 or new_step == step):
            count, step = count + 1, new_step
        else:
            rows, size, count = rows + 1, num_bytes, 1
        last = source, destination
    return rows


def test_scattered_blocks_have_no_equal_steps() -> None:
    steps = np.diff(SCATTERED)
    assert not (steps == 1).any() and not (np.diff(steps) == 0).any()


@pytest.mark.parametrize("to_engine", [False, True], ids=["store", "load"])
@pytest.mark.parametrize(
    ("order", "scattered", "in_a_row", "rows"),
    [
        # All layers of a block are adjacent, in the order of a chunk: a block is a run, and adjacent blocks join. Any
        # two runs of one size are a row of the kernel's table.
        ("BLHNC", 800, 100, 400),
        ("BLNHC", 800, 100, 400),
        # Layers are apart, so that a page is a run, also of adjacent blocks. A block is a row of the kernel's table.
        ("LBHNC", 25_600, 25_600, 800),
        ("LBNHC", 25_600, 25_600, 800),
        # Heads are apart: each is a run. Here all heads of all layers are equally spaced ...
        ("LHBNC", 204_800, 204_800, 800),
        # ... and here those of one layer are; the end of a block touches the next one of its chunk.
        ("BHLNC", 204_800, 204_100, 25_600),
    ],
)
def test_a_prompt_takes_the_expected_number_of_runs(
    order: str, scattered: int, in_a_row: int, rows: int, to_engine: bool
) -> None:
    pages = group_pages(order)
    runs = runs_of(pages, SCATTERED, to_engine)
    assert runs.total_bytes == BLOCKS * LAYERS * PAGE_BYTES
    assert len(runs) == scattered
    assert equal_steps(runs) == rows
    assert len(runs_of(pages, IN_A_ROW, to_engine)) == in_a_row


def test_each_run_is_aligned_to_whole_words_on_both_sides() -> None:
    """So that a GPU copies words of 16 bytes in any memory order of the engine."""
    for order in KVCacheLayout.__members__:
        pages = group_pages(order)
        base = min(region.address for region in pages.regions)
        runs = runs_of(pages, SCATTERED, to_engine=True)
        for column in (runs.sources, runs.destinations - base, runs.num_bytes):
            assert not np.any(column % 16), order
