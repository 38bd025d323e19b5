"""A server of LMCache that accepts all requests but leaves some unanswered, or answers them falsely.

A request waits for one deadline and is then computed; false answers are detected in the pages. The server is scripted
in the test's process, so that its answers are exact. It never holds data, whatever it answers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import patience
import pytest
from equality import require_same_output
from harness import Engine, Result, make_prompt
from lmcache_site import CHUNK_TOKENS, ENGINE_ARGUMENTS, prompt_lengths, transfer_config
from lmcache_witness import LMCacheAudit
from noise import own_cache_only

from kits.lmcache.scripted_server import Frames, ScriptedServer, polite
from kits.lmcache.server_process import eventually

_SEEDS = itertools.count(1000, 1000)
DEADLINES = dict.fromkeys(
    ("lookup_timeout_seconds", "load_timeout_seconds", "store_timeout_seconds"), patience.seconds(0.3)
)
"""Tests wait for each of them if there is no answer; long enough for an answer."""
POOL = {"gpt-oss": "2MiB", "qwen3-next": "8MiB"}
MANY = 6
"""Requests that would use up the pool if none returned its pages."""


class Server:
    """Behaviour of the scripted server.

    Attributes:
        silent: calls that are not answered.
        values: replaced answers, by call.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.num_calls: Counter[str] = Counter()
        self.reset()

    def reset(self) -> None:
        self.num_calls.clear()
        self.silent: set[str] = set()
        self.values: dict[str, Any] = {"negotiate_chunk_size": self.chunk_tokens}

    def __call__(self, name: str, frames: Frames) -> Sequence[Frames]:
        self.num_calls[name] += 1
        if name in self.silent:
            return []
        if name in self.values:
            return [[*frames[:3], msgspec.msgpack.encode(self.values[name])]]
        return polite(name, frames)


@pytest.fixture(scope="module")
def running_server(kind: str) -> Iterator[tuple[ScriptedServer, Server]]:
    behaviour = Server(CHUNK_TOKENS[kind])
    with ScriptedServer(behaviour) as server:
        yield server, behaviour


@pytest.fixture(scope="module")
def kv_transfer_config(kind: str, running_server: tuple[ScriptedServer, Server]) -> dict[str, Any]:
    return transfer_config(running_server[0].address, pool=POOL[kind], **DEADLINES)


@pytest.fixture(scope="module")
def engine_arguments(kind: str) -> dict[str, Any]:
    return ENGINE_ARGUMENTS.get(kind, {})


@pytest.fixture(scope="module")
def watching(engine: Engine) -> LMCacheAudit:
    audit = LMCacheAudit(engine)
    audit.attach()
    return audit


@pytest.fixture
def server(running_server: tuple[ScriptedServer, Server]) -> Iterator[Server]:
    behaviour = running_server[1]
    behaviour.reset()
    yield behaviour
    behaviour.reset()


@pytest.fixture
def prompts(kind: str) -> list[list[int]]:
    seed = next(_SEEDS)
    return [make_prompt(length, seed=seed + i) for i, length in enumerate(prompt_lengths(kind, 2))]


def computed(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Result]:
    engine.reset_prefix_cache()
    with own_cache_only(engine):
        results = [engine.generate([prompt])[0] for prompt in prompts]
    engine.reset_prefix_cache()
    return results


def require_computed(engine: Engine, expected: Sequence[Result], prompts: Sequence[Sequence[int]]) -> None:
    """Require computed answers, without any data from the server, and an idle engine afterwards."""
    results = [engine.generate([prompt])[0] for prompt in prompts]
    require_same_output(expected, results)
    engine.reset_prefix_cache()


def test_an_unanswered_lookup_costs_one_deadline(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]]
) -> None:
    expected = computed(engine, prompts)
    server.reset()
    server.silent = {"lookup"}
    require_computed(engine, expected, prompts)
    assert server.num_calls["lookup"] == len(prompts), "one lookup for each prompt, and none after its deadline"
    assert audit.loads == []
    server.reset()
    server.silent = {"query_prefetch_status"}
    require_computed(engine, expected, prompts)
    assert server.num_calls["lookup"] == len(prompts)
    assert audit.loads == []


def test_an_unanswered_retrieve_costs_one_deadline(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]]
) -> None:
    expected = computed(engine, prompts)
    server.reset()
    server.values["query_prefetch_status"] = 2
    server.silent = {"retrieve"}
    require_computed(engine, expected, prompts)
    assert server.num_calls["retrieve"] == audit.failed_loads == len(prompts)
    assert audit.restored_tokens == 0


def test_unanswered_stores_delay_nothing_and_keep_no_pages(
    engine: Engine, audit: LMCacheAudit, server: Server, kind: str
) -> None:
    """More stores than the pool holds."""
    seed = next(_SEEDS)
    prompts = [make_prompt(prompt_lengths(kind)[0], seed=seed + i) for i in range(MANY)]
    expected = computed(engine, prompts)
    server.reset()
    server.silent = {"store"}
    require_computed(engine, expected, prompts)
    assert server.num_calls["store"] > 0
    server.reset()
    others = [make_prompt(prompt_lengths(kind)[0], seed=seed + 100 + i) for i in range(2)]
    require_computed(engine, computed(engine, others), others)


@pytest.mark.parametrize(
    "answers",
    [
        {"query_prefetch_status": 2},
        {"query_prefetch_status": 1000},
        {"query_prefetch_status": -1},
        {"query_prefetch_status": "two"},
        {"query_prefetch_status": 2, "retrieve": [b"handle", False]},
        {"query_prefetch_status": 2, "retrieve": []},
        {"store": [b"handle", False]},
        {"store": 7, "lookup": 7},
    ],
    ids=str,
)
def test_false_answers_never_change_the_output(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]], answers: dict[str, Any]
) -> None:
    """Including a server that claims to hold everything, writes nothing and reports success."""
    expected = computed(engine, prompts)
    server.reset()
    server.values |= answers
    require_computed(engine, expected, prompts)
    assert audit.restored_tokens == 0
    if answers.get("query_prefetch_status") == 2:
        assert audit.failed_loads >= len(prompts)


def test_the_server_is_still_used_afterwards(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]]
) -> None:
    """Control: prompts were not computed because the engine had stopped using the server."""
    server.reset()
    assert eventually(lambda: server.num_calls["ping"] > 0)
    require_computed(engine, computed(engine, prompts), prompts)
    assert server.num_calls["lookup"] >= len(prompts) and server.num_calls["store"] > 0
