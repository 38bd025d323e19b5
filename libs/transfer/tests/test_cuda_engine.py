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
from simulated_device import SMALL, TIMEOUT_S, Event, SimulatedDevice

from hybridkv.transfer import CopyEngine, CopyEngineError, CopyRuns, JobId
from hybridkv.transfer.cuda import CudaCopyEngine, InlineCudaCopyEngine, MemoryKind
from hybridkv.transfer.cuda.device import NUM_PARTS

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

    def _host_wait(self, other: int, part: int) -> None:
        if self._missing != "host":
            super()._host_wait(other, part)


@pytest.mark.parametrize("is_load", [False, True])
@pytest.mark.parametrize("missing", ["nothing", "compute", "kernel", "transfer", "host"])
def test_the_simulated_gpu_detects_a_missing_wait(missing: str, is_load: bool) -> None:
    def is_right(seed: int) -> bool:
        device = MissingWaitDevice(seed, missing)
        engine = CudaCopyEngine(device)
        rig = CopyRig(engine, device, num_bytes=400_000)
        runs, wanted = rig.stores(512, 380), rig.stored(512, 380)
        if is_load:
            rig.arena[: 512 * 380] = wanted
            rig.cache[:] = 0
            runs = runs.reversed()
        device.compute.happened.clear()
        engine.submit(JobId(1), runs)
        is_early = missing == "compute" and engine.wait([JobId(1)], TIMEOUT_S)
        device.compute.happened.set()
        failure = finish(engine, 1)
        engine.close()
        found = rig.stored(512, 380) if is_load else rig.arena[: 512 * 380]
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

    copy = device.copy

    def copy_and_report(runs: CopyRuns, caller: Event) -> None:
        copy(runs, caller)
        if len(runs):
            is_copied.set()

    device.copy = copy_and_report  # type: ignore[method-assign]
    engine.submit(JobId(1), CopyRuns.empty(), after=verify)
    engine.submit(JobId(2), rig.stores(512, 20))
    assert is_copied.wait(TIMEOUT_S)
    assert np.array_equal(rig.arena[: 20 * 512], wanted)
    assert engine.poll() == []
    opened.set()
    assert engine.wait([JobId(1), JobId(2)], TIMEOUT_S)
    assert [(result.job_id, result.failure) for result in engine.poll()] == [(1, None), (2, None)]
    engine.close()


def test_few_jobs_are_prepared_before_their_copies() -> None:
    device = SimulatedDevice()
    engine = CudaCopyEngine(device)
    rig = CopyRig(engine, device)
    device.compute.happened.clear()
    begun: list[int] = []
    engine.submit(JobId(0), rig.stores(512, 20))
    assert device.is_stuck.wait(TIMEOUT_S)
    for number in range(1, 9):
        engine.submit(JobId(number), CopyRuns.empty(), before=lambda number=number: begun.append(number))  # type: ignore[misc]
    assert not engine.wait([JobId(8)], 0.05)
    assert len(begun) <= 2
    device.compute.happened.set()
    assert engine.wait([JobId(8)], TIMEOUT_S)
    assert begun == [*range(1, 9)]
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
    assert device.log == ["caller_event", "before", "finish"]
    engine.close()


def test_a_full_engine_takes_no_fence() -> None:
    device = SimulatedDevice()
    engine = InlineCudaCopyEngine(device, max_queued_jobs=1)
    assert engine.submit(JobId(1), CopyRuns.empty())
    assert not engine.submit(JobId(2), CopyRuns.empty())
    assert device.log.count("caller_event") == 1


@pytest.mark.parametrize("call", ["launch", "transfer", "finish"])
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
    assert device.log[-1] == "finish"
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
    assert "does not lie in registered memory" in failure
    engine.close()
