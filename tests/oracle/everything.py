"""All features of the connector enabled in one engine: scenarios, and counts of what happened in them."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.offload import tiers as opened_tiers
from hybridkv.connectors.vllm.offload.loads.loads_in_flight import LoadsInFlight
from hybridkv.connectors.vllm.offload.scheduler import OffloadScheduler
from hybridkv.connectors.vllm.offload.stores.store_planner import StorePlanner
from hybridkv.tiers.contract import Key
from hybridkv.tiers.disk.recovery import builder
from kits import plain_ram_index, plain_records
from kits.plain_ledger import E, LruPolicy
from oracle.disk_tier import LARGE, forget, stacked
from oracle.engine import OracleEngine
from oracle.known_stops import allow_all_stops
from oracle.lost_blocks import losing
from oracle.memory import KVMemory, copy_in_order
from oracle.mixes import QWEN3_NEXT, Mix
from oracle.scenarios import Arrival, Prompt, Scenario, run, scenarios, with_connector
from oracle.settings import Connector

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from hybridkv.connectors.vllm.common.requests import TrackedRequest

HASH_TOKENS = {QWEN3_NEXT.name: (2, 4, 8)}
"""For mixes with tails: vLLM offers states inside blocks only where all groups are recurrent or full."""
ANSWER_TOKENS = 24
"""Length of answers with a next turn: longer than a block, where there are states."""
FEW_CHUNKS = (3, 6, 12, 24)
FEW_LONG_CHUNKS = (1, 1, 2, 3)
"""For prompts of as many tokens in longer chunks."""
KEEP = {"keep_seconds": 600}
PREFETCH = {"prefetch": True}
HINTS = (None, None, None, None, {"store": False}, {"load": False}, KEEP, KEEP, PREFETCH)
ORDERS = ("least recent first", "most recent first", "any first")


@dataclass(frozen=True, slots=True)
class Everything:
    """One engine with all features, and its scenario."""

    scenario: Scenario
    chunk_blocks: int
    load: str
    chunks: int
    """Chunks of each group that fit into RAM."""
    has_disk: bool
    order: str
    """Order in which chunks leave the tiers."""
    loses: bool
    """Whether the engine gives out blocks that it could have used, and keeps the others between waves."""
    forgets: bool
    """Whether RAM evicts chunks out of order."""
    seed: int


@st.composite
def _arrivals(draw: st.DrawFn, scenario: Scenario, turn: int | None) -> Scenario:
    """The same scenario with hints for some requests; `turn` is submitted last, and its parent first."""
    waves = [
        [replace(each, transfer_params=_said(draw(st.sampled_from(HINTS)))) for each in wave.arrivals]
        for wave in scenario.waves
    ]
    if turn is not None:
        waves[0].append(Arrival(scenario.prompts[turn].parent, 0, ANSWER_TOKENS))
        waves[-1].append(Arrival(turn, 0, ANSWER_TOKENS))
    return replace(
        scenario,
        waves=tuple(replace(wave, arrivals=tuple(each)) for wave, each in zip(scenario.waves, waves, strict=True)),
    )


def _said(hints: dict[str, Any] | None) -> object:
    return None if hints is None else {"hybridkv_hints": hints}


@st.composite
def _conversing(draw: st.DrawFn, mix: Mix) -> Scenario:
    """A scenario in which some prompts are the next turn of others."""
    scenario = draw(scenarios(mix, draws_ahead=True))
    prompts: list[Prompt] = []
    for prompt in scenario.prompts:
        is_turn = bool(prompts) and draw(st.booleans())
        answered = draw(st.integers(ANSWER_TOKENS // 4, ANSWER_TOKENS)) if is_turn else 0
        prompts.append(replace(prompt, answered=answered))
    turns = [number for number, prompt in enumerate(prompts) if prompt.answered]
    scenario = replace(scenario, prompts=tuple(prompts))
    longest = max(map(len, scenario.tokens())) + ANSWER_TOKENS
    # vLLM keeps windows free for two steps where it plans the second before the first has ended.
    in_flight = scenario.settings.max_step_tokens * (1 + scenario.settings.async_scheduling)
    enough = mix.max_blocks(longest, in_flight) + 1
    settings = replace(
        scenario.settings,
        num_blocks=enough + draw(st.sampled_from((2, enough // 2, 3 * enough))),
        hash_tokens=draw(st.sampled_from((None, *HASH_TOKENS[mix.name]))) if mix.name in HASH_TOKENS else None,
    )
    turn = draw(st.sampled_from(turns)) if turns else None
    return draw(_arrivals(replace(scenario, settings=settings), turn))


@st.composite
def everything(draw: st.DrawFn, mix: Mix) -> Everything:
    # The first example takes the first of each choice, so at least one has a disk, too little memory and losses
    # together.
    loses = draw(st.sampled_from((True, False)))
    scenario = draw(_conversing(mix))
    if loses:
        scenario = replace(scenario, waves=tuple(replace(wave, reset_engine=False) for wave in scenario.waves))
    return Everything(
        scenario,
        chunk_blocks=draw(st.sampled_from((1, 1, 2))),
        load=draw(st.sampled_from(("async", "sync"))),
        chunks=draw(st.sampled_from(FEW_CHUNKS if mix.alignment_tokens < 64 else FEW_LONG_CHUNKS) | st.just(LARGE)),
        has_disk=draw(st.sampled_from((True, False))),
        order=draw(st.sampled_from((ORDERS[0], *ORDERS))),
        loses=loses,
        forgets=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 32)),
    )


def connector_of(mix: Mix, drawn: Everything, directory: str) -> Connector:
    more = {
        "chunk_tokens": drawn.chunk_blocks * mix.alignment_tokens,
        # An engine so slow that an extra step costs as much as one token.
        "compute_tokens_per_second": 200,
        "keep_share": 0.5,
    }
    with_disk = stacked(mix, directory, drawn.load, drawn.chunks, **more)
    tiers = with_disk.extra_config["tiers"]
    return Connector(CONNECTOR, {**with_disk.extra_config, "tiers": tiers if drawn.has_disk else tiers[:1]})


@dataclass
class Watch:
    """Counts of what happened in the scenarios of a test; also checks that hints are obeyed."""

    happened: Counter[str] = field(default_factory=Counter)
    order: str = ORDERS[0]
    """Order in which chunks leave the tiers that are built from now on."""
    random: Random = field(default_factory=lambda: Random(0))
    is_as_shipped: bool = False
    """Otherwise the indexes are the reference models, which evict in the given order."""
    _origins: dict[int, str] = field(default_factory=dict)
    """Origins of stored states, by the tokens before them."""

    def play(self, mix: Mix, drawn: Everything) -> OracleEngine:
        """Runs a scenario to its end and checks everything."""
        self.order, self.random = drawn.order, Random(drawn.seed)
        self._origins.clear()
        hooks: list[Callable[[OracleEngine, int], None]] = []
        if drawn.loses:
            hooks.append(losing(self.random))
        if drawn.forgets:
            hooks.append(forget(self.random))

        def before_step(engine: OracleEngine, step: int) -> None:
            for hook in hooks:
                hook(engine, step)

        with tempfile.TemporaryDirectory() as directory:
            scenario = with_connector(drawn.scenario, connector_of(mix, drawn, directory))
            engine = run(mix, scenario, before_step)
        assert engine.scheduler_connector is not None
        engine.scheduler_connector.get_kv_connector_stats()
        self.happened[drawn.order] += 1
        self.happened["several at once"] += drawn.has_disk and drawn.chunks < LARGE and drawn.loses
        return engine

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watches every engine that is built from now on."""
        # A step is a large part of the cost of a prompt of this size.
        allow_all_stops(monkeypatch)
        # The intended behaviour of vLLM where its own hits end inside blocks; see test_tails.py.
        monkeypatch.setattr(KVMemory, "copy_blocks", copy_in_order)
        monkeypatch.setattr(compat, "copies_whole_blocks", lambda: True)
        if not self.is_as_shipped:
            monkeypatch.setattr(opened_tiers, "RamIndex", plain_ram_index.PlainRamIndex)
            monkeypatch.setattr(builder, "RecordTable", plain_records.PlainRecordTable)
        for module in (plain_ram_index, plain_records):
            monkeypatch.setattr(module, "LruPolicy", lambda: Watched(self))
        self._watch_hits(monkeypatch)
        self._watch_stores(monkeypatch)

    def _watch_hits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        allocated, planned = OffloadScheduler.on_allocated, LoadsInFlight._plan

        def on_allocated(scheduler: OffloadScheduler, request: Any, blocks: Any, num_external: int) -> None:
            assert not num_external or hints_of(request).get("load", True), "a load despite load=False"
            allocated(scheduler, request, blocks, num_external)

        def plan(planner: LoadsInFlight, tracked: TrackedRequest, boundary: int, blocks: Any) -> Any:
            self.happened["tails restored"] += boundary % planner._layout.spec.chunk_tokens > 0
            origin = self._origins.get(_prefix(tracked, boundary))
            if origin is not None:
                self.happened[f"hits at {origin}"] += 1
            return planned(planner, tracked, boundary, blocks)

        monkeypatch.setattr(OffloadScheduler, "on_allocated", on_allocated)
        monkeypatch.setattr(LoadsInFlight, "_plan", plan)

    def _watch_stores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told = StorePlanner._origins

        def origins(planner: StorePlanner, tracked: TrackedRequest, parts: Any) -> dict[Any, str]:
            assert hints_of(tracked.request).get("store", True), "a store despite store=False"
            found = told(planner, tracked, parts)
            self._origins |= {_prefix(tracked, part[1]): origin for part, origin in found.items()}
            return found

        monkeypatch.setattr(StorePlanner, "_origins", origins)


def hints_of(request: Any) -> dict[str, Any]:
    """Hints of a request, whether or not the connector has read them."""
    said = request.kv_transfer_params
    hints: dict[str, Any] = {} if said is None else said["hybridkv_hints"]
    return hints


def _prefix(tracked: TrackedRequest, num_tokens: int) -> int:
    return hash(tuple(tracked.request.all_token_ids[:num_tokens]))


class Watched(LruPolicy[E]):
    """Evicts in the order of the scenario."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._how = watch.order

    def pick(self) -> tuple[Key, E]:
        if self._how == ORDERS[0]:
            return super().pick()
        if self._how == ORDERS[1]:
            return self._entries.popitem()
        key = self._watch.random.choice(list(self._entries))
        return key, self._entries.pop(key)
