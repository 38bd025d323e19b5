"""The contract of copy engines, for each engine of this library."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import patience
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_device import LazyDevice
from simulated_device import SimulatedDevice

from hybridkv.transfer import (
    CopyEngine,
    CopyEngineError,
    CopyResult,
    CopyRuns,
    CpuCopyEngine,
    InlineCopyEngine,
    InlineStreamCopyEngine,
    JobId,
    RecordDigests,
    StreamCopyEngine,
)
from hybridkv.transfer.cuda import CudaCopyEngine, InlineCudaCopyEngine

TIMEOUT_S = patience.seconds(6.0)
POISON = 0xA5


def lazy_device() -> LazyDevice:
    return LazyDevice(random.Random(0).randrange)


ENGINES: dict[str, Callable[[], CopyEngine]] = {
    "inline": InlineCopyEngine,
    "one thread": CpuCopyEngine,
    "simulated gpu": lambda: CudaCopyEngine(SimulatedDevice()),
    "simulated gpu, inline": lambda: InlineCudaCopyEngine(SimulatedDevice()),
    "streams": lambda: StreamCopyEngine(lazy_device()),
    "streams, inline": lambda: InlineStreamCopyEngine(lazy_device()),
}


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    made = ENGINES[request.param]()
    yield made
    made.close()


class Memory:
    """A source of random bytes and a destination of constant bytes, registered with an engine."""

    def __init__(self, engine: CopyEngine, num_bytes: int = 1 << 20) -> None:
        self.source = np.random.default_rng(7).integers(0, 256, num_bytes, dtype=np.uint8)
        self.destination = np.full(num_bytes, POISON, dtype=np.uint8)
        engine.register(self.source.ctypes.data, num_bytes, "source")
        engine.register(self.destination.ctypes.data, num_bytes, "destination")

    def runs(self, *triples: tuple[int, int, int]) -> CopyRuns:
        """Runs from (source offset, destination offset, size)."""
        bases = self.source.ctypes.data, self.destination.ctypes.data
        return CopyRuns.of([(bases[0] + source, bases[1] + dest, size) for source, dest, size in triples])

    def is_untouched(self) -> bool:
        return bool((self.destination == POISON).all())


def finish(engine: CopyEngine, *job_ids: int) -> list[CopyResult]:
    assert engine.wait([JobId(job_id) for job_id in job_ids], TIMEOUT_S)
    return engine.poll()


def failure_of(engine: CopyEngine, job_id: int) -> str | None:
    [result] = finish(engine, job_id)
    assert result.job_id == job_id
    return result.failure


def test_an_engine_is_a_copy_engine(engine: CopyEngine) -> None:
    assert isinstance(engine, CopyEngine)


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_exactly_the_bytes_of_the_runs_are_copied(name: str, data: st.DataObject) -> None:
    num_bytes = 300_000
    sizes = data.draw(st.lists(st.sampled_from([1, 7, 4096, 65535, 65536, 70_001]), max_size=4))
    gaps = data.draw(st.lists(st.integers(min_value=0, max_value=500), min_size=len(sizes), max_size=len(sizes)))
    order = data.draw(st.permutations(range(len(sizes))))
    offsets = [sum(sizes[:i]) + sum(gaps[: i + 1]) for i in range(len(sizes))]
    engine = ENGINES[name]()
    try:
        memory = Memory(engine, num_bytes)
        triples = [(data.draw(st.integers(0, num_bytes - sizes[i])), offsets[i], sizes[i]) for i in order]
        expected = memory.destination.copy()
        for source, destination, size in triples:
            expected[destination : destination + size] = memory.source[source : source + size]
        assert engine.submit(JobId(1), memory.runs(*triples))
        [result] = finish(engine, 1)
        assert (result.failure, result.num_bytes) == (None, sum(sizes))
        assert np.array_equal(memory.destination, expected)
    finally:
        engine.close()


def test_large_jobs_are_copied_whole(engine: CopyEngine) -> None:
    memory = Memory(engine)
    half = len(memory.source) // 2
    engine.submit(JobId(1), memory.runs((0, half, half), (half, 0, half)))
    assert failure_of(engine, 1) is None
    assert np.array_equal(memory.destination, np.roll(memory.source, half))


@pytest.mark.parametrize("size", [64, 4096, 70_001])
def test_a_job_may_copy_within_one_memory_and_into_it_from_another(engine: CopyEngine, size: int) -> None:
    """A load does so if a part of its data already lies in the memory that it fills."""
    memory = Memory(engine)
    base, other = int(memory.source.ctypes.data), int(memory.destination.ctypes.data)
    memory.destination[:] = np.arange(len(memory.destination), dtype=np.uint64).astype(np.uint8)
    triples = [(base + 3 * size, base, size), (other, base + size, size), (base + 4 * size, base + 2 * size, size)]
    expected = memory.source.copy()
    expected[:size], expected[2 * size : 3 * size] = memory.source[3 * size :][:size], memory.source[4 * size :][:size]
    expected[size : 2 * size] = memory.destination[:size]
    engine.submit(JobId(1), CopyRuns.of(triples))
    assert failure_of(engine, 1) is None
    assert np.array_equal(memory.source, expected)


def test_a_job_without_runs_succeeds(engine: CopyEngine) -> None:
    engine.submit(JobId(1), CopyRuns.empty())
    assert failure_of(engine, 1) is None


@pytest.mark.parametrize(
    ("bad", "side"),
    [
        ((-1, 0, 4), "source"),
        ((0, -1, 4), "destination"),
        (((1 << 20) - 3, 0, 4), "source"),
        ((0, (1 << 20) - 3, 4), "destination"),
        ((0, 0, (1 << 63) - 1), "source"),
    ],
)
def test_a_run_outside_registered_memory_fails_the_job_before_a_byte_moves(
    engine: CopyEngine, bad: tuple[int, int, int], side: str
) -> None:
    memory = Memory(engine)
    called: list[str] = []
    engine.submit(JobId(1), memory.runs((0, 100, 10), bad), before=lambda: called.append("before"))
    failure = failure_of(engine, 1)
    assert failure is not None
    assert failure.startswith(f"run 1: {side}")
    assert memory.is_untouched()
    assert called == []


def test_no_memory_is_registered_at_first(engine: CopyEngine) -> None:
    engine.submit(JobId(1), CopyRuns.of([(4096, 8192, 1)]))
    failure = failure_of(engine, 1)
    assert failure is not None
    assert "does not lie in one registered range" in failure


def test_a_run_may_not_cross_from_one_registration_into_the_next(engine: CopyEngine) -> None:
    memory = np.zeros(64, dtype=np.uint8)
    base = memory.ctypes.data
    engine.register(base, 16, "low")
    engine.register(base + 16, 48, "high")
    engine.submit(JobId(1), CopyRuns.of([(base + 8, base + 32, 16)]))
    failure = failure_of(engine, 1)
    assert failure is not None
    assert "'low'" in failure


def test_registrations_may_overlap(engine: CopyEngine) -> None:
    memory = np.arange(64, dtype=np.uint8)
    base = memory.ctypes.data
    engine.register(base, 64, "storage")
    engine.register(base + 8, 4, "layer")
    engine.register(base + 8, 4, "layer again")
    engine.submit(JobId(1), CopyRuns.of([(base + 10, base + 40, 20)]))
    assert failure_of(engine, 1) is None
    assert memory[40:60].tolist() == list(range(10, 30))


@pytest.mark.parametrize(("address", "num_bytes"), [(-1, 4), (0, 0), (0, -4), ((1 << 63) - 2, 4)])
def test_an_invalid_address_range_cannot_be_registered(engine: CopyEngine, address: int, num_bytes: int) -> None:
    with pytest.raises(CopyEngineError, match="register nothing"):
        engine.register(address, num_bytes, "nothing")


def test_hooks_run_before_and_after_the_copy(engine: CopyEngine) -> None:
    memory = Memory(engine)
    seen: list[int] = []

    def look() -> None:
        seen.append(int(memory.destination[0]))

    memory.source[0] = 1
    engine.submit(JobId(1), memory.runs((0, 0, 8)), before=look, after=look)
    assert failure_of(engine, 1) is None
    assert seen == [POISON, 1]


def test_a_failure_returned_by_before_cancels_the_copy(engine: CopyEngine) -> None:
    memory = Memory(engine)
    called: list[str] = []
    engine.submit(JobId(1), memory.runs((0, 0, 8)), before=lambda: "evicted", after=lambda: called.append("after"))
    [result] = finish(engine, 1)
    assert (result.failure, result.num_bytes) == ("evicted", 0)
    assert memory.is_untouched()
    assert called == []


def test_a_failure_returned_by_after_fails_the_job(engine: CopyEngine) -> None:
    memory = Memory(engine)
    engine.submit(JobId(1), memory.runs((0, 0, 8)), after=lambda: "checksum")
    [result] = finish(engine, 1)
    assert (result.failure, result.num_bytes) == ("checksum", 8)


def test_digests_are_of_the_copied_records_or_are_none(engine: CopyEngine) -> None:
    memory = Memory(engine)
    triples = ((5, 0, 3000), (90_000, 3000, 70_001), (7, 100_000, 240), (200_000, 110_000, 65_536))
    records = RecordDigests(np.array([2, 2, 3, 4], dtype=np.int64))
    seen: list[list[bytes] | None] = []
    engine.submit(JobId(1), memory.runs(*triples), after=lambda: seen.append(records.digests), records=records)
    assert failure_of(engine, 1) is None
    parts = [memory.source[start : start + size].tobytes() for start, _, size in triples]
    wanted = [xxhash.xxh3_128_digest(record) for record in (parts[0] + parts[1], b"", parts[2], parts[3])]
    assert seen == [records.digests]
    assert records.digests in (None, wanted)
    for (_, place, size), part in zip(triples, parts, strict=True):
        assert memory.destination[place : place + size].tobytes() == part


def test_records_that_were_not_copied_have_no_digests(engine: CopyEngine) -> None:
    memory = Memory(engine)
    records = RecordDigests(np.array([1], dtype=np.int64))
    engine.submit(JobId(1), memory.runs((0, 0, 8)), before=lambda: "evicted", records=records)
    assert failure_of(engine, 1) == "evicted"
    assert records.digests is None


def test_runs_may_be_created_when_the_job_starts(engine: CopyEngine) -> None:
    memory = Memory(engine)
    order: list[str] = []
    records = RecordDigests(np.empty(0, dtype=np.int64))

    def runs() -> CopyRuns:
        order.append("runs")
        records.ends = np.array([1, 2], dtype=np.int64)
        return memory.runs((0, 0, 900), (5, 1000, 8))

    engine.submit(JobId(1), runs, before=lambda: order.append("before"), records=records)
    [result] = finish(engine, 1)
    assert (result.failure, result.num_bytes, order) == (None, 908, ["runs", "before"])
    assert memory.destination[:900].tobytes() == memory.source[:900].tobytes()
    wanted = [xxhash.xxh3_128_digest(memory.source[start:end].tobytes()) for start, end in ((0, 900), (5, 13))]
    assert records.digests in (None, wanted)


def test_an_exception_while_creating_runs_fails_only_their_job(engine: CopyEngine) -> None:
    def broken() -> CopyRuns:
        raise ValueError("no such block")

    memory = Memory(engine)
    called: list[str] = []
    engine.submit(JobId(1), broken, before=lambda: called.append("before"), after=lambda: called.append("after"))
    engine.submit(JobId(2), memory.runs((8, 8, 8)))
    results = {result.job_id: (result.failure, result.num_bytes) for result in finish(engine, 1, 2)}
    assert (results, called) == ({1: ("ValueError: no such block", 0), 2: (None, 8)}, [])


def test_runs_created_late_are_checked_like_others(engine: CopyEngine) -> None:
    memory = Memory(engine, 4096)
    engine.submit(JobId(1), lambda: memory.runs((0, 0, 8), (4090, 0, 8)))
    assert "run 1: source" in str(failure_of(engine, 1))
    assert memory.is_untouched()


@pytest.mark.parametrize("hook", ["before", "after"])
def test_an_exception_in_a_hook_fails_only_its_job(engine: CopyEngine, hook: str) -> None:
    def broken() -> str | None:
        raise OSError("no such device")

    memory = Memory(engine)
    engine.submit(JobId(1), memory.runs((0, 0, 8)), **{hook: broken})
    engine.submit(JobId(2), memory.runs((8, 8, 8)))
    failures = {result.job_id: result.failure for result in finish(engine, 1, 2)}
    assert failures == {1: f"{hook}: OSError: no such device", 2: None}


def test_jobs_run_in_order_of_submission(engine: CopyEngine) -> None:
    memory = Memory(engine)
    order: list[int] = []
    for number in range(50):
        engine.submit(
            JobId(number), memory.runs((number, 2 * number, 1)), before=lambda number=number: order.append(number)
        )
    results = finish(engine, *range(50))
    assert order == [result.job_id for result in results] == list(range(50))
    assert np.array_equal(memory.destination[:100:2], memory.source[:50])


def test_a_result_is_returned_once(engine: CopyEngine) -> None:
    engine.submit(JobId(1), CopyRuns.empty())
    assert len(finish(engine, 1)) == 1
    assert engine.poll() == []


def test_waiting_for_a_job_that_was_polled_does_not_wait(engine: CopyEngine) -> None:
    engine.submit(JobId(1), CopyRuns.empty())
    finish(engine, 1)
    assert engine.wait([JobId(1)], 0.0)


def test_a_job_id_can_be_reused_after_its_result_was_polled(engine: CopyEngine) -> None:
    engine.submit(JobId(1), CopyRuns.empty())
    with pytest.raises(CopyEngineError, match="job 1"):
        engine.submit(JobId(1), CopyRuns.empty())
    finish(engine, 1)
    assert engine.submit(JobId(1), CopyRuns.empty())


def test_a_closed_engine_takes_no_jobs_but_still_returns_results(engine: CopyEngine) -> None:
    engine.submit(JobId(1), CopyRuns.empty())
    assert engine.wait([JobId(1)], TIMEOUT_S)
    engine.close()
    engine.close()
    with pytest.raises(CopyEngineError, match="after close"):
        engine.submit(JobId(2), CopyRuns.empty())
    assert [result.job_id for result in engine.poll()] == [1]


@pytest.mark.parametrize("make", [CpuCopyEngine, InlineCopyEngine])
def test_seconds_are_measured_with_the_given_clock(make: type[CpuCopyEngine | InlineCopyEngine]) -> None:
    ticks = itertools.count(100.0, 0.5)
    engine = make(clock=lambda: next(ticks))
    engine.submit(JobId(1), CopyRuns.empty())
    [result] = finish(engine, 1)
    engine.close()
    assert result.seconds == 0.5


@pytest.mark.parametrize("make", [CpuCopyEngine, InlineCopyEngine])
def test_a_full_engine_refuses_a_job_without_side_effects(make: type[CpuCopyEngine | InlineCopyEngine]) -> None:
    engine = make(max_queued_jobs=2)
    memory = Memory(engine)
    assert engine.submit(JobId(1), CopyRuns.empty())
    assert engine.submit(JobId(2), CopyRuns.empty())
    assert not engine.submit(JobId(3), memory.runs((0, 0, 8)))
    assert [result.job_id for result in finish(engine, 1, 2, 3)] == [1, 2]
    assert memory.is_untouched()
    assert engine.submit(JobId(3), memory.runs((0, 0, 8)))
    assert failure_of(engine, 3) is None
    engine.close()


def test_an_engine_needs_a_queue() -> None:
    with pytest.raises(ValueError, match="max_queued_jobs: expected a number >= 1"):
        CpuCopyEngine(max_queued_jobs=0)
