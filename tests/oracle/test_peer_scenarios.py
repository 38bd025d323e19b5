"""Two engines under everything that users, proxies, networks and operators do: no wrong byte, no leak, no request lost.

Transports fail, are late, lose, stop halfway, lie and vanish; connections end or carry nothing; leases run out and
their blocks hold something else; engines are killed and come back at the same address; either side gives up.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import register
from oracle.mixes import Mix
from oracle.peer_mixes import (
    EQUAL_RANKS,
    ONE_SIZE,
    REFUSED,
    UNEQUAL_BLOCKS,
    UNEQUAL_LAYOUTS,
    UNEQUAL_RANKS,
    Sides,
    alike,
    random_sides,
)
from oracle.peer_runs import PeerTally, play
from oracle.peer_scenarios import PeerScenario, peer_scenarios
from oracle.profile import profile


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def played(sides: st.SearchStrategy[Sides], num_scenarios: int) -> None:
    tally = PeerTally()

    @profile(num_scenarios)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        chosen = data.draw(sides)
        tally.add(play(chosen, data.draw(peer_scenarios(chosen))))

    check()
    print(tally)
    assert tally.with_restored > tally.scenarios // 2, tally
    assert tally.with_failures >= tally.scenarios // 10, tally
    assert tally.calm > 0 and tally.with_local_hits > 0, tally


@pytest.mark.parametrize("mix", ONE_SIZE, ids=lambda mix: mix.name)
def test_engines_with_equal_blocks_never_take_a_wrong_byte(mix: Mix) -> None:
    played(st.just(alike(mix)), 25)


def test_engines_with_unequal_blocks_never_take_a_wrong_byte() -> None:
    played(st.sampled_from(UNEQUAL_BLOCKS), 50)


def test_engines_with_bytes_in_other_orders_never_take_a_wrong_byte() -> None:
    played(st.sampled_from(UNEQUAL_LAYOUTS), 25)


def test_engines_with_several_ranks_never_take_a_wrong_byte() -> None:
    played(st.sampled_from(EQUAL_RANKS + UNEQUAL_RANKS), 40)


def test_engines_of_any_groups_never_take_a_wrong_byte() -> None:
    played(random_sides(), 40)


@pytest.mark.parametrize("sides", REFUSED, ids=lambda sides: sides.name)
def test_engines_that_do_not_fit_say_why_and_compute(sides: Sides) -> None:
    refusals: list[str] = []

    @profile(3)
    @given(peer_scenarios(sides))
    def check(scenario: PeerScenario) -> None:
        ended = play(sides, scenario)
        refusals.extend(words for words in ended.simulation.details if sides.refused in words)

    check()
    assert refusals
