"""Runs a scenario of engines at an LMCache server, and checks it during the run and at its end.

Several engines of one identity may run at once, each with its own requests; each finds what the others stored. In every
step every byte that a forward pass would read is compared. At the end nothing is pinned, locked, open or taken, in the
engines, in the shared memory or at the server.
"""

from __future__ import annotations

import bisect
import functools
import os
import time
import uuid
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

import patience
from hypothesis import strategies as st

from hybridkv.connectors.vllm import LMCACHE_CONNECTOR
from hybridkv.connectors.vllm.common.layout import resolve_layout
from hybridkv.connectors.vllm.lmcache.session_spec import num_chunks, page_groups
from hybridkv.lmcache.connection import Ready
from kits.lmcache.segments import segments_of
from kits.lmcache.server_process import eventually
from oracle.engine import IDLE_LIMIT_S, LeakError, OracleEngine, StuckError
from oracle.lmcache_servers import SETTLED_S
from oracle.runner import OracleError
from oracle.scenarios import Scenario, scenarios, with_connector
from oracle.settings import Connector, EngineSettings, make_configs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.lora.request import LoRARequest

    from hybridkv.connectors.vllm.lmcache.scheduler import LMCacheScheduler
    from hybridkv.connectors.vllm.lmcache.worker import LMCacheWorker
    from oracle.lmcache_servers import Server
    from oracle.mixes import Mix
    from oracle.scenarios import Arrival, Wave

LARGE_POOL_BYTES = 1 << 22
PATIENCE_S = patience.seconds(3.0)
"""For deadlines where the server answers: the machine may stall for a while."""
REACH_S = patience.seconds(6.0)


@dataclass(frozen=True, slots=True)
class Crew:
    """Parameters of several engines, beside the scenario of each.

    Args:
        num_engines: with one identity, at one time.
        tp_size: of each engine. The mix describes one rank.
        pool_chunks: chunks in flight at one time on a rank; None for no limit.
        takes_names_again: reuses names of requests that have ended.
        drops: share of its own cache that an engine loses before each wave.
        is_hasty: the first requests come before the server was reached.
        seed: of the losses.
    """

    num_engines: int = 1
    tp_size: int = 1
    pool_chunks: int | None = None
    takes_names_again: bool = False
    drops: float = 0.0
    is_hasty: bool = False
    seed: int = 0


def crews(tp_size: int = 1) -> st.SearchStrategy[Crew]:
    return st.builds(
        Crew,
        st.sampled_from((1, 1, 2, 3)),
        st.just(tp_size),
        st.sampled_from((None, None, 1, 2, 5)),
        st.booleans(),
        st.sampled_from((0.0, 0.0, 0.3, 0.8)),
        st.sampled_from((False, False, False, True)),
        st.integers(0, 1 << 32),
    )


@dataclass(frozen=True, slots=True)
class Played:
    scenario: Scenario
    crew: Crew


def played(mix: Mix, server: Server, tp_size: int = 1) -> st.SearchStrategy[Played]:
    """Scenarios for this server."""
    return st.builds(Played, scenarios(mix, st.booleans(), server.sort.chunk_tokens), crews(tp_size))


@functools.cache
def pool_bytes(mix: Mix, chunk_tokens: int, chunks: int) -> int:
    """The smallest shared memory with room for so many chunks."""
    configs = make_configs(mix, EngineSettings(num_blocks=64))
    groups = page_groups(resolve_layout(configs.vllm, configs.worker, chunk_tokens))
    return 1 + bisect.bisect_left(range(1, 1 << 30), chunks, key=lambda size: num_chunks(groups, chunk_tokens, size))


def at(
    server: Server, mix: Mix, identity: str, pool_chunks: int | None = None, tp_size: int = 1, **more: Any
) -> Connector:
    """The connector to a server, with the content of `identity`."""
    chunk = server.sort.chunk_tokens
    of_rank = LARGE_POOL_BYTES if pool_chunks is None else pool_bytes(mix, chunk, pool_chunks)
    return Connector(
        LMCACHE_CONNECTOR,
        {
            "url": server.url,
            "http_port": server.address.http_port,
            "pool": of_rank * tp_size,
            "weights_digest": identity,
            "lookup_timeout_seconds": PATIENCE_S,
            "load_timeout_seconds": PATIENCE_S,
            "store_timeout_seconds": PATIENCE_S,
            **more,
        },
    )


def scheduler_of(engine: OracleEngine) -> LMCacheScheduler:
    return engine.scheduler_connector._scheduler  # type: ignore[union-attr]


def workers_of(engine: OracleEngine) -> list[LMCacheWorker]:
    return [runner.connector._worker for runner in engine.runners]  # type: ignore[union-attr]


def watch_loads(engine: OracleEngine) -> None:
    """Checks that a load writes only into blocks of its own request."""
    tracker = scheduler_of(engine)._load_tracker
    allocated, pool = tracker.on_allocated, engine.scheduler.kv_cache_manager.block_pool

    def on_allocated(*arguments: Any) -> Any:
        load = allocated(*arguments)
        for copy in load.copies if load is not None else ():
            shared = [at for at in copy.block_ids if pool.blocks[at].ref_cnt != 1 or pool.blocks[at].block_hash]
            if shared:
                raise OracleError(f"{load.request_id} loads into blocks {shared} of group {copy.group_index}")
        return load

    tracker.on_allocated = on_allocated  # type: ignore[method-assign]


def reach(engine: OracleEngine) -> bool:
    """Whether both halves can reach the server, if need be after a while."""
    connections = [engine.scheduler_connector._scheduler_builder.connection]  # type: ignore[union-attr]
    connections += [worker._session.connection for worker in workers_of(engine) if worker._session is not None]
    return all(isinstance(connection.wait_ready(REACH_S), Ready) for connection in connections)


@dataclass
class Play:
    """One scenario of engines at one server. Use as a context manager; leaks are checked at its end.

    Args:
        mix: of the model.
        server: that all engines use.
        chosen: the scenario.
        identity: of the engines; unique by default.
        before_step: called for each engine before each of its steps.
        more: keys of the connector's configuration.
        adapters: used by the requests in turn, with requests without one between; each with the number of its weights.
    """

    mix: Mix
    server: Server
    chosen: Played
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    before_step: Callable[[OracleEngine, int], None] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    adapters: Sequence[tuple[LoRARequest, int]] = ()
    engines: list[OracleEngine] = field(default_factory=list)
    stored_chunks: int = 0
    """Number of chunks that the server took, set at the end."""

    def __post_init__(self) -> None:
        crew = self.chosen.crew
        self.server.begin()
        connector = at(self.server, self.mix, self.identity, crew.pool_chunks, crew.tp_size, **self.more)
        scenario = self.chosen.scenario
        scenario = replace(scenario, settings=replace(scenario.settings, tp_size=crew.tp_size))
        self._scenario = with_connector(scenario, connector)
        self._random = Random(crew.seed)
        self._tokens = self._scenario.tokens()
        for _ in range(crew.num_engines):
            self.start()

    def start(self, model: int = 0) -> OracleEngine:
        """Starts one more engine; another model has another identity."""
        settings = replace(self._scenario.settings, model=model, seed=len(self.engines))
        self.engines.append(OracleEngine(self.mix, settings, self.before_step))
        watch_loads(self.engines[-1])
        if not self.chosen.crew.is_hasty:
            reach(self.engines[-1])
        return self.engines[-1]

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *exception: object) -> None:
        sessions = [worker._session for engine in self.engines for worker in workers_of(engine)]
        self.stored_chunks = sum(each.operations.counts().stored_chunks for each in sessions if each is not None)
        for engine in self.engines:
            engine.close()

    def run(self) -> list[OracleEngine]:
        """Runs all waves; returns the closed engines for their counters."""
        with self:
            for number, wave in enumerate(self._scenario.waves):
                if number > 0:
                    self.between(wave)
                self.wave(number, wave, self.engines)
                self.settle()
        self.require_left()
        return self.engines

    def between(self, wave: Wave) -> None:
        """Resets and losses of caches before a wave."""
        for engine in self.engines:
            if wave.reset_engine:
                engine.reset_prefix_cache()
            if wave.reset_connector:
                engine.reset_connector()
            drop_some(engine, self.chosen.crew.drops, self._random)

    def wave(self, number: int, wave: Wave, engines: Sequence[OracleEngine]) -> None:
        """Submits each request of the wave to one of these engines."""
        last = max(arrival.step + (arrival.abort_after or 0) for arrival in wave.arrivals)
        for step in range(last + 1):
            for index, arrival in enumerate(wave.arrivals):
                engine = engines[(index + number) % len(engines)]
                name = f"request{index}" if self.chosen.crew.takes_names_again else f"wave{number}-request{index}"
                if arrival.step == step:
                    self._submit(engine, name, index, arrival)
                if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                    engine.abort(name, in_step=arrival.abort_in_step)
                    if self.chosen.crew.takes_names_again and name not in engine.scheduler.requests:
                        self._submit(engine, name, index, arrival)
            for engine in engines:
                if wave.reset_running_at == step:
                    engine.preempt_all()
                engine.step()
        until_idle(engines)

    def _submit(self, engine: OracleEngine, name: str, index: int, arrival: Arrival) -> None:
        lora, model = (*self.adapters, (None, None))[(index + arrival.prompt) % (len(self.adapters) + 1)]
        engine.submit(name, self._tokens[arrival.prompt], arrival.num_outputs, lora, model)

    def settle(self) -> None:
        """All engines are idle: nothing remains of their work, here or at the server."""
        for engine in self.engines:
            require_idle(engine)
        if not self.server.is_at_rest():
            raise LeakError(f"the server keeps {self.server.held()}")

    def require_left(self) -> None:
        """After `close`: the server has forgotten these engines."""
        if not self.server.is_at_rest():
            raise LeakError(f"the server keeps {self.server.held()} for engines that are gone")
        left = segments_of(os.getpid())
        if left:
            raise LeakError(f"shared memory is left: {left}")


def until_idle(engines: Sequence[OracleEngine]) -> None:
    """Steps until all engines are idle; StuckError after seconds without a token."""
    progress_s = time.monotonic()
    while not all(engine.is_idle for engine in engines):
        has_computed = [engine.step() for engine in engines]
        if any(has_computed):
            progress_s = time.monotonic()
        elif time.monotonic() - progress_s > IDLE_LIMIT_S:
            raise StuckError("; ".join(engine._left() for engine in engines))


def require_idle(engine: OracleEngine) -> None:
    """An idle engine keeps nothing, neither does its connector or the memory between both."""
    require_nothing_open(engine)
    sessions = [worker._session for worker in workers_of(engine)]
    if not eventually(lambda: not any(session.used_bytes for session in sessions if session is not None), SETTLED_S):
        raise LeakError("pages of the shared memory are never given back")


def require_nothing_open(engine: OracleEngine) -> None:
    """An idle engine waits for nothing. A lost server may still hold pages."""
    engine.check_idle()
    scheduler = scheduler_of(engine)
    if scheduler.has_work_in_flight():
        raise LeakError("the connector has work in flight, and no step will come for it")
    kept = [*scheduler._load_tracker._requests, *scheduler._load_tracker._loads, *scheduler._store_tracker._stores]
    kept += [tracked.request_id for tracked in scheduler._requests.all()]
    if kept:
        raise LeakError(f"the connector remembers {kept}")


def drop_some(engine: OracleEngine, share: float, random: Random) -> None:
    """The engine loses some of its own cached blocks."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    cached = [block.block_id for block in pool.blocks if block.block_hash is not None and block.ref_cnt == 0]
    pool.evict_blocks(set(random.sample(cached, int(share * len(cached)))))
