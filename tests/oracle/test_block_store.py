"""A correct connector passes: external hits, slow loads, failed loads, aborts in flight, on every mix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.block_store import block_store
from oracle.mixes import Mix
from oracle.profile import profile
from oracle.rings import LOADS, MIXES
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios, with_connector


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_correct_connector_passes(mix: Mix, load: str) -> None:
    tally = Tally()

    @profile(60)
    @given(scenarios(mix, st.booleans()), st.integers(0, 3), st.sampled_from((0, 2, 2)))
    def check(scenario: Scenario, delay_steps: int, fail_every: int) -> None:
        connector = block_store(mix, load, delay_steps, fail_every)
        tally.add(run(mix, with_connector(scenario, connector)))

    check()
    assert tally.with_restored > tally.scenarios // 4, tally
    assert load == "sync" or tally.with_failed_loads > 0, tally


@pytest.mark.parametrize("load", LOADS)
def test_a_correct_connector_passes_on_random_mixes(load: str) -> None:
    tally = Tally()

    @profile(120)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        # It stores what the engine hands over as it is.
        mix = data.draw(mixes().filter(lambda mix: not mix.misleads))
        scenario = data.draw(scenarios(mix, st.booleans()))
        connector = block_store(mix, load, data.draw(st.integers(0, 3)), data.draw(st.sampled_from((0, 0, 3))))
        tally.add(run(mix, with_connector(scenario, connector)))

    check()
    assert tally.with_restored > tally.scenarios // 5, tally
