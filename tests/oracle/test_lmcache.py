"""HybridLMCacheConnector at a real `lmcache server`: no wrong byte, no request lost, nothing kept, whatever happens."""

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
def test_no_wrong_byte_comes_from_a_server(mix: Mix, sort: Sort, fleet: Fleet) -> None:
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


def test_no_wrong_byte_comes_from_a_server_that_forgets(fleet: Fleet) -> None:
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
    # That something is found is a matter of moments here.
    assert server.num_objects() < sum(stored_chunks), "one at least of each chunk"


def test_no_wrong_byte_comes_to_random_mixes(fleet: Fleet) -> None:
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


def test_no_wrong_byte_comes_to_several_ranks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which are processes of their own elsewhere.
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
def test_pages_that_change_at_the_server_are_computed_again_and_never_read(
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


class Warm:
    """Engines one after the other at one place; each computes a prompt, or is given it."""

    def __init__(self, fleet: Fleet, mix: Mix, identity: str, sort: Sort = Sort.APART, **more: Any) -> None:
        self.server = fleet[sort]
        self.server.begin()
        self.mix = mix
        self.connector = at(self.server, mix, identity, **more)
        self.prompt = [Random(1).randrange(200) for _ in range(6 * sort.chunk_tokens + 1)]

    def restored(self, **changed: Any) -> int:
        """Tokens that a new engine restores of the prompt, instead of computing them."""
        settings = EngineSettings(num_blocks=600, retention_tokens=None, connector=self.connector)
        with OracleEngine(self.mix, replace(settings, **changed)) as engine:
            assert reach(engine)
            engine.submit("request", self.prompt, 2)
            until_idle([engine])
            require_idle(engine)
            assert self.server.is_at_rest()
        return engine.restored_tokens


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_an_heir_finds_everything_and_a_stranger_nothing(mix: Mix, fleet: Fleet) -> None:
    warm = Warm(fleet, mix, uuid.uuid4().hex, Sort.APART if mix.alignment_tokens <= 32 else Sort.MORTAL)
    assert warm.restored() == 0
    assert warm.restored() == len(warm.prompt) - 1
    assert warm.restored(model=1) == 0, "of another configuration"
    assert Warm(fleet, mix, uuid.uuid4().hex, warm.server.sort).restored() == 0, "of other weights"
    # The control: an engine that is another and does not say so is given what is not its own, and that is seen.
    with pytest.raises(CorruptionError):
        warm.restored(model=-1)


def test_a_request_restores_what_fits_through_the_pool(fleet: Fleet) -> None:
    identity = uuid.uuid4().hex
    warm = Warm(fleet, GPT_OSS, identity, pool_chunks=2)
    chunk = warm.server.sort.chunk_tokens
    assert warm.restored() == 0
    assert warm.restored() == 2 * chunk
    assert Warm(fleet, GPT_OSS, identity).restored() == 6 * chunk, "all was stored, piece by piece"
