"""HybridLMCacheConnector at a real `lmcache server`: no wrong byte, no request lost, nothing kept, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from hybridkv.connectors.vllm import register
from oracle.lmcache_runs import Play, Played, played
from oracle.lmcache_servers import VERSIONS, Fleet, Sort, fleet_of
from oracle.mixes import DEEPSEEK_V4, GEMMA3, GPT_OSS, HEADS_BEFORE_LAYERS, LLAMA4, NAMED, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.scenarios import Tally


@pytest.fixture(scope="module", params=VERSIONS)
def fleet(request: pytest.FixtureRequest) -> Fleet:
    register()
    return fleet_of(request.param, request.config)


PLACES = (
    *((mix, Sort.APART) for mix in (GEMMA3, GPT_OSS, QWEN3_NEXT, LLAMA4, HEADS_BEFORE_LAYERS)),
    *((mix, Sort.TOGETHER) for mix in NAMED if not mix.has_recurrent),
    *((mix, Sort.SMALL) for mix in (DEEPSEEK_V4, QWEN3_NEXT)),
)


@pytest.mark.parametrize(("mix", "sort"), PLACES, ids=lambda value: value.name.lower())
def test_no_wrong_byte_comes_from_a_server(mix: Mix, sort: Sort, fleet: Fleet) -> None:
    tally = Tally()
    server = fleet[sort]

    @profile(10)
    @given(played(mix, server))
    def check(chosen: Played) -> None:
        for engine in Play(mix, server, chosen).run():
            tally.add(engine)

    check()
    print(tally)
    assert tally.with_restored > tally.scenarios // 8, tally
