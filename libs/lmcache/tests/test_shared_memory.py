"""Segments and pools: removed when closed, reclaimed after a crash, and no page is used twice."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from caches import DEEPSEEK_V4, QWEN3_NEXT

from hybridkv.lmcache.errors import LMCacheConfigurationError, LMCacheProtocolError
from hybridkv.lmcache.geometry import Geometry
from hybridkv.lmcache.pool import PREFIX, Pool, SharedMemory, sweep

CRASHES = """
import os, sys
from pathlib import Path
from hybridkv.lmcache.pool import SharedMemory
memory = SharedMemory(8192, Path(sys.argv[1]))
print(memory.name, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_segment_is_removed_when_it_is_closed(tmp_path: Path) -> None:
    memory = SharedMemory(8192, tmp_path)
    path = tmp_path / memory.name.lstrip("/")
    assert path.stat().st_size == 8192
    memory.view[0] = 7
    assert path.read_bytes()[0] == 7
    memory.close()
    memory.close()
    assert not list(tmp_path.iterdir())


def test_segments_of_a_crashed_process_are_removed_by_the_next_start(tmp_path: Path) -> None:
    alive = SharedMemory(4096, tmp_path)
    subprocess.run([sys.executable, "-c", CRASHES, str(tmp_path)], stdout=subprocess.PIPE, check=False)
    (tmp_path / "another").write_bytes(b"not ours")
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2
    assert sweep(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {alive.name.lstrip("/"), "another"}
    alive.close()


def test_too_little_shared_memory_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(LMCacheConfigurationError, match="bytes of shared memory"):
        SharedMemory(1 << 60, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_view_outlives_its_segment(tmp_path: Path) -> None:
    memory = SharedMemory(4096, tmp_path)
    view = memory.view[:10]
    memory.close()
    view[0] = 1
    assert view[0] == 1


def test_pages_are_taken_once_and_all_or_none() -> None:
    geometry = Geometry(QWEN3_NEXT, 256)
    pool = Pool(geometry, 2)
    try:
        everything = {group: pool.num_free(group) for group in range(4)}
        assert everything == dict.fromkeys(range(4), 2)
        taken = pool.take(everything)
        assert taken is not None
        assert {group: sorted(blocks) for group, blocks in taken.blocks.items()} == {
            group: [1, 2] for group in range(4)
        }
        assert pool.take({0: 1}) is None
        pool.give_back(taken)
        assert pool.take({0: 1, 1: 3}) is None
        assert pool.num_taken == 0
    finally:
        pool.close()


def test_groups_of_pages_do_not_overlap_and_stay_inside_the_pool() -> None:
    geometry = Geometry(DEEPSEEK_V4, 256)
    pool = Pool(geometry, 3)
    try:
        groups = pool.wire_groups()
        spans = []
        for group in groups:
            place = group.place
            assert place.offset % 4096 == 0
            spans.append((place.offset, place.offset + place.num_blocks * place.page_bytes))
        spans.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert spans[-1][1] <= pool.num_bytes == len(pool.view)
        for position, index in enumerate(geometry.order):
            assert pool.offset(index, 1) == groups[position].place.offset + geometry.page_bytes[index]
        with pytest.raises(LMCacheProtocolError):
            pool.page(0, 99)
    finally:
        pool.close()


def test_renewing_a_pool_voids_the_taken_pages() -> None:
    pool = Pool(Geometry(QWEN3_NEXT, 256), 2)
    try:
        taken = pool.take({0: 2})
        assert taken is not None
        old = pool.page(0, 1)
        old[:4] = b"late"
        name, instance = pool.wire_groups()[0].place.segment, pool.instance
        pool.recreate()
        assert pool.wire_groups()[0].place.segment != name
        assert pool.instance != instance
        assert bytes(pool.page(0, 1)[:4]) == bytes(4)
        assert pool.num_free(0) == 2
        pool.give_back(taken)
        assert pool.num_free(0) == 2
        old[:4] = b"more"
        assert bytes(pool.page(0, 1)[:4]) == bytes(4)
    finally:
        pool.close()
