"""A remote store below RAM and disk: whatever it answers, and whenever, no wrong byte is read and no request waits
beyond its deadlines."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import register
from hybridkv.tiers import Completion, Key
from hybridkv.tiers.buffers import byte_views
from hybridkv.tiers.stack import BreakerOptions, CascadePolicy, TierStack
from kits.tiers.reference import RemoteIndex, RemoteMedium
from oracle.disk_tier import LARGE, SMALL, stack_of, stacked
from oracle.engine import OracleEngine
from oracle.mixes import GEMMA3, GPT_OSS, NAMED, QWEN3_NEXT, Mix
from oracle.profile import profile
from oracle.remote_tier import ASK_S, CAPACITY_BYTES, LOAD_S, LOOKUP_S, PEER, STEP_S, World
from oracle.rings import MIXES, but_full
from oracle.runner import CorruptionError
from oracle.scenarios import Scenario, Tally, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

ALL_WAITS_S = LOOKUP_S + LOAD_S + 0.3
"""Longest wait of one request, lookups included, with the wait for room beside other loads, which is 256 steps at
most."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    built = World()
    built.install(monkeypatch)
    return built


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Number of promotions by tier and result."""
    total: dict[str, int] = {}
    take = TierStack.take_counts

    def take_counts(stack: TierStack) -> Any:
        counts = take(stack)
        for tier, each in counts.tiers.items():
            for result, number in each.promotions.items():
                total[f"{tier} {result}"] = total.get(f"{tier} {result}", 0) + number
        return counts

    monkeypatch.setattr(TierStack, "take_counts", take_counts)
    return total


def three(mix: Mix, directory: str | Path, chunks: int = LARGE, **more: Any) -> Connector:
    waits = {"load_timeout_seconds": LOAD_S, "pending_timeout_seconds": LOOKUP_S}
    # A step of the oracle takes no time, so no speed can be measured.
    return stacked(mix, directory, chunks=chunks, compute_tokens_per_second=10_000, **waits, **more)


@pytest.mark.parametrize("mix", but_full(NAMED, QWEN3_NEXT), ids=lambda mix: mix.name)
def test_a_remote_store_that_is_late_wrong_and_lossy_costs_only_time(
    mix: Mix, world: World, moved: dict[str, int]
) -> None:
    tally = Tally()

    @profile(30)
    @given(scenarios(mix), st.sampled_from((SMALL, LARGE)), st.integers(0, 1 << 32))
    def check(scenario: Scenario, chunks: int, seed: int) -> None:
        world.begin_anew()
        world.capacity_bytes = CAPACITY_BYTES if seed % 2 else 16 * chunks * 4096
        with tempfile.TemporaryDirectory() as directory:
            tally.add(run(mix, with_connector(scenario, three(mix, directory, chunks)), world.steps(seed)))
        with tempfile.TemporaryDirectory() as directory:
            # Another host: of what was stored only the store elsewhere is left.
            tally.add(run(mix, with_connector(scenario, three(mix, directory, chunks)), world.steps(seed + 1)))

    check()
    assert tally.with_restored > tally.scenarios // 10, tally
    assert world.longest_wait_s <= ALL_WAITS_S
    assert moved.get("disk done", 0) + moved.get("peer done", 0) > 0, moved


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_another_host_restores_chunks_that_only_the_remote_store_holds(
    mix: Mix, world: World, moved: dict[str, int], tmp_path: Path
) -> None:
    store_and_lose(mix, world, tmp_path)
    with open_second(mix, world, tmp_path) as engine:
        ask_again(engine)
        assert engine.restored_tokens > 0
        engine.scheduler_connector.get_kv_connector_stats()  # type: ignore[union-attr]
    assert moved.get("peer done", 0) > 0 and moved.get("disk done", 0) == 0, moved


@pytest.mark.parametrize(("num_uses", "is_shared"), [(1, False), (2, True)])
@pytest.mark.parametrize("mix", [QWEN3_NEXT, GEMMA3, GPT_OSS], ids=lambda mix: mix.name)
def test_a_prompt_served_again_by_the_engines_own_cache_counts_as_reused(
    mix: Mix, num_uses: int, is_shared: bool, world: World, tmp_path: Path
) -> None:
    world.cascades = CascadePolicy.REUSED
    with opened(mix, world, tmp_path / "first") as engine:
        for number in range(num_uses):
            engine.submit(f"use {number}", PROMPT, 2)
            engine.drain()
        assert engine.restored_tokens == 0, "its own cache holds it"
    with open_second(mix, world, tmp_path) as engine:
        ask_again(engine)
        assert (engine.restored_tokens > 0) is is_shared


@pytest.mark.parametrize("chunk_blocks", [1, 2])
@pytest.mark.parametrize("mix", [QWEN3_NEXT, GEMMA3, GPT_OSS], ids=lambda mix: mix.name)
def test_reused_prompts_are_restored_on_another_host_as_if_all_were_shared(
    mix: Mix, chunk_blocks: int, world: World, tmp_path: Path
) -> None:
    """Where chunks are longer than blocks, the engine's own cache resumes between two boundaries of the tiers. Where
    prompts diverge, a state is stored only for the second one."""
    chunk_tokens = chunk_blocks * mix.alignment_tokens
    prompts = [PROMPT[:length] for length in range(60, len(PROMPT), 43)]
    branches = [PROMPT[:200] + [number] * 50 for number in range(1, 5)]
    restored: dict[CascadePolicy, list[int]] = {}
    for cascades in (CascadePolicy.ALL, CascadePolicy.REUSED):
        world.begin_anew()
        world.cascades = cascades
        with opened(mix, world, tmp_path / f"first {cascades}", chunk_tokens=chunk_tokens) as engine:
            for number, prompt in enumerate([*prompts, *prompts, *branches[:-1]]):
                engine.submit(f"use {number}", prompt, 2)
                engine.drain()
        restored[cascades] = []
        with opened(mix, world, tmp_path / f"second {cascades}", chunk_tokens=chunk_tokens) as engine:
            for number, prompt in enumerate([*prompts, branches[-1]]):
                before = engine.restored_tokens
                engine.submit(f"again {number}", [*prompt, 1], 2)
                engine.drain()
                restored[cascades].append(engine.restored_tokens - before)
    assert restored[CascadePolicy.REUSED] == restored[CascadePolicy.ALL]
    assert sum(restored[CascadePolicy.ALL]) > 0


def test_a_short_prompt_waits_for_no_round_trip(world: World, tmp_path: Path) -> None:
    with open_second(GPT_OSS, world, tmp_path) as engine:
        engine.submit("short", PROMPT[:30], 2)
        engine.drain()
        assert world.store.num_lookups > 0 and world.longest_wait_s == 0.0
        engine.submit("long", PROMPT, 2)
        engine.drain()
        assert world.store.num_lookups > 0


def test_a_store_that_never_answers_is_awaited_until_its_deadline(world: World, tmp_path: Path) -> None:
    world.store.is_silent = True
    assert wait_for_answers(world, tmp_path) <= ASK_S + 2 * STEP_S


def test_a_store_that_never_answers_is_not_awaited_after_a_few_failures(world: World, tmp_path: Path) -> None:
    world.store.is_silent = True
    names = [f"long {number}" for number in range(BreakerOptions().failures + 3)]
    with open_second(GPT_OSS, world, tmp_path) as engine:
        for first, name in enumerate(names):
            engine.submit(name, [first, *PROMPT], 2)
            engine.drain()
    waited = [name for name in names if world.waited_s.get(name, 0.0) > 0.0]
    assert waited and waited == names[: len(waited)] and len(waited) <= BreakerOptions().failures, world.waited_s


def test_a_short_prompt_does_not_wait_for_the_lookup_of_a_long_one(world: World, tmp_path: Path) -> None:
    world.store.answer_s = 0.003
    with open_second(GPT_OSS, world, tmp_path) as engine:
        engine.submit("measured", [5, *PROMPT[:29]], 2)
        engine.drain()
        world.store.is_silent = True
        engine.submit("long", PROMPT, 2)
        engine.submit("short", PROMPT[:30], 2)
        engine.drain()
    assert world.waited_s.get("short", 0.0) == 0.0 and world.waited_s["long"] > 0.0, world.waited_s


@pytest.mark.parametrize("is_told_apart", [True, False])
def test_an_index_that_ignores_the_deadline_delays_no_request(
    is_told_apart: bool, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the negative control of the tests above: where lookups are taken for stores, the wait is too long."""
    ask = RemoteIndex.start_lookup
    monkeypatch.setattr(RemoteIndex, "start_lookup", lambda index, keys, deadline_s: ask(index, keys, deadline_s + 1.0))
    if not is_told_apart:
        monkeypatch.setattr(TierStack, "is_lookup_pending", lambda stack, key: False)
    world.store.is_silent = True
    assert (wait_for_answers(world, tmp_path) <= ASK_S + 2 * STEP_S) is is_told_apart


@pytest.mark.parametrize("mix", [GEMMA3, GPT_OSS, QWEN3_NEXT], ids=lambda mix: mix.name)
def test_wrong_bytes_of_the_remote_store_reach_the_oracle(
    mix: Mix, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: bytes of the remote store reach the engine, and the oracle checks them."""
    store_and_lose(mix, world, tmp_path)
    monkeypatch.setattr(world, "make_medium", lambda rank: CorruptingMedium(world.store, rank))
    with open_second(mix, world, tmp_path) as engine, pytest.raises(CorruptionError):
        ask_again(engine)


class CorruptingMedium(RemoteMedium):
    """Changes a bit of every chunk that it loads, and reports success."""

    def load(self, ticket: Any, key: Key, slot: Any, destination: Sequence[Any]) -> None:
        super().load(ticket, key, slot, destination)
        self._spoilt = [*getattr(self, "_spoilt", []), destination]

    def poll(self) -> list[Completion]:
        completions = super().poll()
        if completions:
            for view in itertools.chain.from_iterable(map(byte_views, self._spoilt)):
                view[0] ^= 1
            self._spoilt = []
        return completions


PROMPT = [(7 * number) % 199 for number in range(300)]


def store_and_lose(mix: Mix, world: World, directory: Path) -> None:
    """The remote store holds a prompt, and the tiers of the engine itself are gone."""
    with opened(mix, world, directory / "first") as engine:
        engine.submit("cold", PROMPT, 2)
        engine.drain()
        assert stack_of(engine).secondary[PEER].num_keys > 0


def open_second(mix: Mix, world: World, directory: Path) -> OracleEngine:
    return opened(mix, world, directory / "second")


def opened(mix: Mix, world: World, directory: Path, **more: Any) -> OracleEngine:
    """An engine with simulated time and no faults."""
    settings = EngineSettings(
        num_blocks=400, max_step_tokens=64, retention_tokens=None, connector=three(mix, directory, **more)
    )
    return OracleEngine(mix, settings, world.steps(0, is_kind=True))


def ask_again(engine: OracleEngine) -> None:
    engine.submit("warm", PROMPT, 2)
    engine.drain()


def wait_for_answers(world: World, directory: Path) -> float:
    with open_second(GPT_OSS, world, directory) as engine:
        ask_again(engine)
        assert world.store.num_lookups > 0 and engine.restored_tokens == 0
    return world.longest_wait_s
