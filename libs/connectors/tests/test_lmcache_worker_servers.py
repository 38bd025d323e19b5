"""Workers of HybridLMCacheConnector at real servers: what one stored the other has, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_ranks import MODELS, Rank, digests_of, loaded

from hybridkv.lmcache.testing.server_process import ServerProcess, command, variable
from hybridkv.lmcache.wire import CODECS


@pytest.fixture(scope="module", params=sorted(CODECS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    lmcache = command(request.param)
    if lmcache is None:
        pytest.skip(f"{variable(request.param)} names no lmcache of version {request.param}")
    directory: Path = tmp_path_factory.mktemp("lmcache")
    with ServerProcess(lmcache, directory, ["--chunk-size", "256", "--separate-object-groups"]) as process:
        yield process


MakeRank = Callable[..., Rank]


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[MakeRank]:
    made: list[Rank] = []

    def make(model: Any, server: ServerProcess, **keys: Any) -> Rank:
        made.append(Rank(model, server.address, repr(request.node.name).encode(), **keys))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_one_worker_stored_another_loads_into_other_blocks(
    server: ServerProcess, rank: MakeRank, name: str
) -> None:
    model = MODELS[name]
    first, second = rank(model, server), rank(model, server)
    digests = digests_of(name, 16)
    stored, wanted = first.tables(1, 16), second.tables(2, 16)
    first.fill(stored, seed=3)
    before, poison = first.everything(), second.everything()
    first.store(digests, stored)
    assert first.everything() == before
    ended = second.run(loads=[second.load_of("r", digests, wanted)])
    assert (ended.finished, ended.failed) == ({"r"}, set()), ended
    positions = second.needed(16)
    assert loaded(second, wanted, positions) == loaded(first, stored, positions)
    assert loaded(second, wanted, positions) != loaded(first, wanted, positions), "the same blocks are others"
    named = {(group, wanted[group][at]) for group, each in positions.items() for at in each}
    now = second.everything()
    assert {key for key in now if now[key] != poison[key]} == named
    assert first.all_pages_are_free() and second.all_pages_are_free()
