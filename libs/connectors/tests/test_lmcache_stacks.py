"""Engines whose configurations name one server of LMCache: what one stored, the other promotes into its host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tier_engines import LAYOUT, Engine

from hybridkv.connectors.config import OffloadConfig, decode_config
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import tiers
from hybridkv.lmcache.wire import CODECS
from hybridkv.peers.testing.suite import until
from hybridkv.planner import LookupResult
from hybridkv.tiers.lmcache import LMCacheMedium
from kits.lmcache.server_process import ServerProcess, command, eventually, variable

HIT, MISS = LookupResult.HIT, LookupResult.MISS
NUM_BYTES = LAYOUT.chunk_sizes()[-1]
CHUNK = bytes(number % 251 for number in range(NUM_BYTES))
KEY, OTHER = b"key", b"other"


def configured(port: int, http_port: int, **keys: Any) -> OffloadConfig:
    tier = {"type": "lmcache", "url": f"tcp://127.0.0.1:{port}", "http_port": http_port, "pool": "1MiB", **keys}
    return decode_config({"tiers": [{"type": "ram", "capacity": 1 << 20}, tier]})


@pytest.fixture(scope="module", params=sorted(CODECS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    lmcache = command(request.param)
    if lmcache is None:
        pytest.skip(f"{variable(request.param)} names no lmcache of version {request.param}")
    directory: Path = tmp_path_factory.mktemp("lmcache")
    with ServerProcess(lmcache, directory, ["--chunk-size", "256"]) as process:
        yield process


MakeEngine = Callable[..., Engine]


def met(engine: Engine) -> Engine:
    """The rank has reached the server: moves wait for it for a few seconds alone, and a machine may be busy."""
    medium = engine.mover.media["lmcache"]
    assert isinstance(medium, LMCacheMedium)
    assert eventually(lambda: all(shelf.ready is not None for shelf in medium._shelves.values()))
    return engine


@pytest.fixture
def engine() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(*arguments: Any, **keys: Any) -> Engine:
        made.append(Engine(*arguments, **keys))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


def test_what_one_engine_stored_another_promotes_from_the_server(
    server: ServerProcess, engine: MakeEngine, request: pytest.FixtureRequest
) -> None:
    config = configured(server.address.port, server.address.http_port)
    model = f"model of {request.node.name}"
    first, second, stranger = met(engine(config, model)), met(engine(config, model)), met(engine(config, "another"))
    first.store(KEY, CHUNK)

    def is_below() -> bool:
        first.step()
        return first.stack.slower["lmcache"].lookup(KEY) is HIT

    until(is_below)
    assert first.stack.take_counts().tiers["lmcache"].cascades == {"done": 1}
    until(lambda: second.finds(KEY, OTHER) == [HIT, MISS])
    assert not second.stack.in_near(KEY)
    assert second.load(KEY) == CHUNK and second.stack.in_near(KEY)
    assert second.load(KEY) != CHUNK[::-1]
    counts = second.stack.take_counts().tiers["lmcache"]
    assert counts.promoted_bytes == NUM_BYTES and not counts.failures
    assert stranger.finds(KEY) == [MISS]


def test_a_tier_that_is_only_read_is_given_nothing(server: ServerProcess, engine: MakeEngine) -> None:
    config = configured(server.address.port, server.address.http_port, cascade="nothing")
    reader = engine(config, "read only")
    reader.store(KEY, CHUNK)
    for _ in range(3):
        reader.step()
    counts = reader.stack.take_counts().tiers["lmcache"]
    assert counts.cascades == {} and reader.stack.slower["lmcache"].num_keys == 0


def test_without_a_server_nobody_waits_and_nothing_fails(engine: MakeEngine) -> None:
    alone = engine(configured(1, 1))
    assert alone.finds(KEY) == [MISS]
    alone.store(KEY, CHUNK)
    alone.step()
    assert alone.stack.in_near(KEY)


def test_the_sizes_of_chunks_are_all_that_occur() -> None:
    spec = LAYOUT.spec
    ends = range(spec.chunk_tokens, 64 * spec.chunk_tokens, spec.chunk_tokens)
    occurring = {LAYOUT.chunk_bytes(group, end) for group in spec.stored_groups for end in ends} - {0}
    assert LAYOUT.chunk_sizes() == tuple(sorted(occurring))


def test_an_engine_over_several_hosts_is_refused() -> None:
    def on_hosts(number: int) -> Any:
        return SimpleNamespace(parallel_config=SimpleNamespace(nnodes=number, data_parallel_size=2))

    tiers.require_own_directory(configured(5555, 8080), on_hosts(1))
    with pytest.raises(ConfigurationError) as caught:
        tiers.require_own_directory(configured(5555, 8080), on_hosts(2))
    assert caught.value.path == "nnodes"
