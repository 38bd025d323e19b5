"""Idle steps wait a moment for loads of the worker, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import patience
import pytest
from test_worker_seals import SLOTS, Rig

from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable
from hybridkv.connectors.vllm.common.messages import Load, StepPlan, Store
from hybridkv.connectors.vllm.offload import worker
from hybridkv.tiers import Key, Slot
from hybridkv.transfer import CpuCopyEngine
from hybridkv.transfer.jobs import copy_runs

LONG_S = patience.seconds(6.0)
COPY = ChunkCopy(0, b"key", SLOTS[0], 0, 4, (1, 2, 3, 4))
LOADS = (Load("r", CopyTable.of([COPY])),)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Worker that copies on a thread."""
    engine = CpuCopyEngine()
    yield Rig(copy_runs, engine)
    engine.close()


@pytest.fixture
def gate(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds up all loads until it is set."""
    opened = threading.Event()

    def check_after_the_gate(chunks: Sequence[tuple[Key, Slot]]) -> list[None]:
        assert opened.wait(LONG_S), "the gate was not opened"
        return [None] * len(chunks)

    monkeypatch.setattr(rig.arena, "check_all", check_after_the_gate)
    yield opened
    opened.set()


def test_an_idle_step_reports_loads_that_end_soon(
    rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    timer = threading.Timer(0.05, gate.set)
    timer.start()
    rig.worker.start_loads(StepPlan(loads=LOADS, is_idle=True))
    assert rig.worker.results().finished == {"r"}


def test_an_idle_step_waits_only_a_moment(rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.worker.start_loads(StepPlan(loads=LOADS, is_idle=True))
    assert rig.worker.results().finished == set()
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    gate.set()
    rig.worker.start_loads(StepPlan(is_idle=True))
    assert rig.worker.results().finished == {"r"}, "in a later step"


def test_a_step_with_computation_does_not_wait(
    rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait would block: the gate is never opened."""
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    rig.worker.start_loads(StepPlan(is_idle=True))
    rig.worker.start_loads(StepPlan(loads=LOADS))
    assert rig.worker.results().finished == set()


def test_an_idle_step_does_not_wait_for_a_store(
    rig: Rig, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "IDLE_WAIT_S", LONG_S)
    monkeypatch.setattr(rig.arena, "discard", lambda slot: gate.wait(LONG_S))
    rig.worker.start_loads(StepPlan(is_idle=True))
    rig.worker.start_stores(StepPlan(stores=(Store(1, CopyTable.of([COPY])),), is_idle=True))
    rig.worker.results()
    assert rig.worker.outcome() is None
