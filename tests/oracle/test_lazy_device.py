"""No wrong byte is read with vLLM's own copies on a GPU, in any order of compute and copies."""

from __future__ import annotations

import time
from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING
from unittest import mock

import patience
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lazy_device import LazyDevice, LoadsWithoutFence, StoresWithoutFence, WithoutCompletion
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from hybridkv.connectors.vllm import CONNECTOR, register
from oracle.lazy import LazyEngine
from oracle.mixes import GEMMA3, NAMED, Mix
from oracle.profile import factor, profile
from oracle.runner import CorruptionError, OracleError
from oracle.scenarios import Scenario, Tally, mixes, run_on, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def offload(load: str, chunk_tokens: int, capacity: int | str = "16MiB") -> Connector:
    tiers = [{"type": "ram", "capacity": capacity}]
    return Connector(CONNECTOR, {"chunk_tokens": chunk_tokens, "tiers": tiers, "load": load})


WITHOUT_PROOF = mock.patch("hybridkv.connectors.vllm.offload.worker.prove_copies_at_start", return_value=None)


def run(mix: Mix, scenario: Scenario, seed: int, *, is_first: bool) -> LazyEngine:
    """The first engine of a test proves its copies, which takes twice as long as a scenario. In the full run all
    engines do."""
    with nullcontext() if is_first or factor() >= 1 else WITHOUT_PROOF:
        engine = LazyEngine(mix, scenario.settings, LazyDevice(Random(seed).randrange))
    run_on(engine, scenario)
    return engine


SEEDS = st.integers(0, 1 << 32)


@st.composite
def connectors(draw: st.DrawFn, mix: Mix) -> Connector:
    """Stores with every kind of load. In a small one slots are reused as soon as their copies have ended."""
    capacity = draw(st.sampled_from(("16MiB", "16MiB", 2 * 4096 * (len(mix.groups) + 1))))
    return offload(draw(st.sampled_from(("async", "async", "sync"))), mix.alignment_tokens, capacity)


@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_offload_never_corrupts(mix: Mix) -> None:
    tally = Tally()

    @profile(24)
    @given(scenarios(mix, st.booleans(), draws_ahead=True), connectors(mix), SEEDS)
    def check(scenario: Scenario, connector: Connector, seed: int) -> None:
        tally.add(run(mix, with_connector(scenario, connector), seed, is_first=not tally.scenarios))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally


def test_offload_never_corrupts_random_mixes() -> None:
    tally = Tally()

    @profile(40)
    @given(st.data(), SEEDS)
    def check(data: st.DataObject, seed: int) -> None:
        mix = data.draw(mixes().filter(lambda mix: not mix.misleads))
        scenario = data.draw(scenarios(mix, st.booleans(), draws_ahead=True))
        chosen = with_connector(scenario, data.draw(connectors(mix)))
        tally.add(run(mix, chosen, seed, is_first=not tally.scenarios))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally


def copies_first(below: int) -> int:
    return below - 1


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: StoresWithoutFence(copies_first, is_late=True),
        lambda seed: LoadsWithoutFence(copies_first, is_late=True),
        # Nothing waits for copies, so some must happen by themselves.
        lambda seed: WithoutCompletion(Random(seed).randrange),
    ],
    ids=["stores without a fence", "loads without a fence", "results before copies"],
)
def test_a_device_that_ignores_a_fence_is_caught(
    make: Callable[[int], LazyDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the proof at the start, which would refuse it."""
    monkeypatch.setattr("hybridkv.connectors.vllm.offload.worker.prove_copies_at_start", lambda *arguments: None)
    # The order depends on threads, so that one seed may miss it.
    assert any(misses_bytes(make(seed)) for seed in range(20))


def test_a_device_that_respects_fences_serves_the_same_requests() -> None:
    assert not misses_bytes(LazyDevice(copies_first, is_late=True))


@pytest.mark.parametrize("is_load", [False, True], ids=["store", "load"])
def test_sleep_waits_for_copies(is_load: bool) -> None:
    """vLLM unmaps the KV memory after a pause: it steps while the scheduler has requests, then resets both caches.

    An engine in the caller's process does not step first. There the reset fails while a copy holds blocks, and so does
    `sleep`.
    """
    device = LazyDevice(copies_first, is_driven=True)  # nothing happens by itself
    settings = EngineSettings(num_blocks=200, max_step_tokens=16, connector=offload("async", 8))

    def advance_until(is_over: Callable[[], bool]) -> None:
        while not is_over():
            device.drain()
            engine.step()

    def copies_are_pending() -> bool:
        return any(stream.steps for stream in device.streams if stream is not device.compute)

    with WITHOUT_PROOF, LazyEngine(GEMMA3, settings, device) as engine:
        scheduler = engine.scheduler
        engine.submit("cold", list(range(100)), 2)
        if is_load:
            advance_until(lambda: engine.is_idle)
            engine.reset_prefix_cache()
            engine.submit("warm", list(range(100)), 2)
        until_s = time.monotonic() + patience.seconds(1.0)
        while not copies_are_pending() and time.monotonic() < until_s:
            engine.step()
        # EngineCore.sleep does this first.
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for _ in range(3):
            assert scheduler.has_requests()
            engine.step()
        assert copies_are_pending()
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        advance_until(lambda: not scheduler.has_requests())
        assert not copies_are_pending()
        assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def misses_bytes(device: LazyDevice) -> bool:
    """Whether a forward pass reads wrong bytes."""
    settings = EngineSettings(num_blocks=200, max_step_tokens=16, connector=offload("async", 8))
    engine = LazyEngine(GEMMA3, settings, device)
    try:
        with engine:
            for name in ("cold", "warm", "again"):
                engine.submit(name, list(range(100)), 2)
                engine.drain()
                if name == "cold":
                    device.drain()  # so that the stored chunks are whole
                engine.reset_prefix_cache()
            device.drain()
            device.raise_failures()
    except CorruptionError:
        return True
    except OracleError:
        return False  # copies remain that nothing waited for
    assert engine.restored_tokens > 0
    return False
