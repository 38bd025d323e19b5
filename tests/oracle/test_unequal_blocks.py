"""Recurrent states beside groups of smaller blocks, where vLLM 0.32 cuts prefill inside a recurrent block.

It then keeps and hands over states under boundaries at which they are not (vllm-project/vllm#54076). The first prompts
of each scenario come together. Then each comes alone, and the engine has forgotten its cache, so every wrong byte that
is read came from the connector.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, PEER_CONNECTOR, compat, register, wrong_blocks
from hybridkv.connectors.vllm.wrong_blocks import WrongBlocks
from oracle.content import VOCABULARY_TOKENS
from oracle.engine import OracleEngine
from oracle.mixes import QWEN3_NEXT, Group, Kind, Layers, Mix
from oracle.pairs import Pair, tokens
from oracle.profile import profile
from oracle.runner import CorruptionError
from oracle.scenarios import Scenario, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 32


def unequal(window_tokens: int) -> Mix:
    """Blocks of 32 tokens, and of so many in a WINDOW group. All pages have 512 bytes."""
    return Mix(
        f"blocks_of_{BLOCK}_and_{window_tokens}",
        (
            Group(Kind.RECURRENT, BLOCK, (Layers(1, cell_bytes=392),), page_bytes=512),
            Group(Kind.FULL, BLOCK, (Layers(1, cell_bytes=16),)),
            Group(Kind.WINDOW, window_tokens, (Layers(1, heads=BLOCK // window_tokens),), reach_tokens=20),
        ),
    )


EXTRA: dict[str, Any] = {"chunk_tokens": "auto", "tiers": [{"type": "ram", "capacity": "64MiB"}]}
MIXES = (unequal(16), unequal(4))
WITHOUT_WINDOW = Mix(
    "states_of_32_and_attention_of_8",
    (
        Group(Kind.RECURRENT, BLOCK, (Layers(1, cell_bytes=392),), page_bytes=512),
        Group(Kind.FULL, 8, (Layers(1, heads=4),)),
    ),
)
"""vLLM resumes inside blocks where there are no other groups."""
STEPS = (BLOCK, BLOCK + 8, 2 * BLOCK, 3 * BLOCK)


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def together_then_alone(mix: Mix, settings: EngineSettings, lengths: Sequence[int], seed: int) -> OracleEngine:
    """Prompts of these lengths, all at once; then each alone, with what the connector has. The engine is closed."""
    generator = random.Random(seed)
    prompts = [[generator.randrange(VOCABULARY_TOKENS) for _ in range(length)] for length in lengths]
    with OracleEngine(mix, settings) as engine:
        for number, prompt in enumerate(prompts):
            engine.submit(f"together{number}", prompt, 2)
        engine.drain()
        for number, prompt in enumerate(prompts):
            engine.reset_prefix_cache()
            engine.submit(f"alone{number}", [*prompt, 1], 2)
            engine.drain()
        engine.check_idle()
    return engine


def settings_of(step_tokens: int, *, is_async: bool = False, **extra: Any) -> EngineSettings:
    return EngineSettings(
        num_blocks=400,
        max_step_tokens=step_tokens,
        max_running=4,
        retention_tokens=None,
        async_scheduling=is_async,
        connector=Connector(CONNECTOR, {**EXTRA, **extra}),
    )


def check_together_then_alone(mix: Mix, num_scenarios: int) -> int:
    """Tokens that were restored."""
    restored = 0

    @profile(num_scenarios)
    @given(
        st.sampled_from(STEPS),
        st.lists(st.integers(BLOCK, 6 * BLOCK), min_size=2, max_size=4),
        st.booleans(),
        st.sampled_from(("off", "auto")),
        st.integers(0, 1 << 32),
    )
    def check(step_tokens: int, lengths: list[int], is_async: bool, checkpoints: str, seed: int) -> None:
        nonlocal restored
        settings = settings_of(step_tokens, is_async=is_async, checkpoints=checkpoints)
        restored += together_then_alone(mix, settings, lengths, seed).restored_tokens

    check()
    return restored


def check_mixed(mix: Mix, num_scenarios: int) -> int:
    """Any scenarios, in which requests also hit what the engine has kept. How many read wrong bytes of the engine's."""
    misled = 0

    @profile(num_scenarios)
    @given(scenarios(mix, draws_ahead=True), st.sampled_from((0, 0, 8)), st.sampled_from((0, 0, 2)))
    def check(scenario: Scenario, more_tokens: int, hash_tokens: int) -> None:
        nonlocal misled
        settings = scenario.settings
        settings = replace(
            settings, max_step_tokens=settings.max_step_tokens + more_tokens, hash_tokens=hash_tokens or None
        )
        engine = run(mix, with_connector(replace(scenario, settings=settings), Connector(CONNECTOR, EXTRA)))
        misled += engine.runner.num_misled

    check()
    return misled


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_no_state_is_served_that_lies_elsewhere(mix: Mix) -> None:
    assert check_together_then_alone(mix, 40) > 0


@pytest.mark.parametrize("mix", [*MIXES, WITHOUT_WINDOW], ids=lambda mix: mix.name)
def test_the_engine_goes_on_from_no_such_state_either(mix: Mix) -> None:
    assert check_mixed(mix, 40) == 0


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_states_that_are_not_told_apart_are_found(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrongBlocks, "_misfiled", lambda *arguments: [])
    with pytest.raises(CorruptionError):
        check_together_then_alone(mix, 40)


def test_where_the_engine_cannot_forget_a_state_nothing_is_stored_that_was_computed_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "forget_blocks", lambda *arguments: None)
    assert check_mixed(unequal(4), 60) > 0


def test_what_is_computed_behind_such_a_state_is_found_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "forget_blocks", lambda *arguments: None)
    monkeypatch.setattr(WrongBlocks, "misled", ())
    with pytest.raises(CorruptionError):
        check_mixed(unequal(4), 200)


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "not_guarded"])
def test_a_producer_hands_on_nothing_that_is_computed_behind_such_a_state(
    is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt would go on from 40 tokens, where the engine takes it for 64."""
    if not is_guarded:
        monkeypatch.setattr(WrongBlocks, "_misfiled", lambda *arguments: [])
    extra = {"transport": "tcp", "weights_digest": "oracle", "load_timeout_seconds": 60}
    base = settings_of(BLOCK + 8)
    producer, consumer = (
        replace(base, connector=Connector(PEER_CONNECTOR, extra, role=role)) for role in ("kv_producer", "kv_consumer")
    )
    first = tokens(100, seed=1)
    with Pair(unequal(4), producer, consumer) as pair:
        for name, prompt in (("first", first), ("second", [*first[:70], *tokens(30, seed=2)])):
            pair.consumer.reset_prefix_cache()
            params = pair.prefill(name, prompt)
            assert params is not None
            pair.decode(f"of_{name}", prompt, 3, params)
            if is_guarded or name == "first":
                pair.drain()
            else:
                with pytest.raises(CorruptionError, match="of_second"):
                    pair.drain()


def test_of_blocks_of_one_size_no_state_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all of them are looked at."""
    looked_at = dropped = 0
    misfiled = WrongBlocks._misfiled

    def counting(wrong: WrongBlocks, output: Any) -> list[int]:
        nonlocal looked_at, dropped
        found = misfiled(wrong, output)
        looked_at += sum(map(len, compat.boundary_states(output).values()))
        dropped += len(found)
        return found

    monkeypatch.setattr(WrongBlocks, "_misfiled", counting)
    monkeypatch.setattr(wrong_blocks, "misfiled_groups", lambda config, layout: frozenset({0, 1, 2}))
    check_together_then_alone(unequal(BLOCK), 40)
    check_mixed(QWEN3_NEXT, 40)
    assert looked_at > 500
    assert dropped == 0


def test_the_start_names_the_groups_and_the_fault_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.hybridkv"):
        OracleEngine(unequal(BLOCK), settings_of(BLOCK)).close()
        assert "54076" not in caplog.text
        OracleEngine(unequal(4), settings_of(BLOCK)).close()
    assert "RECURRENT groups [0] have larger blocks (32 tokens) than another group (4)" in caplog.text
    assert "vllm-project/vllm#54076" in caplog.text
