"""A step that computes nothing waits a moment for the loads of its worker, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import patience
import pytest
from test_worker_seals import SLOTS, Rig

from hybridkv.connectors.vllm.common.messages import ChunkCopy, CopyTable, Load, StepPlan, Store
from hybridkv.connectors.vllm.offload import worker
from hybridkv.tiers import Key, Slot
from hybridkv.transfer import CpuCopyEngine
from hybridkv.transfer.jobs import copy_runs

LONG_S = patience.seconds(6.0)
COPY = ChunkCopy(0, b"key", SLOTS[0], 0, 4, (1, 2, 3, 4))
LOADS = (Load("r", CopyTable.of([COPY])),)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """One that copies on a thread."""
    engine = CpuCopyEngine()
    yield Rig(copy_runs, engine)
    engine.close()


@pytest.fixture
def gate(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No load goes on before it is set."""
    opened = threading.Event()

    def check_behind_the_gate(chunks: Sequence[tuple[Key, Slot]]) -> list[None]:
        assert opened.wait(LONG_S), "the gate stayed shut"
        return [None] * len(chunks)

    monkeypatch.setattr(rig.arena, "check_all", check_behind_the_gate)
    yield opened
    opened.set()


def test_it_has_its_loads_when_it_ends(rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    rig.worker.start_loads(StepPlan(loads=LOADS, is_idle=True))
    assert rig.worker.results().finished == {"r"}


def test_it_waits_no_longer_than_a_moment(rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.worker.start_loads(StepPlan(loads=LOADS, is_idle=True))
    assert rig.worker.results().finished == set()
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    gate.set()
    rig.worker.start_loads(StepPlan(is_idle=True))
    assert rig.worker.results().finished == {"r"}, "in a later one"


def test_a_step_that_computes_does_not_wait(rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would stand still: nobody opens the gate."""
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    rig.worker.start_loads(StepPlan(is_idle=True))
    rig.worker.start_loads(StepPlan(loads=LOADS))
    assert rig.worker.results().finished == set()


def test_nobody_waits_for_a_store(rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    monkeypatch.setattr(rig.arena, "discard", lambda slot: gate.wait(LONG_S))
    rig.worker.start_loads(StepPlan(is_idle=True))
    rig.worker.start_stores(StepPlan(stores=(Store(1, CopyTable.of([COPY])),), is_idle=True))
    rig.worker.results()
    assert rig.worker.outcome() is None
