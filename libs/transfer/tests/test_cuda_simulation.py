"""The kernel's arithmetic, simulated on the CPU and compared with a plain reference. tests/gpu runs the kernel itself.

The simulation runs the template that nvcc compiles, for every warp and lane. It does not simulate the memory order of a
GPU or the output of its compiler.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases
from kernel_simulation import simulate_copy

from hybridkv.transfer import CopyRuns

TILE_BYTES = 16 * 1024


def simulated(case: Case, tile_bytes: int, num_warps: int) -> tuple[bool, int]:
    """Whether the destination matches the reference, and the number of wide words moved."""
    source, destination = case.memory()
    sources, destinations = case.sources + source.ctypes.data, case.destinations + destination.ctypes.data
    words = simulate_copy(CopyRuns(sources, destinations, case.sizes.copy()), tile_bytes, num_warps)
    return bool(np.array_equal(destination, case.expected(source))), words


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_kernel_copies_what_the_reference_copies(case: Case) -> None:
    is_same, _ = simulated(case, TILE_BYTES, num_warps=64)
    assert is_same


@pytest.mark.parametrize("num_warps", [1, 3, 16, 257])
@pytest.mark.parametrize("tile_bytes", [16, 1000, 1024 * 1024])
def test_neither_tiles_nor_warps_change_the_result(tile_bytes: int, num_warps: int) -> None:
    case = next(case for case in cases() if case.name == "groups of many sizes")
    is_same, _ = simulated(case, tile_bytes, num_warps)
    assert is_same


def test_the_comparison_detects_a_wrong_byte() -> None:
    case = next(case for case in cases() if case.name == "pages of 4096")
    broken = Case(case.name, case.sources, case.destinations, case.sizes - (np.arange(len(case.sizes)) == 5))
    source, destination = broken.memory()
    runs = CopyRuns(
        broken.sources + source.ctypes.data, broken.destinations + destination.ctypes.data, broken.sizes.copy()
    )
    simulate_copy(runs, TILE_BYTES, 64)
    assert not np.array_equal(destination, case.expected(source))


def test_aligned_pages_move_16_bytes_at_a_time() -> None:
    size = 32 * 1024
    source, destination = (np.zeros(4 * size + 16, dtype=np.uint8) for _ in range(2))
    bases = [-(-int(array.ctypes.data) // 16) * 16 for array in (source, destination)]
    runs = CopyRuns.of([(bases[0] + i * size, bases[1] + i * size, size) for i in (2, 0, 3, 1)])
    assert simulate_copy(runs, TILE_BYTES, 64) == 4 * size // 16


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 5000), max_size=30))
    gaps = draw(st.lists(st.integers(0, 40), min_size=len(sizes), max_size=len(sizes)))
    ends = np.cumsum(np.array(sizes, dtype=np.int64) + np.array(gaps, dtype=np.int64))
    destinations = ends - np.array(sizes, dtype=np.int64)
    sources = [draw(st.integers(0, 20_000)) for _ in sizes]
    return Case("random", np.array(sources, dtype=np.int64), destinations, np.array(sizes, dtype=np.int64))


@settings(deadline=None)
@given(case=random_cases(), tile_bytes=st.sampled_from([64, 100, 2048, 16384]), num_warps=st.integers(1, 40))
def test_any_runs_are_copied_exactly(case: Case, tile_bytes: int, num_warps: int) -> None:
    is_same, _ = simulated(case, tile_bytes, num_warps)
    assert is_same
