"""Which way a run takes, and that every way together moves every byte once."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_device import SMALL

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.cuda import CopyPlan, CopyTuning, plan_copies
from hybridkv.transfer.memory import AddressRanges
from hybridkv.transfer.pinned import REGISTRATION_BYTES

HOST, DEVICE, STAGING = 1 << 30, 1 << 40, 1 << 50
"""Where each kind of memory begins in tests that move no bytes."""
GPU = AddressRanges().with_range(DEVICE, 1 << 30)


def plan(triples: list[tuple[int, int, int]], tuning: CopyTuning = SMALL, has_kernels: bool = True) -> CopyPlan:
    return plan_copies(CopyRuns.of(triples), GPU, STAGING, tuning, has_kernels=has_kernels)


def stores(size: int, count: int, host_step: int | None = None) -> list[tuple[int, int, int]]:
    """Scattered pages of the GPU to the host, by default to one stretch there."""
    step = size if host_step is None else host_step
    return [(DEVICE + (i * 7 % count) * 2 * size, HOST + i * step, size) for i in range(count)]


def test_large_runs_are_batched() -> None:
    made = plan(stores(SMALL.large_run_bytes, 3))
    assert made.batched.triples() == stores(SMALL.large_run_bytes, 3)
    assert (len(made.direct), made.staged, len(made.within_host)) == (0, (), 0)


def test_a_run_just_below_the_crossover_is_staged() -> None:
    made = plan(stores(SMALL.large_run_bytes - 1, 8))
    assert len(made.batched) == 0
    assert sum(len(batch.kernel) for batch in made.batches()) == 8


def test_staging_joins_neighbours_on_the_host_into_long_runs() -> None:
    made = plan(stores(512, 64))
    assert [len(batch.moved) for batch in made.batches()] == [1] * len(list(made.batches()))


def test_the_order_of_the_runs_does_not_keep_neighbours_apart() -> None:
    made = plan(stores(512, 64)[::-1])
    assert [len(batch.moved) for batch in made.batches()] == [1] * len(list(made.batches()))


def test_a_small_job_is_copied_by_the_kernel_alone() -> None:
    made = plan(stores(SMALL.direct_job_bytes // 2, 2))
    assert (len(made.direct), made.staged) == (2, ())


def test_what_staging_would_not_make_longer_is_copied_by_the_kernel_alone() -> None:
    made = plan(stores(512, 64, host_step=1024))
    assert (len(made.direct), made.staged) == (64, ())


@pytest.mark.parametrize("zeros", [DEVICE + (1 << 29), HOST + (1 << 29)], ids=["on the GPU", "in host memory"])
def test_zeros_between_pages_keep_one_stretch_whole_where_they_come_from_the_gpu(zeros: int) -> None:
    """Pages of 500 bytes, each at a multiple of 16 of a chunk in host memory."""
    made = plan([*stores(500, 64, host_step=512), *((zeros, HOST + 512 * i + 500, 12) for i in range(64))])
    if zeros > DEVICE:
        assert [len(batch.moved) for batch in made.batches()] == [1] * len(list(made.batches()))
        assert (len(made.direct), len(made.within_host)) == (0, 0)
    else:
        assert (len(made.direct), len(made.within_host), made.staged) == (64, 64, ())


def test_copies_within_the_gpu_need_no_staging() -> None:
    made = plan([(DEVICE, DEVICE + 4096, 64), (DEVICE + 65536, DEVICE + 131072, 8192)])
    assert (len(made.direct), len(made.batched), made.staged) == (1, 1, ())


def test_copies_within_host_memory_never_reach_the_gpu() -> None:
    made = plan([(HOST, HOST + 4096, 64)])
    assert (len(made.within_host), len(made.direct), len(made.batched)) == (1, 0, 0)


def test_without_kernels_everything_is_batched() -> None:
    made = plan(stores(64, 100), has_kernels=False)
    assert (len(made.batched), len(made.direct), made.staged) == (100, 0, ())


def test_loads_go_the_other_way_round() -> None:
    loads = [(destination, source, size) for source, destination, size in stores(512, 64)]
    made = plan(loads)
    assert [batch.is_store for batch in made.batches()] == [False] * len(list(made.batches()))
    assert next(made.batches()).moved.sources.tolist() == [HOST]
    assert next(made.batches()).moved.destinations.tolist() == [STAGING]


def test_the_halves_take_turns_and_no_turn_leaves_its_half() -> None:
    made = plan(stores(1000, 100))
    assert [batch.half for batch in made.batches()] == [i % 2 for i in range(len(list(made.batches())))]
    for batch in made.batches():
        begin = STAGING + batch.half * SMALL.half_bytes
        ends = batch.kernel.destinations + batch.kernel.num_bytes
        assert begin <= batch.kernel.destinations.min()
        assert ends.max() <= begin + SMALL.half_bytes


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[bool, bool, int, int]]:
    """(from the GPU, to the GPU, size, gap after it) of runs."""
    one = st.tuples(
        st.booleans(), st.booleans(), st.sampled_from([1, 16, 300, 512, 4095, 4096, 9000]), st.integers(0, 3)
    )
    return draw(st.lists(one, max_size=60))


@given(jobs(), st.booleans(), st.randoms())
def test_the_ways_together_move_every_byte_once(
    job: list[tuple[bool, bool, int, int]], has_kernels: bool, random: np.random.Generator
) -> None:
    total = sum(size + gap for _, _, size, gap in job) + 1
    memory = {kind: np.random.default_rng(3).integers(0, 256, 2 * total, dtype=np.uint8) for kind in (False, True)}
    staging = np.zeros(SMALL.staging_bytes, dtype=np.uint8)
    bases = {kind: int(array.ctypes.data) for kind, array in memory.items()}
    device = AddressRanges().with_range(bases[True], 2 * total)
    triples, expected, at = [], {kind: array.copy() for kind, array in memory.items()}, 0
    for from_gpu, to_gpu, size, gap in job:
        triples.append((bases[from_gpu] + at, bases[to_gpu] + total + at, size))
        expected[to_gpu][total + at : total + at + size] = memory[from_gpu][at : at + size]
        at += size + gap
    runs = CopyRuns.of(triples)
    made = plan_copies(runs, device, int(staging.ctypes.data), SMALL, has_kernels=has_kernels)

    parts = [made.within_host, made.batched, made.direct]
    random.shuffle(parts)
    for batch in made.batches():
        parts += [batch.kernel, batch.moved] if batch.is_store else [batch.moved, batch.kernel]
    for part in parts:
        for source, destination, size in part.triples():
            ctypes.memmove(destination, source, size)
    for kind, array in memory.items():
        assert np.array_equal(array, expected[kind])
    moved = sum(part.total_bytes for part in parts) - sum(batch.moved.total_bytes for batch in made.batches())
    assert moved == runs.total_bytes


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CopyTuning)])
def test_limits_are_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected a number >= 1"):
        CopyTuning(**{field: 0})


def test_a_half_of_the_staging_memory_takes_any_small_run() -> None:
    with pytest.raises(ValueError, match="staging_bytes: expected at least 131072"):
        CopyTuning(large_run_bytes=65536, staging_bytes=131071)


@pytest.mark.parametrize("size", [512, SMALL.large_run_bytes])
def test_no_copy_by_the_copy_engines_goes_from_one_registration_into_the_next(size: int) -> None:
    """A slot may lie across the border. The kernel addresses memory, and registrations do not matter to it."""
    host = REGISTRATION_BYTES - 5 * size // 2
    runs = [(DEVICE + 2 * i * size, host + i * size, size) for i in range(64)]
    made = plan(runs)
    moved = [run for batch in made.batches() for run in batch.moved.triples()] or made.batched.triples()
    assert sum(num_bytes for _, _, num_bytes in moved) == 64 * size
    ends = [(first, first + num_bytes) for _, first, num_bytes in moved]
    assert all(last <= REGISTRATION_BYTES or first >= REGISTRATION_BYTES for first, last in ends)
    assert REGISTRATION_BYTES in [first for first, _ in ends]


def test_a_plan_can_be_described() -> None:
    assert plan(stores(512, 64)).describe().startswith("0 runs batched, 0 direct, 64 staged")


def test_overlapping_ranges_of_the_gpu_are_one() -> None:
    device = AddressRanges().with_range(100, 100).with_range(120, 10)
    addresses = np.array([99, 100, 125, 150, 199, 200])
    assert device.contain(addresses).tolist() == [False, True, True, True, True, False]


def test_no_ranges_contain_nothing() -> None:
    assert AddressRanges().contain(np.array([0, 5])).tolist() == [False, False]
