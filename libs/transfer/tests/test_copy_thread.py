"""Behaviour that only an engine with its own thread has. Threads synchronise with events, never by sleeping."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import patience
import pytest
from lazy_device import LazyDevice
from simulated_device import SimulatedDevice

from hybridkv.transfer import CopyResult, CopyRuns, CpuCopyEngine, JobId, StreamCopyEngine
from hybridkv.transfer.cuda import CudaCopyEngine

Engine = CpuCopyEngine | StreamCopyEngine | CudaCopyEngine

TIMEOUT_S = patience.seconds(6.0)


class Gate:
    """A hook that blocks the copy thread until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> str | None:
        self.entered.set()
        return None if self.opened.wait(TIMEOUT_S) else "the gate was never opened"


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture(params=["cpu", "streams", "simulated gpu"])
def engine(gate: Gate, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with its first job, 0, blocked at the gate."""
    makes: dict[str, Callable[[], Engine]] = {
        "cpu": lambda: CpuCopyEngine(max_queued_jobs=4),
        "streams": lambda: StreamCopyEngine(LazyDevice(lambda below: 0), max_queued_jobs=4),
        "simulated gpu": lambda: CudaCopyEngine(SimulatedDevice(), max_queued_jobs=4),
    }
    made = makes[request.param]()
    made.submit(JobId(0), CopyRuns.empty(), before=gate)
    assert gate.entered.wait(TIMEOUT_S)
    yield made
    gate.opened.set()
    made.close()


def failures(results: list[CopyResult]) -> dict[int, str | None]:
    return {result.job_id: result.failure for result in results}


def test_submitting_and_polling_do_not_wait_for_the_copy_thread(engine: Engine) -> None:
    assert engine.submit(JobId(1), CopyRuns.empty())
    assert engine.poll() == []


def test_before_runs_on_the_copy_thread(engine: Engine, gate: Gate) -> None:
    names: list[str] = []
    engine.submit(JobId(1), CopyRuns.empty(), before=lambda: names.append(threading.current_thread().name))
    gate.opened.set()
    assert engine.wait([JobId(1)], TIMEOUT_S)
    assert names == ["hybridkv-copy"]


def test_an_engine_holds_no_reference_to_a_finished_job(engine: Engine, gate: Gate) -> None:
    held, freed = Gate(), threading.Event()
    held.opened.set()
    weakref.finalize(held, freed.set)
    engine.submit(JobId(1), CopyRuns.empty(), before=held, after=held)
    del held
    gate.opened.set()
    assert freed.wait(TIMEOUT_S)


def test_runs_are_created_on_the_copy_thread(engine: Engine, gate: Gate) -> None:
    names: list[str] = []

    def runs() -> CopyRuns:
        names.append(threading.current_thread().name)
        return CopyRuns.empty()

    engine.submit(JobId(1), runs)
    assert names == []
    gate.opened.set()
    assert engine.wait([JobId(1)], TIMEOUT_S)
    assert names == ["hybridkv-copy"]


def test_waiting_ends_at_its_timeout(engine: Engine) -> None:
    assert not engine.wait([JobId(0)], 0.0)


def test_waiting_for_one_job_does_not_wait_for_the_next(engine: Engine, gate: Gate) -> None:
    second = Gate()
    engine.submit(JobId(1), CopyRuns.empty(), before=second)
    gate.opened.set()
    assert engine.wait([JobId(0)], TIMEOUT_S)
    assert failures(engine.poll()) == {0: None}
    second.opened.set()


def test_the_running_job_counts_toward_the_limit(engine: Engine) -> None:
    assert [engine.submit(JobId(number), CopyRuns.empty()) for number in (1, 2, 3, 4)] == [True, True, True, False]


def test_closing_finishes_the_running_job_and_fails_the_queued_ones(engine: Engine, gate: Gate) -> None:
    called: list[int] = []
    engine.submit(JobId(1), CopyRuns.empty(), before=lambda: called.append(1))
    closing = threading.Thread(target=engine.close)
    closing.start()
    with engine._changed:  # close() has set its flag before the gate opens
        assert engine._changed.wait_for(lambda: engine._is_closed, TIMEOUT_S)
    gate.opened.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert failures(engine.poll()) == {0: None, 1: "the copy engine was closed before the job began"}
    assert called == []
    assert engine.wait([JobId(0), JobId(1)], 0.0)


@pytest.mark.parametrize(
    "make",
    [
        CpuCopyEngine,
        lambda: StreamCopyEngine(LazyDevice(lambda below: 0)),
        lambda: CudaCopyEngine(SimulatedDevice()),
    ],
)
def test_closing_stops_every_thread(make: Callable[[], Engine]) -> None:
    before = set(threading.enumerate())
    engine = make()
    engine.close()
    assert set(threading.enumerate()) <= before


def test_a_hook_that_ends_its_thread_ends_only_its_job(engine: Engine, gate: Gate) -> None:
    engine.submit(JobId(1), CopyRuns.empty(), before=sys.exit)
    engine.submit(JobId(2), CopyRuns.empty(), after=sys.exit)
    engine.submit(JobId(3), CopyRuns.empty())
    gate.opened.set()
    assert engine.wait([JobId(1), JobId(2), JobId(3)], TIMEOUT_S)
    assert failures(engine.poll()) == {0: None, 1: "SystemExit: ", 2: "SystemExit: ", 3: None}


def test_memory_may_be_registered_while_a_job_runs(engine: Engine, gate: Gate) -> None:
    source, destination = bytearray(b"abc"), bytearray(3)
    addresses = [np.frombuffer(part, dtype=np.uint8).ctypes.data for part in (source, destination)]
    for address in addresses:
        engine.register(address, 3, "late")
    engine.submit(JobId(1), CopyRuns.of([(addresses[0], addresses[1], 3)]))
    gate.opened.set()
    assert engine.wait([JobId(1)], TIMEOUT_S)
    assert destination == b"abc"


def test_transfer_loads_neither_torch_nor_vllm() -> None:
    program = "import sys, hybridkv.transfer; sys.exit(', '.join({'torch', 'vllm'} & set(sys.modules)) or 0)"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
