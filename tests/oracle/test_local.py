"""The model of the engine is right: without a connector, vLLM's own prefix caching passes, on any mix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.mixes import Mix
from oracle.profile import profile
from oracle.rings import MIXES
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_local_prefix_caching_never_reads_wrong_bytes(mix: Mix) -> None:
    tally = Tally()

    @profile(80, whole=True)
    @given(scenarios(mix, st.booleans()))
    def check(scenario: Scenario) -> None:
        tally.add(run(mix, scenario))

    check()
    assert tally.with_local_hits > tally.scenarios // 10, tally
    assert tally.with_preemptions > 0, tally


def test_local_prefix_caching_never_reads_wrong_bytes_on_random_mixes() -> None:
    tally = Tally()

    @profile(200)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(mixes())
        tally.add(run(mix, data.draw(scenarios(mix, st.booleans()))))

    check()
    assert tally.with_local_hits > tally.scenarios // 10, tally
