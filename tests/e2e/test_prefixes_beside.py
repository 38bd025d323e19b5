"""The same prompts on other configurations: hybridkv without checkpoints, and vLLM's own OffloadingConnector.

Both store only the states that the engine provides by itself: one at the end of every prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cpu_offloading_spec
import prefix_site
import pytest
from equality import require_same_output
from harness import Engine
from prefix_site import Rows, chat, in_turn
from shared_prefixes import CHAT_TURNS, Workloads, found, resumable
from trial import hits

SIBLINGS = 5
BESIDE: Mapping[str, dict[str, Any]] = {
    "checkpoints off": prefix_site.offload_config(checkpoints="off"),
    "vLLM's OffloadingConnector": cpu_offloading_spec.KV_TRANSFER_CONFIG,
}


@pytest.fixture(scope="module", params=BESIDE, ids=["off", "vllm"])
def who(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def running(who: str, zoo_directory: Path) -> Iterator[Engine]:
    with prefix_site.running_beside(zoo_directory, BESIDE[who]) as engine:
        yield engine


@pytest.fixture
def engine(running: Engine) -> Engine:
    """The engine, with an empty cache and an empty store."""
    running.reset_prefix_cache()
    running.connector.reset_cache()
    return running


@pytest.fixture(scope="module")
def words() -> Workloads:
    return prefix_site.workloads()


def test_a_restored_prompt_equals_the_engines_own_hit(engine: Engine, words: Workloads) -> None:
    """Shows that the store works, before the tests of what it lacks."""
    [prompt] = words.siblings(1)
    [_, own] = engine.generate([prompt]) + engine.generate([prompt])
    engine.reset_prefix_cache()
    [restored] = engine.generate([prompt])
    assert hits([own, restored]) == [resumable(len(prompt), words.block_tokens)] * 2
    require_same_output([own], [restored])


def test_siblings_find_only_the_states_that_the_engine_provides(
    engine: Engine, who: str, words: Workloads, rows: Rows
) -> None:
    prompts = words.siblings(SIBLINGS)
    restored = in_turn(engine, prompts, engine.reset_prefix_cache)
    rows.add("siblings", who, restored)
    assert hits(restored) == found(prompts, words.block_tokens, places_states=False)


def test_a_tree_finds_only_the_states_that_the_engine_provides(
    engine: Engine, who: str, words: Workloads, rows: Rows
) -> None:
    prompts = words.tree()
    restored = in_turn(engine, prompts, engine.reset_prefix_cache)
    rows.add("tree", who, restored)
    assert hits(restored) == found(prompts, words.block_tokens, places_states=False)


def test_each_turn_of_a_chat_resumes_where_the_last_prompt_ended(
    engine: Engine, who: str, words: Workloads, rows: Rows
) -> None:
    talk = chat(engine, words, engine.reset_prefix_cache)
    rows.add("chat", who, talk.results)
    ends = [resumable(len(prompt), words.block_tokens) for prompt in talk.prompts[: CHAT_TURNS - 1]]
    assert hits(talk.results) == [0, *ends]
