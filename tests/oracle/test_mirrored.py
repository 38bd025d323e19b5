"""A mirror between the fake runner and the KV tensors changes no outcome. Here both are CPU memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, register
from oracle.mirrored import Mirror, MirroredEngine
from oracle.mixes import GEMMA3, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.runner import CorruptionError
from oracle.scenarios import Scenario, Tally, run_on, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def offload(mix: Mix) -> Connector:
    tiers = [{"type": "ram", "capacity": "16MiB"}]
    return Connector(CONNECTOR, {"chunk_tokens": mix.alignment_tokens, "tiers": tiers, "load": "async"})


@pytest.mark.parametrize("mix", [GEMMA3, QWEN3_NEXT], ids=lambda mix: mix.name)
def test_a_mirror_changes_no_outcome(mix: Mix) -> None:
    tally = Tally()

    @profile(16)
    @given(scenarios(mix, st.booleans()))
    def check(scenario: Scenario) -> None:
        with_ours = with_connector(scenario, offload(mix))
        engine = MirroredEngine(mix, with_ours.settings)
        run_on(engine, with_ours)
        tally.add(engine)

    check()
    assert tally.with_restored > tally.scenarios // 5, tally


def test_a_mirror_that_is_not_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So loaded content reaches the fake runner only through the device's tensors."""
    read: Callable[[Mirror], None] = Mirror.read
    engine = MirroredEngine(GEMMA3, EngineSettings(num_blocks=200, max_step_tokens=16, connector=offload(GEMMA3)))
    with engine:
        engine.submit("cold", list(range(100)), 2)
        engine.drain()
        engine.reset_prefix_cache()
        monkeypatch.setattr(Mirror, "read", lambda mirror: None)
        engine.submit("warm", list(range(100)), 2)
        with pytest.raises(CorruptionError):
            engine.drain()
        monkeypatch.setattr(Mirror, "read", read)
        engine.abort("warm")
