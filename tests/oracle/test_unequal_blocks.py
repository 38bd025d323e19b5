"""Recurrent states beside groups with smaller blocks, where vLLM 0.32 cuts prefill inside a recurrent block.

It then keeps and offers states under wrong boundaries (vllm-project/vllm#54076). The first prompts of each scenario
come together. In the end each comes alone, with an empty cache of the engine, so that every wrong byte that is read
then came from the connector.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, PEER_CONNECTOR, register
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.blocks import corrupt_blocks
from hybridkv.connectors.vllm.common.blocks.corrupt_blocks import CorruptBlocks
from hybridkv.connectors.vllm.multi import connector as multi_connector
from oracle.block_store import block_store
from oracle.content import VOCABULARY_TOKENS
from oracle.engine import OracleEngine
from oracle.mixes import QWEN3_NEXT, Group, Kind, Layers, Mix
from oracle.pairs import CALM, Pair, tokens
from oracle.profile import profile
from oracle.rings import but_full
from oracle.runner import CorruptionError
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

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


def new_tokens(generator: random.Random, number: int) -> list[int]:
    return [generator.randrange(VOCABULARY_TOKENS) for _ in range(number)]


def play(mix: Mix, settings: EngineSettings, lengths: Sequence[int], seed: int, *, keeps: bool) -> OracleEngine:
    """Prompts of these lengths, all at once; then each alone, with the connector's chunks. If the engine `keeps` its
    cache, others with the same beginnings come between, which hit it. Then these come alone, twice, because the first
    may leave states beside the stored ones. The engine is closed."""
    generator = random.Random(seed)
    prompts = [new_tokens(generator, length) for length in lengths]
    with OracleEngine(mix, settings) as engine:
        for number, prompt in enumerate(prompts):
            engine.submit(f"together{number}", prompt, 2)
        engine.drain()
        if keeps:
            prompts = [[*each[: -generator.randrange(1, BLOCK)], *new_tokens(generator, 3 * BLOCK)] for each in prompts]
            for number, prompt in enumerate(prompts):
                engine.submit(f"behind{number}", prompt, 2)
                engine.drain()
        for number, prompt in enumerate([*prompts, *prompts] if keeps else prompts):
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


class Totals(NamedTuple):
    """Of scenarios: tokens from the connector, from the engine's own cache, and requests that read wrong ones there."""

    restored_tokens: int
    local_tokens: int
    misled: int


def check(mix: Mix, num_scenarios: int, *, keeps: bool = False, whole: bool = False) -> Totals:
    """Runs scenarios in which no byte of the connector may be wrong."""

    @profile(num_scenarios, whole=whole)
    @given(
        st.sampled_from(STEPS),
        st.lists(st.integers(BLOCK, 6 * BLOCK), min_size=2, max_size=4),
        st.booleans(),
        st.sampled_from(("off", "auto")),
        st.integers(0, 1 << 32),
    )
    def one(step_tokens: int, lengths: list[int], is_async: bool, checkpoints: str, seed: int) -> None:
        settings = settings_of(step_tokens, is_async=is_async, checkpoints=checkpoints)
        engine = play(mix, settings, lengths, seed, keeps=keeps)
        totals.append(Totals(engine.restored_tokens, engine.local_hit_tokens, engine.runner.num_misled))

    totals: list[Totals] = []
    one()
    return Totals(*map(sum, zip(*totals, strict=True)))


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_no_misplaced_state_is_served(mix: Mix) -> None:
    assert check(mix, 25).restored_tokens > 0


@pytest.mark.parametrize(
    "mix", but_full((*MIXES, WITHOUT_WINDOW), unequal(4), WITHOUT_WINDOW), ids=lambda mix: mix.name
)
def test_the_engine_does_not_resume_from_a_misplaced_state_either(mix: Mix) -> None:
    totals = check(mix, 15, keeps=True)
    assert totals.local_tokens > 0
    assert totals.misled == 0


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_undetected_misplaced_states_are_found(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrupt_blocks, "misfiled_blocks", lambda *arguments: [])
    with pytest.raises(CorruptionError, match="alone"):
        check(mix, 300, whole=True)


def test_nothing_computed_after_a_state_that_cannot_be_evicted_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "evict_cached_blocks", lambda *arguments: None)
    assert check(unequal(4), 15, keeps=True).misled > 0


def test_tokens_computed_after_a_misplaced_state_are_found_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "evict_cached_blocks", lambda *arguments: None)
    monkeypatch.setattr(CorruptBlocks, "misled", ())
    with pytest.raises(CorruptionError, match="alone"):
        check(unequal(4), 300, keeps=True, whole=True)


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "not_guarded"])
def test_a_producer_offers_no_tokens_computed_after_a_misplaced_state(
    is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt would resume at 40 tokens, which the engine takes for 64."""
    if not is_guarded:
        monkeypatch.setattr(corrupt_blocks, "misfiled_blocks", lambda *arguments: [])
    extra = {"weights_digest": "oracle", **CALM}
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


@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "not_guarded"])
def test_another_connector_below_ours_stores_no_misplaced_state(
    is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HybridMultiConnector hands the steps over without these states."""
    if not is_guarded:
        monkeypatch.setattr(multi_connector, "misfiled_blocks", lambda *arguments: [])
    mix, restored_tokens, num_wrong = unequal(4), 0, 0
    for seed in range(12):
        store = block_store(mix)
        children = [
            {
                "kv_connector": store.name,
                "kv_connector_module_path": store.module_path,
                "kv_connector_extra_config": {**store.extra_config, "load_weight": 10.0},
            },
            {"kv_connector": CONNECTOR, "kv_connector_extra_config": {**EXTRA, "checkpoints": "off"}},
        ]
        connector = Connector(MULTI_CONNECTOR, {"connectors": children, "lookup_timeout_seconds": 0})
        settings = replace(settings_of(STEPS[seed % len(STEPS)]), connector=connector)
        try:
            restored_tokens += play(mix, settings, (70, 100, 150), seed, keeps=False).restored_tokens
        except CorruptionError as wrong:
            if "alone" not in str(wrong):
                raise
            num_wrong += 1
    if is_guarded:
        assert restored_tokens > 0 and num_wrong == 0
    else:
        assert num_wrong > 0


def test_no_state_is_dropped_where_blocks_have_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although all of them are checked."""
    looked_at = dropped = 0
    misfiled_blocks = corrupt_blocks.misfiled_blocks

    def counting(output: Any, groups: Container[int], *rest: Any) -> list[int]:
        nonlocal looked_at, dropped
        found = misfiled_blocks(output, groups, *rest)
        looked_at += sum(map(len, compat.boundary_states(output).values()))
        dropped += len(found)
        return found

    monkeypatch.setattr(corrupt_blocks, "misfiled_blocks", counting)
    monkeypatch.setattr(corrupt_blocks, "groups_with_misfiled_states", lambda config, groups: frozenset({0, 1, 2}))
    check(unequal(BLOCK), 15, keeps=True)
    check(QWEN3_NEXT, 15, keeps=True)
    assert looked_at > 100
    assert dropped == 0


def test_the_startup_log_names_the_groups_and_the_vllm_issue(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.hybridkv"):
        OracleEngine(unequal(BLOCK), settings_of(BLOCK)).close()
        assert "54076" not in caplog.text
        OracleEngine(unequal(4), settings_of(BLOCK)).close()
    assert "RECURRENT groups [0] have larger blocks (32 tokens) than another group (4)" in caplog.text
    assert "vllm-project/vllm#54076" in caplog.text
