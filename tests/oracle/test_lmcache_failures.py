"""LMCache servers that are stopped, killed and restarted below running engines: only time is lost."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from random import Random

import patience
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import register
from kits.lmcache.server_process import eventually
from oracle.engine import LeakError, OracleEngine
from oracle.lmcache_runs import (
    Play,
    Played,
    at,
    played,
    reach,
    require_idle,
    require_nothing_open,
    until_idle,
    workers_of,
)
from oracle.lmcache_servers import SETTLED_S, VERSIONS, Server, Sort, fleet_of, impatient
from oracle.mixes import DEEPSEEK_V4, GEMMA3, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.rings import but_full
from oracle.scenarios import Tally
from oracle.settings import EngineSettings

SOON = {
    "lookup_timeout_seconds": 0.3,
    "load_timeout_seconds": 0.5,
    "store_timeout_seconds": 0.5,
    "heartbeat_seconds": 0.1,
}
"""Deadlines for answers that never come, in tests that count no hits."""
CALM = {name: patience.seconds(0.15) for name in SOON} | {"heartbeat_seconds": 0.1}
"""For a running server that must answer within them. Far below the time after which a connection considers the server
lost: a lookup that is lost with its connection leaves locks, which the server itself releases after minutes."""
MIXES = (GEMMA3, DEEPSEEK_V4, QWEN3_NEXT)
OLD, NEW = 0, 1


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    register()
    return str(request.param)


@pytest.fixture
def server(version: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    impatient(monkeypatch)
    server = fleet_of(version, request.config)[Sort.MORTAL]
    yield server
    server.process.signal(signal.SIGCONT)
    server.process.wait()


class EngineGroup:
    """Two engines of each of several models at one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        server.begin()
        num_tokens = 3 * server.sort.chunk_tokens + 1
        self.prompts = [[Random(number).randrange(200) for _ in range(num_tokens)] for number in (OLD, NEW)]
        self.count = 0
        settings = [
            EngineSettings(num_blocks=900, retention_tokens=None, connector=at(server, mix, uuid.uuid4().hex, **CALM))
            for mix in MIXES
        ]
        self.engines = [OracleEngine(mix, each) for mix, each in zip(MIXES, settings, strict=True) for _ in range(2)]
        assert all(reach(engine) for engine in self.engines)

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, *exception: object) -> None:
        for engine in self.engines:
            engine.close()

    def ask(self, *prompts: int) -> None:
        """Submits these prompts to every engine, with an empty cache of its own."""
        for engine in self.engines:
            engine.reset_prefix_cache()
            for prompt in prompts:
                self.count += 1
                engine.submit(f"request{self.count}", self.prompts[prompt], 3)

    def restored(self, *prompts: int) -> list[int]:
        """Tokens that each engine restores of these prompts."""
        before = [engine.restored_tokens for engine in self.engines]
        self.ask(*prompts)
        self.until_idle()
        return [engine.restored_tokens - old for engine, old in zip(self.engines, before, strict=True)]

    def until_idle(self) -> None:
        until_idle(self.engines)
        for engine in self.engines:
            require_nothing_open(engine)

    def until_moving(self) -> None:
        """Steps until half of the engines have transfers in flight."""
        sessions = [worker._session for engine in self.engines for worker in workers_of(engine)]
        until_s = time.monotonic() + patience.seconds(6.0)
        while sum(session is not None and session.used_bytes > 0 for session in sessions) < len(self.engines) // 2:
            assert time.monotonic() < until_s, "nothing is in flight"
            if not any(engine.scheduler.has_requests() for engine in self.engines):
                self.ask(OLD, NEW)  # everything ended between two checks
            for engine in self.engines:
                engine.step()

    def require_whole(self) -> None:
        """Requires that the running server stores and finds everything again, with nothing left of before."""
        assert all(reach(engine) for engine in self.engines)
        self.restored(OLD)
        for engine in self.engines:
            require_idle(engine)
        # A completed store becomes readable a moment later.
        assert self.server.is_at_rest(), self.server.held()
        whole = len(self.prompts[OLD]) - 1
        assert self.restored(OLD) == [whole] * len(self.engines)


@pytest.mark.full  # restarts a server
def test_a_server_killed_during_loads_and_stores_is_used_after_its_restart(server: Server) -> None:
    with EngineGroup(server) as group:
        group.require_whole()
        group.ask(OLD, NEW)
        group.until_moving()
        server.process.kill()
        group.until_idle()
        assert group.restored(OLD) == [0] * len(group.engines), "no server is running"
        server.start_again()
        server.process.wait()
        group.require_whole()
        assert server.is_at_rest(), server.held()


def test_a_server_stopped_during_loads_and_stores_is_used_when_it_continues(server: Server) -> None:
    with EngineGroup(server) as group:
        group.require_whole()
        group.ask(OLD, NEW)
        group.until_moving()
        server.process.signal(signal.SIGSTOP)
        group.until_idle()
        assert group.restored(OLD) == [0] * len(group.engines), "the server does not answer"
        server.process.signal(signal.SIGCONT)
        group.require_whole()


@pytest.mark.parametrize("mix", but_full(MIXES, GEMMA3), ids=lambda mix: mix.name)
def test_a_server_that_stops_now_and_then_never_causes_a_wrong_byte(mix: Mix, server: Server) -> None:
    tally = Tally()

    @profile(5)
    @given(played(mix, server), st.integers(0, 1 << 32))
    def check(chosen: Played, seed: int) -> None:
        for engine in Halting(mix, server, chosen, before_step=halting(server, Random(seed)), more=SOON).run():
            tally.add(engine)

    check()
    print(tally)


class Halting(Play):
    """A scenario at a server that `halting` stops."""

    def settle(self) -> None:
        self.server.process.signal(signal.SIGCONT)
        assert all(reach(engine) for engine in self.engines)
        for engine in self.engines:
            require_idle(engine)
        # A lookup that is lost with its connection leaves read locks, which the server releases after minutes.
        kept = {"sessions", "write_locked_count"}
        if not eventually(lambda: not kept & self.server.held().keys(), SETTLED_S):
            raise LeakError(f"the server keeps {self.server.held()}")
        self.server.begin()


def halting(server: Server, random: Random) -> Callable[[OracleEngine, int], None]:
    """A hook that stops the server now and then, for the time of an answer or longer than any deadline."""
    left = 0

    def before_step(engine: OracleEngine, step: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            server.process.signal(signal.SIGCONT)
        elif left < 0 and random.random() < 0.05:
            server.process.signal(signal.SIGSTOP)
            left = random.choice((3, 30, 300, 1000))

    return before_step
