"""Two engines with hostile users, proxies, networks and operators: no wrong byte, no leak, no lost request.

Transports fail, are late, lose, stop halfway, corrupt and vanish; connections end or carry nothing; leases expire and
their blocks get other content; engines are killed and return at the same address; either side aborts.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import PEER_CONNECTOR, register
from hybridkv.connectors.vllm.common.blocks.load_room import LoadRoom
from hybridkv.connectors.vllm.nixl import consumer
from hybridkv.planner.admission import Verdict
from kits.peers.faults import FaultPlan
from oracle import peer_runs
from oracle.engine import StuckError
from oracle.mixes import DEEPSEEK_V4, GEMMA3, HEADS_BEFORE_LAYERS, QWEN3_NEXT, Mix
from oracle.peer_mixes import (
    CUT_WINDOWS,
    EQUAL_RANKS,
    ONE_SIZE,
    REFUSED,
    UNEQUAL_BLOCKS,
    UNEQUAL_LAYOUTS,
    UNEQUAL_RANKS,
    Sides,
    alike,
    random_sides,
    with_blocks,
)
from oracle.peer_runs import PeerTally, play
from oracle.peer_scenarios import PeerScenario, Talk, Trouble, Turn, What, peer_scenarios
from oracle.profile import profile
from oracle.rings import but_full
from oracle.scenarios import Prompt
from oracle.settings import Connector, EngineSettings


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def run_scenarios(sides: st.SearchStrategy[Sides], num_scenarios: int) -> None:
    tally = PeerTally()

    @profile(num_scenarios)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        chosen = data.draw(sides)
        tally.add(play(chosen, data.draw(peer_scenarios(chosen))))

    check()
    print(tally)
    assert tally.with_restored > tally.scenarios // 2, tally
    assert tally.with_failures > 0, tally
    assert tally.calm > 0 and tally.with_local_hits > 0, tally


# The tests below use all of them with unequal blocks, other layouts or several ranks.
ALIKE = but_full(ONE_SIZE, QWEN3_NEXT, GEMMA3, DEEPSEEK_V4, HEADS_BEFORE_LAYERS)


@pytest.mark.parametrize("mix", ALIKE, ids=lambda mix: mix.name)
def test_engines_with_equal_blocks_never_read_a_wrong_byte(mix: Mix) -> None:
    run_scenarios(st.just(alike(mix)), 25)


def test_engines_with_unequal_blocks_never_read_a_wrong_byte() -> None:
    run_scenarios(st.sampled_from(UNEQUAL_BLOCKS), 50)


def test_engines_with_different_layouts_never_read_a_wrong_byte() -> None:
    run_scenarios(st.sampled_from(UNEQUAL_LAYOUTS), 25)


def test_engines_with_several_ranks_never_read_a_wrong_byte() -> None:
    run_scenarios(st.sampled_from(EQUAL_RANKS + UNEQUAL_RANKS), 40)


def test_engines_with_any_groups_never_read_a_wrong_byte() -> None:
    run_scenarios(random_sides(), 40)


@pytest.mark.parametrize("sides", REFUSED, ids=lambda sides: sides.name)
def test_incompatible_engines_name_the_reason_and_compute(sides: Sides) -> None:
    refusals: list[str] = []

    @profile(3)
    @given(peer_scenarios(sides))
    def check(scenario: PeerScenario) -> None:
        ended = play(sides, scenario)
        refusals.extend(words for words in ended.simulation.details if sides.refused in words)

    check()
    assert refusals


def ignore_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadRoom, "verdict", lambda *_: Verdict.ADMIT)


def ignore_room_and_blocks(patch: pytest.MonkeyPatch) -> None:
    ignore_room(patch)
    patch.setattr(consumer, "require_blocks", lambda *_: None)
    patch.setattr(peer_runs, "ALWAYS_WRONG", peer_runs.ALWAYS_WRONG - {"pairing"})


def test_a_request_with_a_failed_load_does_not_block_a_loaded_one() -> None:
    """The pool holds one whole prompt, or one and the part from which another resumes. The engine asks first for the
    request that failed, which does not fit: it must not be the only one that the engine asks for, since nothing else
    would ever be freed."""
    sides = Sides((CUT_WINDOWS, with_blocks(CUT_WINDOWS, 2)))
    options = {"weights_digest": "oracle", "lease_seconds": 6.0, "load_timeout_seconds": 40.0}
    settings = tuple(
        EngineSettings(
            num_blocks=num_blocks,
            max_running=1,
            max_step_tokens=step_tokens,
            retention_tokens=retention_tokens,
            connector=Connector(PEER_CONNECTOR, {**options, "max_leases": 2}, role=role),
        )
        for num_blocks, step_tokens, retention_tokens, role in (
            (24, 256, 16, "kv_producer"),
            (15, 64, 0, "kv_consumer"),
        )
    )
    talks = (
        Talk(0, 0, (Turn(0, 0, 0, 4), Turn(1, 0, 0, 1))),
        # The third block of the second turn begins before the blocks that the producer's engine has kept.
        Talk(0, 0, (Turn(0, 0, 3, 2), Turn(8, 0, 0, 1), Turn(1, 0, 0, 3))),
        Talk(0, 3, (Turn(0, 0, 30, 1, abort_source_after=0),)),
    )
    troubles = (Trouble(1, What.JUMP, seconds=12.0), Trouble(12, What.JUMP, seconds=1.0))
    prompts = (Prompt(0, 0, 64), Prompt(0, 64, 43), Prompt(0, 64, 13), Prompt(1, 107, 23))
    scenario = PeerScenario((settings[0], settings[1]), prompts, talks, troubles, FaultPlan(), seed=2)
    # The checks for room beside other loads and for the producer's blocks would prevent the loads.
    ended = play(sides, scenario, ignore_room_and_blocks)
    assert ended.simulation.failures["pairing"] > 0
    assert ended.simulation.outcomes["prompt loaded"] > 0
    ended = play(sides, scenario)
    assert ended.simulation.outcomes["prompt refused"] > 0 and not ended.simulation.failures


def test_two_loads_that_each_need_more_than_is_left_do_not_deadlock() -> None:
    """The pool of the second engine holds the parts from which two prompts resume, and not one block more for
    either."""
    mix = DEEPSEEK_V4
    settings = [
        EngineSettings(
            num_blocks=num_blocks,
            max_running=3,
            max_step_tokens=step_tokens,
            retention_tokens=0,
            seed=seed,
            runner=runner,
            connector=Connector(
                PEER_CONNECTOR,
                {
                    "weights_digest": "oracle",
                    "verify": False,
                    "lease_seconds": 6.0,
                    "load_timeout_seconds": 40.0,
                    "connect_timeout_seconds": 2.0,
                    "max_leases": 64,
                    "listen": {"host": "127.0.0.1", "port": port},
                },
                role="kv_both",
            ),
        )
        for num_blocks, step_tokens, seed, runner, port in ((150, 64, 0, "v2", 30000), (68, 24, 1, "v1", 30100))
    ]
    talks = (
        Talk(2, 6, (Turn(0, 1, 1, 3), Turn(6, 0, 3, 11))),
        Talk(2, 12, (Turn(0, 0, 3, 1), Turn(20, 1, 1, 10))),
        Talk(0, 10, (Turn(0, 0, 0, 8),)),
        Talk(0, 2, (Turn(0, 1, 30, 1), Turn(1, 0, 0, 3))),
    )
    prompts = (Prompt(0, 0, 448), Prompt(0, 111, 31), Prompt(0, 385, 32))
    scenario = PeerScenario((settings[0], settings[1]), prompts, talks, (), FaultPlan(), seed=4_294_967_295)
    ended = play(alike(mix), scenario)
    assert ended.simulation.outcomes["prompt loaded"] > 2
    with pytest.raises(StuckError):
        play(alike(mix), scenario, ignore_room)
