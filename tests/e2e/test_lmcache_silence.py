"""A server of LMCache that accepts everything and answers some of it never, or with what is not true.

A request waits for one deadline and is computed; what is not true is found in the pages. The server is a scripted one
in the test's process, so that it says exactly so much. It holds nothing, whatever it says.
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
"""Each is waited for where there is no answer, and is long enough for one."""
POOL = {"gpt-oss": "2MiB", "qwen3-next": "8MiB"}
MANY = 6
"""Requests that use up the pool, if each keeps what it had."""


class Server:
    """What the scripted one says.

    Attributes:
        silent: calls that are not answered.
        values: what others are answered with instead.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.heard: Counter[str] = Counter()
        self.be_polite()

    def be_polite(self) -> None:
        self.heard.clear()
        self.silent: set[str] = set()
        self.values: dict[str, Any] = {"negotiate_chunk_size": self.chunk_tokens}

    def __call__(self, name: str, frames: Frames) -> Sequence[Frames]:
        self.heard[name] += 1
        if name in self.silent:
            return []
        if name in self.values:
            return [[*frames[:3], msgspec.msgpack.encode(self.values[name])]]
        return polite(name, frames)


@pytest.fixture(scope="module")
def running_server(kind: str) -> Iterator[tuple[ScriptedServer, Server]]:
    said = Server(CHUNK_TOKENS[kind])
    with ScriptedServer(said) as server:
        yield server, said


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
    said = running_server[1]
    said.be_polite()
    yield said
    said.be_polite()


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
    """Each by itself, with nothing that came from the server; and the engine is idle afterwards."""
    results = [engine.generate([prompt])[0] for prompt in prompts]
    require_same_output(expected, results)
    engine.reset_prefix_cache()


def test_a_lookup_that_is_not_answered_costs_one_deadline(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]]
) -> None:
    expected = computed(engine, prompts)
    server.be_polite()
    server.silent = {"lookup"}
    require_computed(engine, expected, prompts)
    assert server.heard["lookup"] == len(prompts), "one question for each, and none after its deadline"
    assert audit.loads == []
    server.be_polite()
    server.silent = {"query_prefetch_status"}
    require_computed(engine, expected, prompts)
    assert server.heard["lookup"] == len(prompts)
    assert audit.loads == []


def test_a_retrieve_that_is_not_answered_costs_one_deadline(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]]
) -> None:
    expected = computed(engine, prompts)
    server.be_polite()
    server.values["query_prefetch_status"] = 2
    server.silent = {"retrieve"}
    require_computed(engine, expected, prompts)
    assert server.heard["retrieve"] == audit.failed_loads == len(prompts)
    assert audit.restored_tokens == 0


def test_stores_that_are_not_answered_delay_and_pin_nothing(
    engine: Engine, audit: LMCacheAudit, server: Server, kind: str
) -> None:
    """More of them than the pool holds."""
    seed = next(_SEEDS)
    prompts = [make_prompt(prompt_lengths(kind)[0], seed=seed + i) for i in range(MANY)]
    expected = computed(engine, prompts)
    server.be_polite()
    server.silent = {"store"}
    require_computed(engine, expected, prompts)
    assert server.heard["store"] > 0
    server.be_polite()
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
def test_what_is_not_true_is_never_an_answer(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]], answers: dict[str, Any]
) -> None:
    """Among them one that has everything and writes nothing, which says that all went well."""
    expected = computed(engine, prompts)
    server.be_polite()
    server.values |= answers
    require_computed(engine, expected, prompts)
    assert audit.restored_tokens == 0
    if answers.get("query_prefetch_status") == 2:
        assert audit.failed_loads >= len(prompts)


def test_afterwards_the_server_is_asked_as_before(
    engine: Engine, audit: LMCacheAudit, server: Server, prompts: list[list[int]]
) -> None:
    """The control: that all of it was computed is not because nobody asks any more."""
    server.be_polite()
    assert eventually(lambda: server.heard["ping"] > 0)
    require_computed(engine, computed(engine, prompts), prompts)
    assert server.heard["lookup"] >= len(prompts) and server.heard["store"] > 0
