"""The path of each run, and that all paths together move every byte once: csrc/cuda/job.cc on a simulated GPU."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_simulation import CopyRow, runs_in_rows
from simulated_device import SMALL, SimulatedDevice

from hybridkv.transfer import CopyRuns
from hybridkv.transfer.cuda import CopyTuning
from hybridkv.transfer.cuda.device import NUM_PARTS, merge_ranges
from hybridkv.transfer.pinned import REGISTRATION_BYTES

HOST, DEVICE, STAGING = 1 << 30, 1 << 40, 1 << 50
"""The start address of each kind of memory in tests that move no bytes."""
GPU_BYTES = 1 << 30
Triples = list[tuple[int, int, int]]


class Recording(SimulatedDevice):
    """A simulated GPU that moves no bytes."""

    def __init__(self, tuning: CopyTuning = SMALL) -> None:
        super().__init__(tuning=tuning)
        self.register(DEVICE, GPU_BYTES)
        self.num_rows = 0

    @property
    def staging_address(self) -> int:
        return STAGING

    def _launch(self, table: int, rows: int, count: int, num_tiles: int) -> None:
        super()._launch(table, rows, count, num_tiles)
        self.num_rows += count
        self._read[table].happened.set()

    def _host_wait(self, table: int) -> None:
        pass

    def copy(self, runs: CopyRuns) -> None:
        self.enqueue(runs, self.compute)


def copied(triples: Triples) -> Recording:
    device = Recording()
    device.copy(CopyRuns.of(triples))
    return device


def transfers(device: SimulatedDevice) -> Triples:
    return [triple for runs in device.transfers for triple in runs.triples()]


def ways(device: SimulatedDevice) -> tuple[int, int]:
    """The number of copies by the copy engines and by the kernel."""
    return len(transfers(device)), sum(map(len, device.tables))


def stores(size: int, count: int, host_step: int | None = None) -> Triples:
    """Runs from scattered pages of the GPU to the host, by default to one range there."""
    step = size if host_step is None else host_step
    return [(DEVICE + (i * 7 % count) * 2 * size, HOST + i * step, size) for i in range(count)]


def loads(size: int, count: int) -> Triples:
    return [(destination, source, size) for source, destination, size in stores(size, count)]


def test_large_runs_are_batched() -> None:
    large = stores(SMALL.large_run_bytes, 3)
    device = copied(large)
    assert transfers(device) == large
    assert device.tables == []


def test_a_run_just_below_the_crossover_is_staged() -> None:
    device = copied(stores(SMALL.large_run_bytes - 1, 8))
    assert ways(device) == (4, 8)


def test_staging_joins_neighbours_on_the_host_into_long_runs() -> None:
    device = copied(stores(512, 64))
    assert ways(device) == (64 * 512 // SMALL.part_bytes, 64)


def test_neighbours_are_joined_in_any_order_of_the_runs() -> None:
    assert transfers(copied(stores(512, 64)[::-1])) == transfers(copied(stores(512, 64)))


def test_only_the_kernel_copies_a_small_job() -> None:
    assert ways(copied(stores(SMALL.direct_job_bytes // 2, 2))) == (0, 2)


def test_only_the_kernel_copies_runs_that_staging_cannot_join() -> None:
    assert ways(copied(stores(512, 64, host_step=1024))) == (0, 64)


def test_zeros_from_the_gpu_between_pages_keep_one_range_whole() -> None:
    """Pages of 500 bytes, each at a multiple of 16 of a chunk in host memory."""
    zeros = DEVICE + GPU_BYTES // 2
    job = [*stores(500, 64, host_step=512), *((zeros, HOST + 512 * i + 500, 12) for i in range(64))]
    assert ways(copied(job)) == (64 * 512 // SMALL.part_bytes, 128)


def test_copies_within_the_gpu_need_no_staging() -> None:
    device = copied([(DEVICE, DEVICE + 4096, 64), (DEVICE + 65536, DEVICE + 131072, 8192)])
    assert device.tables == [[(DEVICE, DEVICE + 4096, 64)]]
    assert transfers(device) == [(DEVICE + 65536, DEVICE + 131072, 8192)]


def test_copies_within_host_memory_do_not_reach_the_gpu() -> None:
    memory = np.arange(64, dtype=np.uint8)
    address = int(memory.ctypes.data)
    device = copied([(address, address + 32, 32)])
    assert ways(device) == (0, 0)
    assert memory.tolist() == [*range(32)] * 2


def test_loads_use_the_same_path_in_reverse() -> None:
    device = copied(loads(512, 64))
    assert transfers(device)[0] == (HOST, STAGING, SMALL.part_bytes)
    assert device.tables[0][0] == (STAGING, loads(512, 64)[0][1], 512)


def test_the_staging_parts_alternate_and_no_copy_leaves_its_part() -> None:
    device = copied(stores(1000, 100))
    assert len(device.tables) > 2 * NUM_PARTS
    for turn, table in enumerate(device.tables):
        begin = STAGING + turn % NUM_PARTS * SMALL.part_bytes
        assert all(begin <= place and place + size <= begin + SMALL.part_bytes for _, place, size in table)


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize("size", [4096, 16384, 262144])
def test_a_block_is_one_row_and_a_staging_part_is_one_copy(size: int, is_store: bool) -> None:
    """256 MiB of scattered blocks of 32 layers, stored layer by layer as in the engine."""
    layers, total = 32, 256 << 20
    num_blocks = total // size // layers
    blocks = np.random.default_rng(0).permutation(2 * num_blocks)[:num_blocks]
    triples = [
        (DEVICE + (layer * 2 * num_blocks + block) * size, HOST + (place * layers + layer) * size, size)
        for place, block in enumerate(blocks.tolist())
        for layer in range(layers)
    ]
    device = Recording(CopyTuning())
    runs = CopyRuns.of(triples)
    device.copy(runs if is_store else runs.reversed())
    num_parts = total // device.tuning.part_bytes
    assert (device.num_rows, len(transfers(device))) == (num_blocks, num_parts)


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[bool, bool, int, int]]:
    """Runs as (from the GPU, to the GPU, size, gap after the run)."""
    one = st.tuples(
        st.booleans(), st.booleans(), st.sampled_from([1, 16, 300, 512, 4095, 4096, 9000]), st.integers(0, 3)
    )
    return draw(st.lists(one, max_size=80))


@settings(deadline=None)
@given(job=jobs(), repeats=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_the_ways_together_move_every_byte_once(
    job: list[tuple[bool, bool, int, int]], repeats: int, seed: int
) -> None:
    job *= repeats
    total = sum(size + gap for _, _, size, gap in job) + 1
    memory = {kind: np.random.default_rng(3).integers(0, 256, 2 * total, dtype=np.uint8) for kind in (False, True)}
    bases = {kind: int(array.ctypes.data) for kind, array in memory.items()}
    device = SimulatedDevice(seed)
    device.register(bases[True], 2 * total)
    triples, expected, at = [], {kind: array.copy() for kind, array in memory.items()}, 0
    for from_gpu, to_gpu, size, gap in job:
        triples.append((bases[from_gpu] + at, bases[to_gpu] + total + at, size))
        expected[to_gpu][total + at : total + at + size] = memory[from_gpu][at : at + size]
        at += size + gap
    np.random.default_rng(seed).shuffle(triples)
    device.copy(CopyRuns.of([(int(a), int(b), int(c)) for a, b, c in triples]))
    for kind, array in memory.items():
        assert np.array_equal(array, expected[kind])


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """Rows as (number of runs, size, gap between destinations, source, step of the sources)."""
    one = st.tuples(
        st.integers(1, 9),
        st.sampled_from([1, 16, 300, 512, 4095, 4096]),
        st.sampled_from([0, 0, 0, 48]),
        st.integers(0, 40_000),
        st.sampled_from([-4096, 0, 16, 512, 4096, 7000]),
    )
    return draw(st.lists(one, max_size=40))


@settings(deadline=None)
@given(
    drawn=rows(),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=8),
    is_from_gpu=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_rows_move_every_byte_once(
    drawn: list[tuple[int, int, int, int, int]], cuts: list[int], is_from_gpu: bool, seed: int
) -> None:
    """Includes rows with some runs in GPU memory and some in host memory."""
    source = np.random.default_rng(3).integers(0, 256, 1 << 17, dtype=np.uint8)
    destination = np.zeros(1 << 21, dtype=np.uint8)
    device = SimulatedDevice(seed)
    sides = source, destination
    for number, array in enumerate(sides if is_from_gpu else sides[::-1]):
        # One side is GPU memory except for a few pieces. The other side is host memory except for the same pieces.
        places = sorted({cut % array.nbytes for cut in cuts})
        bounds = [0, *places, array.nbytes] if number == 0 else [*places, *places[len(places) & ~1 :]]
        for begin, end in zip(bounds[::2], bounds[1::2], strict=False):
            if begin < end:
                device.register(int(array.ctypes.data) + begin, end - begin)
    table: list[CopyRow] = []
    expected, at = destination.copy(), 0
    for num_runs, size, gap, least, step in drawn:
        first = max(least, -step * num_runs)
        table.append(
            (int(source.ctypes.data) + first, int(destination.ctypes.data) + at, step, size + gap, size, num_runs)
        )
        for run in range(num_runs):
            expected[at : at + size] = source[first + run * step : first + run * step + size]
            at += size + gap
    np.random.default_rng(seed).shuffle(table)
    device.copy(runs_in_rows([tuple(map(int, row)) for row in table]))  # type: ignore[misc]
    assert np.array_equal(destination, expected)


@pytest.mark.parametrize("is_store", [True, False])
def test_rows_and_their_runs_give_the_same_plan(is_store: bool) -> None:
    """256 MiB in blocks of 32 layers."""
    size, layers, num_blocks = 16384, 32, 512
    blocks = np.random.default_rng(0).permutation(2 * num_blocks)[:num_blocks].tolist()
    step = 2 * num_blocks * size
    table: list[CopyRow] = [
        (DEVICE + block * size, HOST + place * layers * size, step, size, size, layers)
        for place, block in enumerate(blocks)
    ]
    if not is_store:
        table = [(host, gpu, host_step, gpu_step, *rest) for gpu, host, gpu_step, host_step, *rest in table]  # type: ignore[misc]
    runs = runs_in_rows(table)
    in_rows, one_by_one = Recording(CopyTuning()), Recording(CopyTuning())
    in_rows.copy(runs)
    one_by_one.copy(CopyRuns.of(runs.triples()))
    assert in_rows.tables == one_by_one.tables
    assert transfers(in_rows) == transfers(one_by_one)
    assert in_rows.num_rows == one_by_one.num_rows


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CopyTuning)])
def test_limits_must_be_positive(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected a number >= 1"):
        CopyTuning(**{field: 0})


def test_a_part_of_the_staging_memory_fits_any_small_run() -> None:
    with pytest.raises(ValueError, match="staging_bytes: expected at least 262144"):
        CopyTuning(large_run_bytes=65536, staging_bytes=262143)


@pytest.mark.parametrize("size", [512, SMALL.large_run_bytes])
def test_no_copy_of_the_copy_engines_crosses_two_registrations(size: int) -> None:
    """A slot may cross the border. The kernel uses addresses, so registrations do not matter to it."""
    host = REGISTRATION_BYTES - 5 * size // 2
    moved = transfers(copied([(DEVICE + 2 * i * size, host + i * size, size) for i in range(64)]))
    assert sum(num_bytes for _, _, num_bytes in moved) == 64 * size
    ends = [(first, first + num_bytes) for _, first, num_bytes in moved]
    assert all(last <= REGISTRATION_BYTES or first >= REGISTRATION_BYTES for first, last in ends)
    assert REGISTRATION_BYTES in [first for first, _ in ends]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12))
def test_ranges_are_merged_to_ranges_that_do_not_overlap(drawn: list[tuple[int, int]]) -> None:
    ranges = [(begin, begin + size) for begin, size in drawn]
    found = merge_ranges(ranges)
    assert {address for begin, end in found for address in range(begin, end)} == {
        address for begin, end in ranges for address in range(begin, end)
    }
    assert all(one[1] < other[0] for one, other in itertools.pairwise(found))


def test_the_ends_of_a_gpu_memory_range_are_exact() -> None:
    size = SMALL.large_run_bytes
    device = Recording()
    device.register(DEVICE + GPU_BYTES + size, size)
    inside = [(DEVICE + GPU_BYTES - size, HOST, size), (DEVICE + GPU_BYTES + size, HOST + size, size)]
    device.copy(CopyRuns.of(inside))
    assert transfers(device) == inside
    # Memory directly beside the ranges is host memory, and the host copies it.
    real = np.arange(64, dtype=np.uint8)
    begin = int(real.ctypes.data)
    beside = SimulatedDevice()
    beside.register(begin + 32, 32)
    beside.copy(CopyRuns.of([(begin, begin + 16, 16)]))
    assert ways(beside) == (0, 0)
    assert real[16:32].tolist() == [*range(16)]
