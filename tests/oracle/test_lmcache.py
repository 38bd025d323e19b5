"""HybridLMCacheConnector with a real LMCache server: no wrong byte, no lost request, no leak, in any scenario."""

from __future__ import annotations

import uuid
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import register
from hybridkv.connectors.vllm.common.base.store_connector import StoreConnector
from hybridkv.connectors.vllm.lmcache import store_handler
from oracle.engine import OracleEngine
from oracle.lmcache_runs import Play, Played, at, played, reach, require_idle, until_idle
from oracle.lmcache_servers import VERSIONS, Fleet, Sort, fleet_of
from oracle.mixes import DEEPSEEK_V4, GEMMA3, GPT_OSS, HEADS_BEFORE_LAYERS, LLAMA4, QWEN3_NEXT, Mix
from oracle.peer_mixes import MLA, with_heads
from oracle.profile import profile
from oracle.rings import MIXES, but_full
from oracle.runner import CorruptionError
from oracle.scenarios import Tally, mixes
from oracle.settings import EngineSettings


@pytest.fixture(scope="module", params=VERSIONS)
def fleet(request: pytest.FixtureRequest) -> Fleet:
    register()
    return fleet_of(request.param, request.config)


PLACES = but_full(
    [
        *((mix, Sort.APART) for mix in (GEMMA3, GPT_OSS, QWEN3_NEXT, LLAMA4, HEADS_BEFORE_LAYERS)),
        *((mix, Sort.TOGETHER) for mix in (GEMMA3, GPT_OSS, DEEPSEEK_V4, LLAMA4)),
    ],
    (GEMMA3, Sort.APART),
    (QWEN3_NEXT, Sort.APART),
)


@pytest.mark.parametrize(("mix", "sort"), PLACES, ids=lambda value: value.name.lower())
def test_a_server_never_causes_a_wrong_byte(mix: Mix, sort: Sort, fleet: Fleet) -> None:
    tally = Tally()
    server = fleet[sort]

    @profile(8)
    @given(played(mix, server))
    def check(chosen: Played) -> None:
        for engine in Play(mix, server, chosen).run():
            tally.add(engine)

    check()
    print(tally)
    assert tally.with_restored > tally.scenarios // 10, tally


def test_a_server_that_evicts_never_causes_a_wrong_byte(fleet: Fleet) -> None:
    tally = Tally()
    server = fleet[Sort.SMALL]
    stored_chunks = []

    @profile(16)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(st.sampled_from((DEEPSEEK_V4, QWEN3_NEXT)))
        play = Play(mix, server, data.draw(played(mix, server)))
        for engine in play.run():
            tally.add(engine)
        stored_chunks.append(play.stored_chunks)

    check()
    print(tally)
    # Hits depend on the timing of the evictions here.
    assert server.num_objects() < sum(stored_chunks), "at least one object of each chunk"


def test_random_mixes_never_read_a_wrong_byte(fleet: Fleet) -> None:
    tally = Tally()
    server = fleet[Sort.APART]

    @profile(12, whole=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(mixes())
        for engine in Play(mix, server, data.draw(played(mix, server))).run():
            tally.add(engine)

    check()
    print(tally)
    assert tally.with_restored > 0, tally


def test_several_ranks_never_read_a_wrong_byte(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    # Elsewhere ranks are processes of their own.
    monkeypatch.setattr(StoreConnector, "_refuse_second", lambda connector: None)
    tally = Tally()
    server = fleet[Sort.APART]

    @profile(10, whole=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(st.sampled_from((with_heads(GPT_OSS, 2), with_heads(QWEN3_NEXT, 2), MLA)))
        for engine in Play(mix, server, data.draw(played(mix, server, tp_size=2))).run():
            tally.add(engine)

    check()
    print(tally)
    assert tally.with_restored > 0, tally


@pytest.mark.parametrize("mix", but_full((GEMMA3, QWEN3_NEXT), GEMMA3), ids=lambda mix: mix.name)
def test_corrupt_pages_of_the_server_are_recomputed_and_never_read(
    mix: Mix, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally = Tally()
    server = fleet[Sort.APART]
    seal = store_handler.seal_pages
    random = Random(0)

    def seal_and_damage(parts: Any, session_spec: Any, lease: Any, *rest: Any) -> None:
        seal(parts, session_spec, lease, *rest)
        for part in parts.parts:
            if random.random() < 0.5:
                continue
            row = lease.memory.groups[part.group][random.choice(lease.taken.blocks[part.group])]
            row[random.randrange(len(row))] ^= 1 << random.randrange(8)

    monkeypatch.setattr(store_handler, "seal_pages", seal_and_damage)

    @profile(24, whole=True)
    @given(played(mix, server))
    def check(chosen: Played) -> None:
        for engine in Play(mix, server, chosen).run():
            tally.add(engine)

    check()
    print(tally)
    assert tally.with_failed_loads > 0, tally


class EngineSeries:
    """Engines started one after the other at one server; each computes a prompt or restores it."""

    def __init__(self, fleet: Fleet, mix: Mix, identity: str, sort: Sort = Sort.APART, **more: Any) -> None:
        self.server = fleet[sort]
        self.server.begin()
        self.mix = mix
        self.connector = at(self.server, mix, identity, **more)
        self.prompt = [Random(1).randrange(200) for _ in range(6 * sort.chunk_tokens + 1)]

    def restored(self, **changed: Any) -> int:
        """Tokens of the prompt that a new engine restores instead of computing them."""
        settings = EngineSettings(num_blocks=600, retention_tokens=None, connector=self.connector)
        with OracleEngine(self.mix, replace(settings, **changed)) as engine:
            assert reach(engine)
            engine.submit("request", self.prompt, 2)
            until_idle([engine])
            require_idle(engine)
            assert self.server.is_at_rest()
        return engine.restored_tokens


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_an_engine_of_the_same_identity_finds_everything_and_another_nothing(mix: Mix, fleet: Fleet) -> None:
    series = EngineSeries(fleet, mix, uuid.uuid4().hex, Sort.APART if mix.alignment_tokens <= 32 else Sort.MORTAL)
    assert series.restored() == 0
    assert series.restored() == len(series.prompt) - 1
    assert series.restored(model=1) == 0, "another configuration"
    assert EngineSeries(fleet, mix, uuid.uuid4().hex, series.server.sort).restored() == 0, "other weights"
    # Negative control: an engine with other content and the same identity restores wrong bytes, and the oracle notices.
    with pytest.raises(CorruptionError):
        series.restored(model=-1)


def test_a_request_restores_as_many_chunks_as_fit_into_the_pool(fleet: Fleet) -> None:
    identity = uuid.uuid4().hex
    series = EngineSeries(fleet, GPT_OSS, identity, pool_chunks=2)
    chunk = series.server.sort.chunk_tokens
    assert series.restored() == 0
    assert series.restored() == 2 * chunk
    assert EngineSeries(fleet, GPT_OSS, identity).restored() == 6 * chunk, "everything was stored, piece by piece"
