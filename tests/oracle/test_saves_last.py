"""With a drafter, vLLM takes the results of a step before it calls `wait_for_save`: no wrong byte, no lost request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from oracle.profile import profile
from oracle.rings import LOADS, MIXES
from oracle.scenarios import Scenario, Tally, run, scenarios, with_connector
from oracle.settings import Connector

if TYPE_CHECKING:
    from oracle.mixes import Mix


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def offload(mix: Mix, load: str) -> dict[str, object]:
    tiers = [{"type": "ram", "capacity": "64MiB"}]
    return {"chunk_tokens": mix.alignment_tokens, "tiers": tiers, "load": load}


def saving_last(scenario: Scenario, connector: Connector) -> Scenario:
    used = with_connector(scenario, connector)
    return replace(used, settings=replace(used.settings, saves_last=True))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_offload_never_corrupts_when_saves_come_last(mix: Mix, load: str) -> None:
    tally = Tally()

    @profile(60)
    @given(scenarios(mix, st.booleans(), draws_ahead=True))
    def check(scenario: Scenario) -> None:
        tally.add(run(mix, saving_last(scenario, Connector(CONNECTOR, offload(mix, load)))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_several_stores_never_corrupt_when_saves_come_last(mix: Mix) -> None:
    tally = Tally()
    configs = [offload(mix, load) for load in ("async", "sync")]
    children = [{"kv_connector": CONNECTOR, "kv_connector_extra_config": config} for config in configs]
    connector = Connector(MULTI_CONNECTOR, {"connectors": children, "lookup_timeout_seconds": 0})

    @profile(60)
    @given(scenarios(mix, st.booleans()))
    def check(scenario: Scenario) -> None:
        tally.add(run(mix, saving_last(scenario, connector)))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
