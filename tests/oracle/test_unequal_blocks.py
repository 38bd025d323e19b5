"""Recurrent states beside groups of smaller blocks, where vLLM 0.32 cuts prefill inside a recurrent block.

It then keeps and hands over states under boundaries at which they are not (vllm-project/vllm#54076). The first prompts
of each scenario come together. Then each comes alone, and the engine has forgotten its cache, so every wrong byte that
is read came from the connector.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, register
from hybridkv.connectors.vllm.wrong_blocks import WrongBlocks
from oracle.content import VOCABULARY_TOKENS
from oracle.engine import OracleEngine
from oracle.mixes import Group, Kind, Layers, Mix
from oracle.profile import profile
from oracle.runner import CorruptionError
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


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_no_state_is_served_that_lies_elsewhere(mix: Mix) -> None:
    restored = 0

    @profile(60)
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
    assert restored > 0
