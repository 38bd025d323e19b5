"""Fences, order and failures of the GPU engines, on a simulated GPU (`simulated_device`).

test_copy_engines.py tests the contract of every copy engine on the same simulated GPU. tests/gpu runs the engines on a
real GPU.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_simulation import simulation
from simulated_device import SMALL, TIMEOUT_S, Event, SimulatedDevice, SimulatedJob

from hybridkv.transfer import CopyEngine, CopyEngineError, CopyRuns, JobId
from hybridkv.transfer.cuda import CudaCopyEngine, InlineCudaCopyEngine, MemoryKind
from hybridkv.transfer.cuda.device import NUM_PARTS
from hybridkv.transfer.cuda.engine import KernelCopies
from hybridkv.transfer.gpu import MAX_WAITING_JOBS

ENGINES = (CudaCopyEngine, InlineCudaCopyEngine)


class CopyRig:
    """KV memory of a simulated GPU and a pinned arena, registered with an engine."""

    def __init__(self, engine: CopyEngine, device: SimulatedDevice, num_bytes: int = 200_000) -> None:
        random = np.random.default_rng(9)
        self.cache, self.arena = (random.integers(0, 256, num_bytes, dtype=np.uint8) for _ in range(2))
        device.kinds[self.address(self.cache)] = MemoryKind.DEVICE
        device.kinds[self.address(self.arena)] = MemoryKind.PINNED
        engine.register(self.address(self.cache), num_bytes, "kv cache")
        engine.register(self.address(self.arena), num_bytes, "arena")

    @staticmethod
    def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
        return int(array.ctypes.data)

    def stores(self, size: int, count: int) -> CopyRuns:
        """Runs from scattered pages to one range of the arena."""
        cache, arena = self.address(self.cache), self.address(self.arena)
        return CopyRuns.of([(cache + (i * 7 % count) * 2 * size, arena + i * size, size) for i in range(count)])

    def stored(self, size: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
        return np.concatenate([self.cache[(i * 7 % count) * 2 * size :][:size] for i in range(count)])


def finish(engine: CopyEngine, job_id: int) -> str | None:
    assert engine.wait([JobId(job_id)], TIMEOUT_S)
    [result] = engine.poll()
    assert result.job_id == job_id
    return result.failure


@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("size", [64, 512, SMALL.large_run_bytes, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_stored_pages_are_loaded_unchanged(
    make: type[CudaCopyEngine | InlineCudaCopyEngine], size: int, seed: int
) -> None:
    device = SimulatedDevice(seed)
    engine = make(device)
    rig = CopyRig(engine, device)
    count = min(150, 90_000 // size)
    wanted = rig.stored(size, count)
    engine.submit(JobId(1), rig.stores(size, count))
    assert finish(engine, 1) is None
    assert np.array_equal(rig.arena[: size * count], wanted)
    before = rig.cache.copy()
    rig.cache[:] = 0
    engine.submit(JobId(2), rig.stores(size, count).reversed())
    assert finish(engine, 2) is None
    assert np.array_equal(rig.stored(size, count), wanted)
    for i in range(count):
        gap = slice(i * 2 * size + size, (i + 1) * 2 * size)
        assert not rig.cache[gap].any(), "bytes beside the pages changed"
    assert before.any()
    engine.close()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), size=st.integers(100, 1000), is_load=st.booleans())
def test_no_part_of_the_staging_memory_has_two_uses_at_once(seed: int, size: int, is_load: bool) -> None:
    device = SimulatedDevice(seed)
    engine = InlineCudaCopyEngine(device)
    rig = CopyRig(engine, device)
    count = 200_000 // size // 2
    runs = rig.stores(size, count)
    wanted = rig.stored(size, count)
    if is_load:
        rig.arena[: size * count] = wanted
        rig.cache[:] = 0
        runs = runs.reversed()
    engine.submit(JobId(1), runs)
    assert finish(engine, 1) is None
    assert device.log.count("launch") > 2 * NUM_PARTS
    assert np.array_equal(rig.stored(size, count) if is_load else rig.arena[: size * count], wanted)


class MissingWaitDevice(SimulatedDevice):
    """A simulated GPU that leaves out one kind of wait."""

    def __init__(self, seed: int, missing: str) -> None:
        super().__init__(seed)
        self._missing = missing

    def _wait_for_caller(self, queue: int) -> None:
        if self._missing != "compute":
            super()._wait_for_caller(queue)

    def _wait(self, queue: int, other: int, part: int) -> None:
        if self._missing != ("kernel", "transfer")[queue]:
            super()._wait(queue, other, part)

    def _host_wait(self, table: int) -> None:
        if self._missing != "host":
            super()._host_wait(table)


@pytest.mark.parametrize("is_load", [False, True])
@pytest.mark.parametrize("missing", ["nothing", "compute", "kernel", "transfer", "host"])
def test_the_simulated_gpu_detects_a_missing_wait(missing: str, is_load: bool) -> None:
    # Enough for all tables in host memory.
    count = int(simulation().hybridkv_job_tables()) * SMALL.part_bytes // 512 + 400

    def is_right(seed: int) -> bool:
        device = MissingWaitDevice(seed, missing)
        engine = CudaCopyEngine(device)
        rig = CopyRig(engine, device, num_bytes=2 * 512 * count)
        runs, wanted = rig.stores(512, count), rig.stored(512, count)
        if is_load:
            rig.arena[: 512 * count] = wanted
            rig.cache[:] = 0
            runs = runs.reversed()
        device.compute.happened.clear()
        engine.submit(JobId(1), runs)
        is_early = missing == "compute" and engine.wait([JobId(1)], TIMEOUT_S)
        device.compute.happened.set()
        failure = finish(engine, 1)
        engine.close()
        found = rig.stored(512, count) if is_load else rig.arena[: 512 * count]
        return failure is None and not is_early and bool(np.array_equal(found, wanted))

    assert all(is_right(seed) for seed in range(20)) == (missing == "nothing")


@pytest.mark.parametrize("is_load", [False, True])
@pytest.mark.parametrize("size", [64, 512, SMALL.large_run_bytes])
def test_copies_wait_for_earlier_work_of_compute(size: int, is_load: bool) -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    cache, arena = rig.cache.copy(), rig.arena.copy()
    device.compute.happened.clear()
    runs = rig.stores(size, 20)
    engine.submit(JobId(1), runs.reversed() if is_load else runs)
    assert device.is_stuck.wait(TIMEOUT_S)
    # The last data that the forward pass reads is unchanged, and the last data that it writes is stored.
    assert np.array_equal(rig.cache, cache)
    assert np.array_equal(rig.arena, arena)
    if not is_load:
        rig.cache[:] = cache[::-1]
    wanted = arena[: 20 * size] if is_load else rig.stored(size, 20)
    device.compute.happened.set()
    assert finish(engine, 1) is None
    assert np.array_equal(rig.stored(size, 20) if is_load else rig.arena[: 20 * size], wanted)
    engine.close()


def test_before_runs_while_another_job_is_copied() -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    device.compute.happened.clear()
    entered = threading.Event()
    engine.submit(JobId(1), rig.stores(512, 20))
    assert device.is_stuck.wait(TIMEOUT_S)
    engine.submit(JobId(2), CopyRuns.empty(), before=entered.set)
    assert entered.wait(TIMEOUT_S)
    assert engine.poll() == []
    device.compute.happened.set()
    assert engine.wait([JobId(1), JobId(2)], TIMEOUT_S)
    assert [(result.job_id, result.failure) for result in engine.poll()] == [(1, None), (2, None)]
    engine.close()


def test_a_job_is_copied_while_after_of_another_job_runs() -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    wanted = rig.stored(512, 20)
    opened, is_copied = threading.Event(), threading.Event()

    def verify() -> str | None:
        return None if opened.wait(TIMEOUT_S) else "the second job was never copied"

    enqueue = device.enqueue

    def copy(runs: CopyRuns, caller: Event) -> SimulatedJob:
        job = enqueue(runs, caller)
        job.synchronize()
        is_copied.set()
        return job

    device.enqueue = copy  # type: ignore[method-assign]
    engine.submit(JobId(1), CopyRuns.empty(), after=verify)
    engine.submit(JobId(2), rig.stores(512, 20))
    assert is_copied.wait(TIMEOUT_S)
    assert np.array_equal(rig.arena[: 20 * 512], wanted)
    assert engine.poll() == []
    opened.set()
    assert engine.wait([JobId(1), JobId(2)], TIMEOUT_S)
    assert [(result.job_id, result.failure) for result in engine.poll()] == [(1, None), (2, None)]
    engine.close()


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 10_000),
    jobs=st.lists(st.tuples(st.sampled_from([64, 300, 512, 4096, 9000]), st.booleans()), min_size=2, max_size=6),
)
def test_jobs_that_are_enqueued_together_share_the_staging_memory(seed: int, jobs: list[tuple[int, bool]]) -> None:
    device = SimulatedDevice(seed)
    engine = CudaCopyEngine(device)
    rigs, counts, wanted = [], [], []
    for number, (size, is_store) in enumerate(jobs):
        rig, count = CopyRig(engine, device), 90_000 // size // 7 * 7 + 1  # `stores` fails with multiples of 7
        rigs.append(rig)
        counts.append(count)
        runs = rig.stores(size, count)
        wanted.append(rig.stored(size, count) if is_store else rig.arena[: size * count].copy())
        engine.submit(JobId(number), runs if is_store else runs.reversed())
    assert engine.wait([JobId(number) for number in range(len(jobs))], TIMEOUT_S)
    assert [result.failure for result in engine.poll()] == [None] * len(jobs)
    engine.close()
    for rig, count, (size, is_store), expected in zip(rigs, counts, jobs, wanted, strict=True):
        assert np.array_equal(rig.arena[: size * count] if is_store else rig.stored(size, count), expected)


def test_few_jobs_are_enqueued_before_the_first_has_ended() -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    device.compute.happened.clear()
    begun: list[int] = []
    for number in range(2 * MAX_WAITING_JOBS):
        runs = rig.stores(512, 20) if number == 0 else CopyRuns.empty()
        engine.submit(JobId(number), runs, before=lambda number=number: begun.append(number))  # type: ignore[misc]
    assert device.is_stuck.wait(TIMEOUT_S)
    assert not engine.wait([JobId(0)], 0.05)
    assert len(begun) <= MAX_WAITING_JOBS + 2  # one is waited for, and one waits for its place
    device.compute.happened.set()
    assert engine.wait([JobId(2 * MAX_WAITING_JOBS - 1)], TIMEOUT_S)
    assert begun == [*range(2 * MAX_WAITING_JOBS)]
    engine.close()


def test_a_thread_that_cannot_use_the_gpu_still_waits_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    wanted = rig.stored(512, 20)

    def enter_thread(copies: KernelCopies) -> None:
        if threading.current_thread().name == "hybridkv-copied":
            raise RuntimeError("no such device")

    monkeypatch.setattr(KernelCopies, "enter_thread", enter_thread)
    device.compute.happened.clear()
    engine.submit(JobId(1), rig.stores(512, 20))
    assert device.is_stuck.wait(TIMEOUT_S)
    assert not engine.wait([JobId(1)], 0.05)
    device.compute.happened.set()
    assert finish(engine, 1) == "RuntimeError: no such device"
    assert np.array_equal(rig.arena[: 20 * 512], wanted)
    engine.close()


def test_an_invalid_range_does_not_reach_the_gpu() -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    with pytest.raises(CopyEngineError, match="register cache: expected a range of memory"):
        engine.register(4096, -1, "cache")
    assert device._ranges == []
    engine.close()


def test_seconds_of_a_job_begin_when_the_previous_job_has_ended() -> None:
    now = [1.0]
    engine = CudaCopyEngine(SimulatedDevice(), lambda: now[0])
    begun = threading.Event()

    def end_late() -> None:
        assert begun.wait(TIMEOUT_S)
        now[0] = 5.0

    engine.submit(JobId(1), CopyRuns.empty(), after=end_late)
    engine.submit(JobId(2), CopyRuns.empty(), before=begun.set, after=lambda: now.__setitem__(0, 7.0))
    assert engine.wait([JobId(1), JobId(2)], TIMEOUT_S)
    assert [result.seconds for result in engine.poll()] == [4.0, 2.0]
    engine.close()


@pytest.mark.parametrize("make", ENGINES)
def test_the_fence_is_taken_first_and_on_the_submitting_thread(
    make: type[CudaCopyEngine | InlineCudaCopyEngine],
) -> None:
    device = SimulatedDevice()
    engine = make(device)
    threads: list[str] = []
    take = device.caller_event
    device.caller_event = lambda: (threads.append(threading.current_thread().name), take())[1]  # type: ignore[method-assign]
    engine.submit(JobId(1), CopyRuns.empty(), before=lambda: device.log.append("before"))
    assert finish(engine, 1) is None
    assert threads == [threading.current_thread().name]
    assert device.log == ["caller_event", "before"]
    engine.close()


def test_a_full_engine_takes_no_fence() -> None:
    device = SimulatedDevice()
    engine = InlineCudaCopyEngine(device, max_queued_jobs=1)
    assert engine.submit(JobId(1), CopyRuns.empty())
    assert not engine.submit(JobId(2), CopyRuns.empty())
    assert device.log.count("caller_event") == 1


@pytest.mark.parametrize("call", ["launch", "transfer", "synchronize"])
def test_a_failed_call_fails_its_job(call: str) -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    device.fail_on = call
    engine.submit(JobId(1), rig.stores(512, 60))
    assert finish(engine, 1) == f"CudaError: {call}: cudaErrorUnknown"
    device.fail_on = None
    engine.submit(JobId(2), rig.stores(512, 60))
    assert finish(engine, 2) is None
    engine.close()


def test_a_failed_job_ends_only_after_all_its_writes() -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    device.fail_on = "launch"
    engine.submit(JobId(1), rig.stores(512, 60))
    assert finish(engine, 1) is not None
    assert device.log[-1] == "drain"
    engine.close()


def test_a_failed_fence_refuses_the_job_and_leaves_no_state() -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    device.fail_on = "caller_event"
    with pytest.raises(RuntimeError, match="caller_event: cudaErrorUnknown"):
        engine.submit(JobId(1), CopyRuns.empty())
    device.fail_on = None
    assert engine.submit(JobId(1), CopyRuns.empty())
    assert finish(engine, 1) is None
    engine.close()


@pytest.mark.parametrize("make", ENGINES)
def test_memory_that_the_gpu_cannot_reach_is_not_registered(
    make: type[CudaCopyEngine | InlineCudaCopyEngine],
) -> None:
    device = SimulatedDevice()
    engine = make(device)
    memory = np.zeros(64, dtype=np.uint8)
    address = int(memory.ctypes.data)
    device.kinds[address] = MemoryKind.OTHER
    with pytest.raises(CopyEngineError, match="register arena: expected this GPU's memory or pinned memory"):
        engine.register(address, 64, "arena")
    engine.submit(JobId(1), CopyRuns.of([(address, address + 32, 8)]))
    failure = finish(engine, 1)
    assert failure is not None
    assert "does not lie in one registered range" in failure
    engine.close()
