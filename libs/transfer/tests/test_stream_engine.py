"""Batches, overlap and failures of the engines that copy in streams. test_stream_orders.py tests their fences."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from lazy_device import TIMEOUT_S, LazyDevice, LazyEvent, LazyStream

from hybridkv.transfer import CopyEngine, CopyResult, CopyRuns, InlineStreamCopyEngine, JobId, StreamCopyEngine, streams

PAGE = 64


class WatchedDevice(LazyDevice):
    """Records how each batch was submitted."""

    def __init__(self) -> None:
        super().__init__(lambda below: 0, is_driven=True)
        self.batches: list[tuple[int, bool]] = []
        self.entered: set[str] = set()

    def enter_thread(self) -> None:
        self.entered.add(threading.current_thread().name)
        super().enter_thread()

    def swap_blocks_batch(self, *columns: np.ndarray, is_src_access_order_any: bool) -> None:  # type: ignore[type-arg, override]
        self.batches.append((len(columns[0]), is_src_access_order_any))
        super().swap_blocks_batch(*columns, is_src_access_order_any=is_src_access_order_any)


@pytest.fixture
def device() -> WatchedDevice:
    return WatchedDevice()


@pytest.fixture
def engine(device: WatchedDevice) -> Iterator[StreamCopyEngine]:
    made = StreamCopyEngine(device)
    yield made
    device.drain()
    made.close()


class Memory:
    """Pages of a device and of pinned host memory, registered with an engine."""

    def __init__(self, device: LazyDevice, engine: CopyEngine) -> None:
        self.cache = np.arange(16 * PAGE, dtype=np.uint8)
        self.arena = np.zeros(16 * PAGE, dtype=np.uint8)
        device.pin(self.arena)
        engine.register(self.cache.ctypes.data, self.cache.nbytes, "kv cache")
        engine.register(self.arena.ctypes.data, self.arena.nbytes, "arena")

    def store(self, *pages: int) -> CopyRuns:
        cache, arena = int(self.cache.ctypes.data), int(self.arena.ctypes.data)
        return CopyRuns.of([(cache + page * PAGE, arena + page * PAGE, PAGE) for page in pages])

    def copy_within_the_cache(self, source: int, destination: int) -> CopyRuns:
        cache = int(self.cache.ctypes.data)
        return CopyRuns.of([(cache + source * PAGE, cache + destination * PAGE, PAGE)])

    def is_stored(self, page: int) -> bool:
        place = slice(page * PAGE, (page + 1) * PAGE)
        return bool((self.arena[place] == self.cache[place]).all())


def finish(engine: CopyEngine, *job_ids: int) -> list[CopyResult]:
    assert engine.wait([JobId(job_id) for job_id in job_ids], TIMEOUT_S)
    return engine.poll()


def wait_for_batches(device: LazyDevice, engine: StreamCopyEngine, number: int) -> None:
    """Waits for the event of a batch. For a failed batch, waits until its engine waits for its submitted copies."""
    assert device.wait_for_record(engine._copies._stream, number)  # type: ignore[arg-type]


def test_a_job_is_one_batch(device: WatchedDevice, engine: StreamCopyEngine) -> None:
    memory = Memory(device, engine)
    engine.submit(JobId(1), memory.store(1, 3, 5, 7))
    wait_for_batches(device, engine, 1)
    assert device.batches == [(4, False)]


def test_no_copy_crosses_two_registrations(
    device: WatchedDevice, engine: StreamCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(device, engine)
    # In the middle of page 3 of the arena. No border lies in the cache.
    monkeypatch.setattr(streams, "REGISTRATION_BYTES", int(memory.arena.ctypes.data) + 3 * PAGE + PAGE // 2)
    engine.submit(JobId(1), memory.store(1, 3, 5))
    wait_for_batches(device, engine, 1)
    device.drain()
    assert device.batches == [(4, False)]
    assert all(memory.is_stored(page) for page in (1, 3, 5))


def test_both_threads_enter_the_device(device: WatchedDevice, engine: StreamCopyEngine) -> None:
    """`LazyDevice` fails every call on a thread that did not enter it."""
    memory = Memory(device, engine)
    engine.submit(JobId(1), memory.store(1))
    wait_for_batches(device, engine, 1)
    device.drain()
    assert [result.failure for result in finish(engine, 1)] == [None]
    assert device.entered == {"hybridkv-copy", "hybridkv-copied"}


def test_only_sources_in_pinned_memory_may_be_read_in_any_order(
    device: WatchedDevice, engine: StreamCopyEngine
) -> None:
    memory = Memory(device, engine)
    loads = memory.store(3, 4).reversed()
    engine.submit(JobId(1), CopyRuns.of(memory.copy_within_the_cache(1, 2).triples() + loads.triples()))
    wait_for_batches(device, engine, 1)
    assert device.batches == [(2, True), (1, False)]


def test_after_of_a_copy_runs_while_the_next_copy_is_in_flight(device: WatchedDevice, engine: StreamCopyEngine) -> None:
    memory = Memory(device, engine)
    entered, opened = threading.Event(), threading.Event()

    def verify() -> str | None:
        entered.set()
        return None if opened.wait(TIMEOUT_S) else "the second batch was never submitted"

    engine.submit(JobId(1), memory.store(1), after=verify)
    wait_for_batches(device, engine, 1)
    device.drain()
    assert entered.wait(TIMEOUT_S)
    engine.submit(JobId(2), memory.store(2))
    engine.submit(JobId(3), CopyRuns.empty())
    wait_for_batches(device, engine, 2)
    device.drain()
    assert memory.is_stored(2)
    assert engine.poll() == []
    opened.set()
    assert [(result.job_id, result.failure) for result in finish(engine, 1, 2, 3)] == [(1, None), (2, None), (3, None)]


def test_after_runs_on_the_thread_that_waits_for_batches(engine: StreamCopyEngine) -> None:
    names: list[str] = []
    engine.submit(JobId(1), CopyRuns.empty(), after=lambda: names.append(threading.current_thread().name))
    finish(engine, 1)
    assert names == ["hybridkv-copied"]


def test_seconds_of_a_job_begin_when_the_previous_job_has_ended(device: WatchedDevice) -> None:
    now = [1.0]
    engine = StreamCopyEngine(device, lambda: now[0])
    memory = Memory(device, engine)
    engine.submit(JobId(1), memory.store(1), after=lambda: now.__setitem__(0, 5.0))
    engine.submit(JobId(2), memory.store(2), after=lambda: now.__setitem__(0, 7.0))
    wait_for_batches(device, engine, 2)
    device.drain()
    assert [result.seconds for result in finish(engine, 1, 2)] == [4.0, 2.0]
    engine.close()


def test_a_result_is_returned_only_after_its_batch_has_completed(
    device: WatchedDevice, engine: StreamCopyEngine
) -> None:
    memory = Memory(device, engine)
    engine.submit(JobId(1), memory.store(1))
    wait_for_batches(device, engine, 1)
    assert not engine.wait([JobId(1)], 0.01)
    device.drain()
    [result] = finish(engine, 1)
    assert (result.failure, result.num_bytes, memory.is_stored(1)) == (None, PAGE, True)


def test_a_refused_batch_fails_only_its_job_after_all_its_writes(
    device: WatchedDevice, engine: StreamCopyEngine
) -> None:
    memory = Memory(device, engine)
    device.fail_batches = 1
    called: list[int] = []
    engine.submit(JobId(1), memory.store(1), after=lambda: called.append(1))
    engine.submit(JobId(2), memory.store(2))
    wait_for_batches(device, engine, 1)
    assert not engine.wait([JobId(1)], 0.01), "half of the batch was submitted"
    device.drain()
    wait_for_batches(device, engine, 2)
    device.drain()
    first, second = finish(engine, 1, 2)
    assert (first.failure, first.num_bytes) == ("RuntimeError: swap_blocks_batch: invalid argument", 0)
    assert (second.failure, second.num_bytes, called) == (None, PAGE, [])
    assert memory.is_stored(2)


def test_a_copy_that_fails_on_the_device_fails_only_its_job(
    device: WatchedDevice, engine: StreamCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(device, engine)
    failing = [True]

    def synchronize(event: LazyEvent) -> None:
        device.wait_for(event)
        if failing:
            failing.pop()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(LazyEvent, "synchronize", synchronize)
    engine.submit(JobId(1), memory.store(1))
    engine.submit(JobId(2), memory.store(2))
    wait_for_batches(device, engine, 2)
    device.drain()
    first, second = finish(engine, 1, 2)
    assert "illegal memory access" in str(first.failure)
    assert (first.num_bytes, second.failure) == (0, None)


def test_a_batch_without_its_event_fails_its_job_after_all_its_writes(
    device: WatchedDevice, engine: StreamCopyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(device, engine)
    stream = engine._copies._stream
    failing = [True]

    def record(event: LazyEvent, recorded: LazyStream) -> None:
        if recorded is stream and failing:
            failing.pop()
            raise RuntimeError("CUDA error: out of memory")
        device.enqueue(recorded, ("record", event))

    monkeypatch.setattr(LazyEvent, "record", record)
    engine.submit(JobId(1), memory.store(1))
    wait_for_batches(device, engine, 1)
    assert not engine.wait([JobId(1)], 0.01), "the whole batch was submitted"
    device.drain()
    [result] = finish(engine, 1)
    assert "out of memory" in str(result.failure) and memory.is_stored(1)


def test_a_batch_that_is_refused_inline_fails_its_job() -> None:
    device = LazyDevice(lambda below: 0)
    engine = InlineStreamCopyEngine(device)
    memory = Memory(device, engine)
    device.fail_batches = 1
    assert engine.submit(JobId(1), memory.store(1))
    [refused] = engine.poll()
    assert "invalid argument" in str(refused.failure) and refused.num_bytes == 0
    assert engine.submit(JobId(1), memory.store(1))
    assert memory.is_stored(1)


def test_the_fence_is_taken_on_the_submitting_thread(device: WatchedDevice, engine: StreamCopyEngine) -> None:
    """So the fence comes after all work that this thread has enqueued for compute, in any stream."""
    memory = Memory(device, engine)
    forward = device.new_stream()
    with device.stream(forward):
        device.launch(lambda: memory.cache.fill(7))
        engine.submit(JobId(1), memory.store(1))
    wait_for_batches(device, engine, 1)
    device.drain()
    finish(engine, 1)
    assert (memory.arena[PAGE : 2 * PAGE] == 7).all()
