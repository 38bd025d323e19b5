"""What one engine computed the other goes on with, byte by byte, and nothing is kept of it when both are idle."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hybridkv.connectors.vllm import PEER_CONNECTOR, register
from oracle.content import VOCABULARY_TOKENS
from oracle.mixes import NAMED, Mix
from oracle.pairs import Pair
from oracle.settings import Connector, EngineSettings


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def settings(role: str, **extra: Any) -> EngineSettings:
    config = {"transport": "tcp", "lease_seconds": 30, "weights_digest": "oracle", **extra}
    return EngineSettings(num_blocks=200, connector=Connector(PEER_CONNECTOR, config, role=role))


def tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCABULARY_TOKENS) for _ in range(count)]


@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 129, 200])
def test_a_prompt_is_handed_over(mix: Mix, num_tokens: int) -> None:
    prompt = tokens(num_tokens, seed=num_tokens)
    with Pair(mix, settings("kv_producer"), settings("kv_consumer")) as pair:
        params = pair.prefill("a", prompt)
        assert params is not None
        pair.decode("b", prompt, 5, params)
        pair.drain()
        assert pair.consumer.restored_tokens == num_tokens - 1
        assert pair.consumer.failed_loads == 0
