"""HybridOffloadConnector never lets the engine read a wrong byte, loses no request and keeps no block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.mixes import NAMED, Mix
from oracle.profile import profile
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios, with_connector
from oracle.settings import Connector

pytest.importorskip("hybridkv.connectors.vllm.offload", reason="the offload connector is not in this build")


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    from hybridkv.connectors.vllm import register

    register()


def offload(load: str, chunk_tokens: int | str) -> Connector:
    tiers = [{"type": "ram", "capacity": "64MiB"}]
    return Connector("HybridOffloadConnector", {"chunk_tokens": chunk_tokens, "tiers": tiers, "load": load})


def _chunk_tokens(mix: Mix) -> st.SearchStrategy[int | str]:
    return st.sampled_from(("auto", mix.alignment_tokens, 2 * mix.alignment_tokens))


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_offload_never_corrupts(mix: Mix, load: str) -> None:
    tally = Tally()

    @profile(80)
    @given(scenarios(mix, st.booleans()), _chunk_tokens(mix))
    def check(scenario: Scenario, chunk_tokens: int | str) -> None:
        tally.add(run(mix, with_connector(scenario, offload(load, chunk_tokens))))

    check()
    assert tally.with_restored > tally.scenarios // 5, tally


@pytest.mark.parametrize("load", ["async", "sync"])
def test_offload_never_corrupts_random_mixes(load: str) -> None:
    tally = Tally()

    @profile(150)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(mixes())
        scenario = data.draw(scenarios(mix, st.booleans()))
        tally.add(run(mix, with_connector(scenario, offload(load, data.draw(_chunk_tokens(mix))))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
