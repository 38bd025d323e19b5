"""Two engines with different content take turns in one directory: neither ever reads a byte of the other.

They differ in a field of the configuration, or in a fact that only a worker knows. The bytes of each are its own, so a
byte of the other is a wrong byte, and a wrong answer.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.common.identity import identification
from hybridkv.connectors.vllm.common.identity.engine import EngineFacts
from hybridkv.connectors.vllm.offload import connector as offload
from oracle.disk_tier import forget, stacked
from oracle.engine import OracleEngine
from oracle.mixes import GEMMA3, GPT_OSS, NAMED, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.rings import but_full
from oracle.runner import CorruptionError, OracleError
from oracle.scenarios import Scenario, Tally, run, scenarios, with_connector
from oracle.settings import EngineSettings

TURNS = (0, 1, 0, 1, 1, 0)
"""Order of the two engines: each finds its own chunks, with the other's beside them."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@contextmanager
def kept_by(difference: str, model: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The number in the engine's configuration while such an engine is built and runs."""
    with monkeypatch.context() as patch:
        if difference == "worker":
            worker_facts = offload.worker_facts
            patch.setattr(offload, "worker_facts", lambda *about: worker_facts(*about) | {"worker.isa": f"isa {model}"})
        yield model


DIFFERENCES = ("configuration", "worker")
PLAYED = but_full(itertools.product(NAMED, DIFFERENCES), (GEMMA3, "configuration"), (QWEN3_NEXT, "worker"))


@pytest.mark.parametrize(("mix", "difference"), PLAYED, ids=lambda value: getattr(value, "name", value))
def test_two_configurations_in_one_directory_never_share_a_byte(
    mix: Mix, difference: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    first, again = Tally(), Tally()

    @profile(6)
    @given(scenarios(mix), st.integers(0, 1 << 32))
    def check(scenario: Scenario, seed: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            chosen = with_connector(scenario, stacked(mix, directory))
            one_wave = Scenario(chosen.settings, chosen.prompts, chosen.waves[:1])
            for turn, model in enumerate(TURNS):
                life = chosen if turn < 2 else one_wave
                with kept_by(difference, model, monkeypatch):
                    engine = run(mix, of_model(life, model, difference), forget(Random(seed + turn)))
                (first if turn < 2 else again).add(engine)

    check()
    record_property("oracle_steps", first.steps + again.steps)
    print(f"{first.steps + again.steps} oracle steps, {again.restored_tokens} tokens restored by later engines")
    assert again.with_restored > again.scenarios // 10, again


def of_model(scenario: Scenario, model: int, difference: str) -> Scenario:
    """The scenario with the content of that model. If the worker makes the difference, the configuration shows none."""
    content = model if difference == "configuration" else -model
    return replace(scenario, settings=replace(scenario.settings, model=content))


def lives(directory: str, difference: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of one prompt that engines of the first, the second and again the first restored."""
    restored = []
    for model in (0, 1, 0):
        settings = EngineSettings(num_blocks=200, retention_tokens=None, connector=stacked(GPT_OSS, directory))
        content = model if difference == "configuration" else -model
        with (
            kept_by(difference, model, monkeypatch),
            OracleEngine(GPT_OSS, replace(settings, model=content)) as engine,
        ):
            engine.submit("prompt", list(range(200)), 2)
            engine.drain()
            restored.append(engine.restored_tokens)
    return restored


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_each_engine_finds_its_own_chunks_and_no_other(
    difference: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = lives(str(tmp_path), difference, monkeypatch)
    assert restored[:2] == [0, 0] and restored[2] > 100


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_an_identity_without_the_difference_is_caught(
    difference: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: bytes of the other engine are noticed."""
    monkeypatch.setattr(identification, "engine_facts", lambda *_: EngineFacts({}, {}))
    monkeypatch.setattr(identification, "merged", lambda *_: {})
    with pytest.raises(CorruptionError) as caught:
        lives(str(tmp_path), difference, monkeypatch)
    assert isinstance(caught.value, OracleError)
