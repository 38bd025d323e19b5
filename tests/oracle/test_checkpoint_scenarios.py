"""Prefill stops, states of answers and their resumes: no wrong byte, no lost request, no leaked block."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.offload.checkpoints import AnswerStates
from hybridkv.planner import State
from oracle.engine import OracleEngine
from oracle.known_stops import STEPS, allow_all_stops
from oracle.mixes import QWEN3_NEXT, Kind, Mix
from oracle.mutants import answers_states, one_block_late, one_token_late, stops_one_block_off
from oracle.profile import profile
from oracle.rings import LOADS
from oracle.runner import CorruptionError
from oracle.scenarios import Tally, mixes, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    pass

UNIT = QWEN3_NEXT.alignment_tokens


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@pytest.fixture(autouse=True)
def _short_prompts_may_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is a large part of the cost of a prompt of this size."""
    allow_all_stops(monkeypatch)


def offload(chunk_tokens: int, capacity: int | str = "64MiB", **keys: Any) -> Connector:
    tiers = [{"type": "ram", "capacity": capacity}]
    return Connector(CONNECTOR, {"chunk_tokens": chunk_tokens, "tiers": tiers, **STEPS, **keys})


def several(*children: Connector) -> Connector:
    entries = [{"kv_connector": each.name, "kv_connector_extra_config": each.extra_config} for each in children]
    return Connector(MULTI_CONNECTOR, {"connectors": entries, "lookup_timeout_seconds": 0})


with_states = mixes((Kind.RECURRENT, Kind.FULL, Kind.WINDOW)).filter(
    lambda mix: mix.has_recurrent and any(group.kind is Kind.FULL for group in mix.groups)
)


@dataclass
class Placed:
    """Stops and answer states, counted over all scenarios of a test."""

    stops: int = 0
    answers: int = 0


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placed:
    counts = Placed()
    set_prefill_stop, states = compat.set_prefill_stop, AnswerStates.states

    def keeping(request: Any, num_tokens: int) -> None:
        # The engine's own boundary is in the answer if a preempted request computes its answer again.
        assert 0 < num_tokens <= max(request.num_prompt_tokens, request.num_tokens - 1)
        counts.stops += 1
        set_prefill_stop(request, num_tokens)

    def reading(answers: AnswerStates, *arguments: Any) -> list[State]:
        found = states(answers, *arguments)
        counts.answers += bool(found)
        return found

    monkeypatch.setattr(compat, "set_prefill_stop", keeping)
    monkeypatch.setattr(AnswerStates, "states", reading)
    return counts


@pytest.mark.parametrize("load", LOADS)
def test_prefills_with_stops_never_corrupt(load: str, placed: Placed) -> None:
    tally = Tally()

    @profile(160)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(with_states)
        scenario = data.draw(scenarios(mix, draws_ahead=True))
        chunk_tokens = data.draw(st.sampled_from((1, 2))) * mix.alignment_tokens
        tally.add(run(mix, with_connector(scenario, offload(chunk_tokens, load=load))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
    assert placed.stops > tally.scenarios // 8 and placed.answers > tally.scenarios // 8, placed


def test_prefills_with_stops_for_two_stores_never_corrupt(placed: Placed) -> None:
    tally = Tally()

    @profile(80)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(with_states)
        scenario = data.draw(scenarios(mix, draws_ahead=True))
        unit = mix.alignment_tokens
        small = 4 * 4096 * (len(mix.groups) + 1)
        children = [offload(unit, small), offload(2 * unit)]
        tally.add(run(mix, with_connector(scenario, several(*data.draw(st.permutations(children))))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
    assert placed.stops > 0 and placed.answers > 0, placed


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation: new tokens, and tokens of the answer."""

    fresh: int
    outputs: int


@dataclass(frozen=True)
class Conversations:
    """Several conversations with a common beginning, a turn of each in every wave."""

    shared: int
    turns: tuple[tuple[Turn, ...], ...]
    spare_blocks: int
    step_tokens: int
    plans_ahead: bool
    reset_running_at: int | None
    flips: int | None


conversations = st.builds(
    Conversations,
    shared=st.integers(0, 3 * UNIT),
    turns=st.lists(
        st.lists(st.builds(Turn, st.integers(1, UNIT), st.integers(1, 2 * UNIT + 3)), min_size=3, max_size=3).map(
            tuple
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    spare_blocks=st.sampled_from((2, 20, 200)),
    step_tokens=st.sampled_from((UNIT, 4 * UNIT, 16 * UNIT)),
    plans_ahead=st.booleans(),
    reset_running_at=st.sampled_from((None, None, 3, 9)),
    flips=st.none() | st.integers(0, 1 << 32),
)


def play(drawn: Conversations, connector: Connector, mix: Mix = QWEN3_NEXT) -> OracleEngine:
    stem = list(range(drawn.shared))
    said = [[*stem, number] for number in range(len(drawn.turns))]
    longest = max(drawn.shared + 1 + sum(turn.fresh + turn.outputs for turn in turns) for turns in drawn.turns)
    settings = EngineSettings(
        num_blocks=mix.max_blocks(longest, drawn.step_tokens) + 1 + drawn.spare_blocks,
        max_step_tokens=drawn.step_tokens,
        connector=connector,
        async_scheduling=drawn.plans_ahead,
    )
    damage = None if drawn.flips is None else Random(drawn.flips)
    with OracleEngine(mix, settings, None if damage is None else lambda engine, _: flip(engine, damage)) as engine:
        for wave in range(len(drawn.turns[0])):
            engine.reset_prefix_cache()
            for number, turns in enumerate(drawn.turns):
                said[number] += [Random(wave * 7 + number).randrange(1000) for _ in range(turns[wave].fresh)]
                engine.submit(f"turn-{number}-{wave}", said[number], turns[wave].outputs)
            for step in range(12):
                if step == drawn.reset_running_at:
                    engine.preempt_all()
                engine.step()
            engine.drain()
            engine.check_idle()
            for number in range(len(drawn.turns)):
                said[number] += engine.outputs(f"turn-{number}-{wave}")
    return engine


def flip(engine: OracleEngine, random: Random) -> None:
    """Corrupts one chunk of the tier now and then, while nothing is being copied."""
    worker = engine.worker_connector._worker  # type: ignore[union-attr]
    sealed = sorted(worker._arena._seals)
    if sealed and not worker._copies._open and random.random() < 0.7:
        worker._arena._buffer[random.choice(sealed)] ^= 1 << random.randrange(8)


@pytest.mark.parametrize("chunk_tokens", [UNIT, 2 * UNIT])
def test_conversations_never_corrupt(chunk_tokens: int, placed: Placed) -> None:
    tally = Tally()

    @profile(80)
    @given(conversations)
    def check(drawn: Conversations) -> None:
        tally.add(play(drawn, offload(chunk_tokens)))

    check()
    assert tally.with_restored > tally.scenarios // 3, tally
    assert tally.with_preemptions and tally.with_failed_loads, tally
    assert placed.answers > tally.scenarios // 2, placed


# States that are offered wrongly on purpose. The oracle must find each, or it proves nothing.


@pytest.mark.parametrize("wrong", [one_token_late, one_block_late, answers_states])
def test_a_misplaced_state_of_an_answer_is_caught(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerStates, "states", wrong)
    settings = EngineSettings(num_blocks=200, max_step_tokens=64, connector=offload(UNIT))
    with OracleEngine(QWEN3_NEXT, settings) as engine:
        said = list(range(3 * UNIT + 3))
        engine.submit("first", said, 2 * UNIT)
        engine.drain()
        engine.reset_prefix_cache()
        said += engine.outputs("first")
        engine.submit("second", said, 2)
        if wrong is answers_states:
            engine.drain()
            assert engine.restored_tokens == 5 * UNIT
        else:
            with pytest.raises(CorruptionError):
                engine.drain()


@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
def test_a_state_of_a_stop_stored_one_block_off_is_caught(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_wrong:
        stops_one_block_off(monkeypatch)
    settings = EngineSettings(num_blocks=200, max_step_tokens=256, connector=offload(UNIT))
    stem = list(range(4 * UNIT))
    caught = pytest.raises(CorruptionError) if is_wrong else nullcontext()
    with OracleEngine(QWEN3_NEXT, settings) as engine, caught:
        for number in range(3):
            engine.reset_prefix_cache()
            engine.submit(f"sibling-{number}", [*stem, *[number + 1] * 4 * UNIT], 1)
            engine.drain()
        assert engine.restored_tokens > 0
