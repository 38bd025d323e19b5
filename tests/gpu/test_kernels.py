"""The kernel on a GPU against a plain reference, for the cases that its simulation on the CPU is tried on too."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from conftest import unavailable
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases
from plain_kernels import CudaCallError, PlainKernels

from hybridkv.transfer import CopyRuns

TILE_BYTES = 16 * 1024
NUM_BLOCKS = 16
DIRECTIONS = {"store": (True, False), "load": (False, True), "within the gpu": (True, True)}
"""Whether source and destination are the GPU's memory."""


@pytest.fixture(scope="module")
def kernels() -> PlainKernels:
    library = os.environ.get("HYBRIDKV_CUDA_PLAIN")
    if library is None:
        unavailable("HYBRIDKV_CUDA_PLAIN does not name the library //csrc/cuda:libhybridkv_cuda_plain.so")
    try:
        return PlainKernels(Path(library))
    except CudaCallError as error:
        unavailable(f"there is no GPU: {error}")


def runs_of(case: Case, source: int, destination: int) -> CopyRuns:
    return CopyRuns(case.sources + source, case.destinations + destination, case.sizes.copy())


def copied(kernels: PlainKernels, case: Case, direction: str, by_kernel: bool = True, num_blocks: int = 16) -> bool:
    """Whether the destination is as the reference says."""
    source, poisoned = case.memory()
    from_device, to_device = DIRECTIONS[direction]
    with kernels.memory(source, from_device) as start, kernels.memory(poisoned, to_device) as end:
        runs = runs_of(case, start, end)
        if by_kernel:
            kernels.copy(runs, TILE_BYTES, num_blocks)
        else:
            kernels.copy_batch(runs)
        return bool(np.array_equal(kernels.read(end, case.destination_bytes), case.expected(source)))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_kernel_copies_what_the_reference_copies(kernels: PlainKernels, case: Case, direction: str) -> None:
    assert copied(kernels, case, direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("num_blocks", [1, 2, 1000])
def test_the_number_of_blocks_does_not_change_the_result(
    kernels: PlainKernels, num_blocks: int, direction: str
) -> None:
    case = next(case for case in cases() if case.name == "groups of many sizes")
    assert copied(kernels, case, direction, num_blocks=num_blocks)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["no runs", "one run", "pages of 2097152", "padded pages of 32768", "100,000 runs"])
def test_the_copy_engines_copy_what_the_reference_copies(kernels: PlainKernels, name: str, direction: str) -> None:
    case = next(case for case in cases() if case.name == name)
    assert copied(kernels, case, direction, by_kernel=False)


def test_a_wrong_byte_would_be_noticed(kernels: PlainKernels) -> None:
    case = next(case for case in cases() if case.name == "pages of 4096")
    source, poisoned = case.memory()
    with kernels.memory(source, True) as start, kernels.memory(poisoned, True) as end:
        runs = runs_of(case, start, end)
        kernels.copy(CopyRuns(runs.sources[1:], runs.destinations[1:], runs.num_bytes[1:]), TILE_BYTES, NUM_BLOCKS)
        assert not np.array_equal(kernels.read(end, case.destination_bytes), case.expected(source))


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    sizes = np.array(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=30)), dtype=np.int64)
    gaps = np.array([draw(st.integers(0, 40)) for _ in sizes], dtype=np.int64)
    sources = np.array([draw(st.integers(0, 20_000)) for _ in sizes], dtype=np.int64)
    return Case("random", sources, np.cumsum(sizes + gaps) - sizes, sizes)


@settings(deadline=None, max_examples=200)
@given(case=random_cases(), direction=st.sampled_from(sorted(DIRECTIONS)), num_blocks=st.integers(1, 8))
def test_any_runs_are_copied_exactly(kernels: PlainKernels, case: Case, direction: str, num_blocks: int) -> None:
    assert copied(kernels, case, direction, num_blocks=num_blocks)


def test_a_call_that_asks_too_much_is_an_error_with_its_name(kernels: PlainKernels) -> None:
    with pytest.raises(CudaCallError, match=r"^cudaMalloc: cudaErrorMemoryAllocation"):
        kernels.allocate(1 << 60, on_device=True)
    assert copied(kernels, next(case for case in cases() if case.name == "one run"), "store")


def test_a_launch_without_blocks_is_refused(kernels: PlainKernels) -> None:
    with pytest.raises(CudaCallError, match=r"^launch_copy: expected"):
        copied(kernels, next(case for case in cases() if case.name == "one run"), "store", num_blocks=0)
