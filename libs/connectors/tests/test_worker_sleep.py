"""Sleep mode: no copy uses the KV memory from just before the engine sleeps until it wakes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import patience
import pytest
from test_worker_seals import SLOTS, Rig

from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.connectors.vllm.common.messages import Load, StepPlan, Store
from hybridkv.transfer import CpuCopyEngine
from hybridkv.transfer.jobs import copy_runs

LONG_S = patience.seconds(6.0)
COPY = ChunkCopy(0, b"key", SLOTS[0], 0, 4, (1, 2, 3, 4))
STORES = StepPlan(stores=(Store(1, CopyTable.of([COPY])),))
LOADS = StepPlan(loads=(Load("r", CopyTable.of([COPY])),))


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Worker that copies on a thread. Its clock stands still, so that only waits time out."""
    engine = CpuCopyEngine()
    yield Rig(copy_runs, engine)
    engine.close()


@pytest.fixture
def gate(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds up all stores until it is set."""
    opened = threading.Event()
    monkeypatch.setattr(rig.arena, "discard", lambda slot: opened.wait(LONG_S))
    yield opened
    opened.set()


def test_suspend_waits_for_copies_in_flight_and_reports_them_later(rig: Rig, gate: threading.Event) -> None:
    rig.worker.start_stores(STORES)
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    assert rig.worker.suspend(LONG_S)
    rig.memory[:] = 0  # as if it were unmapped
    rig.worker.results()
    outcome = rig.worker.outcome()
    assert outcome is not None
    assert outcome.stores[1].failure is None
    rig.worker.resume()
    rig.worker.start_loads(LOADS)
    assert rig.worker.suspend(LONG_S)
    results = rig.worker.results()
    assert (results.finished, results.failed) == ({"r"}, set())
    assert rig.memory.any(), "the content from before the sleep is back"


def test_a_copy_that_does_not_end_makes_suspend_fail(rig: Rig, gate: threading.Event) -> None:
    rig.worker.start_stores(STORES)
    assert not rig.worker.suspend(0.01)
    gate.set()
    assert rig.worker.suspend(LONG_S)


def test_nothing_is_copied_while_the_engine_sleeps() -> None:
    rig = Rig(copy_runs)
    rig.store(SLOTS[0])
    assert rig.worker.suspend(LONG_S)
    before = rig.memory.copy()
    rig.worker.start_loads(LOADS)
    rig.worker.start_stores(STORES)
    results, outcome = rig.worker.results(), rig.worker.outcome()
    assert results.finished == results.failed == {"r"}
    assert outcome is not None
    assert outcome.load_failures["r"][0].reason == outcome.stores[1].reason == "busy"
    assert (rig.memory == before).all()


def test_suspend_and_resume_can_be_repeated() -> None:
    rig = Rig(copy_runs)
    rig.worker.resume()
    for _ in range(2):
        assert rig.worker.suspend(LONG_S)
    for _ in range(2):
        rig.worker.resume()
    [copy] = rig.store(SLOTS[0])
    assert rig.load(copy) is None


def test_a_measured_step_is_reported_before_its_stores_start(rig: Rig) -> None:
    """With a drafter the outcome of a step is taken before `wait_for_save`."""
    plan = StepPlan(measured_step=7)
    rig.worker.start_loads(plan)
    rig.worker.results()
    outcome = rig.worker.outcome()
    assert outcome is not None
    assert outcome.measured_step == 7
    rig.worker.start_stores(plan)
    assert rig.worker.outcome() is None
