"""Prompts that end inside a block are restored up to their last hash unit, and no wrong byte is ever read.

The oracle checks each token of a block and each state by itself, so it notices a tail that is too long, too short or of
another prompt. For its own hits inside blocks vLLM copies blocks, and there this engine does what vLLM 0.32 intends and
does not do: it copies all of a block, and one copy after the other. In one step a block may be copied to a second one
and that to a third, where two requests with the same prompt come together; vLLM reads all before it writes any.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, PEER_CONNECTOR, register
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.nixl import worker
from hybridkv.planner import GroupKind, Transfer
from kits.peers import in_memory
from oracle import mixes
from oracle.block_store import block_store
from oracle.disk_tier import SMALL, forget, stacked
from oracle.engine import OracleEngine
from oracle.memory import KVMemory, copy_in_order
from oracle.mixes import QWEN3_NEXT, Group, Kind, Layers, Mix
from oracle.mutants import tails_without_length
from oracle.pairs import CALM
from oracle.planned import change_loads
from oracle.profile import profile
from oracle.remote_tier import World
from oracle.rings import LOADS, but_full
from oracle.runner import CorruptionError, FakeRunner
from oracle.scenarios import Scenario, run, scenarios, with_connector
from oracle.settings import HAS_TAILS, Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hybridkv.planner import CacheSpec

pytestmark = pytest.mark.skipif(not HAS_TAILS, reason="vLLM before 0.32 does not say where it hands over states")

STATE = Group(Kind.RECURRENT, 16, (Layers(2, cell_bytes=392),), page_bytes=512)
TWO_SIZES = Mix(
    "two_sizes",
    (STATE, Group(Kind.FULL, 32, (Layers(2, cell_bytes=8, heads=2),))),
)
"""Blocks of 16 and 32: states are inside a chunk even where they end a block."""
UNITS = {QWEN3_NEXT.name: (2, 4, 8), TWO_SIZES.name: (4, 8)}
MIXES = (QWEN3_NEXT, TWO_SIZES)


copy_together = KVMemory.copy_blocks


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setattr(KVMemory, "copy_blocks", copy_in_order)
    monkeypatch.setattr(compat, "copies_whole_blocks", lambda: True)


class TailLoads:
    """Number of loads that end inside a chunk, and of the others. A mutant replaces the transfers of the former by
    `change`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Any = None) -> None:
        self.tails = self.chunks = 0
        self.is_changed = False

        def seen(spec: CacheSpec, num_tokens: int, transfers: list[Transfer]) -> list[Transfer] | None:
            is_tail = num_tokens % spec.chunk_tokens > 0
            self.tails += is_tail
            self.chunks += not is_tail
            return change(spec, transfers) if self.is_changed and is_tail else None

        change_loads(monkeypatch, seen)


def offload(load: str, chunk_tokens: int | str = "auto", capacity: int | str = "64MiB") -> Connector:
    tiers = [{"type": "ram", "capacity": capacity}]
    return Connector(CONNECTOR, {"chunk_tokens": chunk_tokens, "tiers": tiers, "load": load})


def hashing(scenario: Scenario, unit: int) -> Scenario:
    """With a `prefix_match_unit`."""
    return replace(scenario, settings=replace(scenario.settings, hash_tokens=unit))


def tail_of(engine: OracleEngine) -> int | None:
    tail: int | None = engine.scheduler_connector._layout.spec.tail_tokens  # type: ignore[union-attr]
    return tail


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_tails_never_corrupt(mix: Mix, load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, num_scenarios = TailLoads(monkeypatch), 0

    @profile(160)
    @given(scenarios(mix), st.sampled_from(UNITS[mix.name]), st.sampled_from((1, 1, 2)))
    def check(scenario: Scenario, unit: int, blocks: int) -> None:
        nonlocal num_scenarios
        num_scenarios += 1
        connector = offload(load, blocks * mix.alignment_tokens)
        assert tail_of(run(mix, with_connector(hashing(scenario, unit), connector))) == unit

    check()
    assert loads.tails > num_scenarios // 8 and loads.chunks > 0, (loads.tails, loads.chunks, num_scenarios)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_tails_in_a_tier_that_evicts_all_the_time_never_corrupt(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = TailLoads(monkeypatch)
    capacity = 2 * 4096 * (len(mix.groups) + 1)

    @profile(60)
    @given(scenarios(mix), st.sampled_from(UNITS[mix.name]))
    def check(scenario: Scenario, unit: int) -> None:
        run(mix, with_connector(hashing(scenario, unit), offload("async", capacity=capacity)))

    check()
    assert loads.tails > 0


@pytest.mark.parametrize("chunks", but_full((SMALL, 500), SMALL))
def test_tails_are_restored_from_a_disk(chunks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, number = TailLoads(monkeypatch), 0

    @profile(40)
    @given(scenarios(QWEN3_NEXT), st.sampled_from(UNITS[QWEN3_NEXT.name]), st.integers(0, 1 << 32))
    def check(scenario: Scenario, unit: int, seed: int) -> None:
        nonlocal number
        number += 1
        connector = stacked(QWEN3_NEXT, tmp_path / str(number), chunks=chunks)
        run(QWEN3_NEXT, with_connector(hashing(scenario, unit), connector), forget(Random(seed)))

    check()
    assert loads.tails > 0


def test_tails_are_restored_from_a_tier_with_async_lookups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request looks up the tails after its last chunk: another engine stored the same prompt there."""
    loads, world = TailLoads(monkeypatch), World()
    world.install(monkeypatch)
    settings = EngineSettings(num_blocks=200, hash_tokens=4)
    prompt = list(range(103))
    for number in range(2):
        connector = stacked(QWEN3_NEXT, tmp_path / str(number), pending_timeout_seconds=1.0)
        with OracleEngine(QWEN3_NEXT, replace(settings, connector=connector), world.steps(0, is_kind=True)) as engine:
            engine.submit("request", prompt, 2)
            engine.drain()
            assert engine.restored_tokens == (100 if number else 0)
    assert loads.tails == 1


@pytest.mark.parametrize("is_in_order", [True, False])
def test_two_requests_inside_one_block_in_one_step_need_ordered_copies(
    is_in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a connector. When this fails, vLLM makes no such chain any more, and copies may be made together."""
    if not is_in_order:
        monkeypatch.setattr(KVMemory, "copy_blocks", copy_together)
    first, longer = list(range(15)), list(range(60))
    with OracleEngine(QWEN3_NEXT, EngineSettings(num_blocks=200, max_step_tokens=256, hash_tokens=2)) as engine:
        engine.submit("first", first, 2)
        engine.drain()
        for name in ("second", "third"):
            engine.submit(name, longer, 2)
        if is_in_order:
            engine.drain()
            assert engine.local_hit_tokens == 28
        else:
            with pytest.raises(CorruptionError, match=r"group 3 .* holds zeros"):
                engine.drain()


# Wrong planners and keys. The oracle must find each of them, or it proves nothing.

UNIT = 4
PROMPTS = [list(range(length)) for length in (107, 103)]
"""Two prompts, one the beginning of the other: their tails end at 104 and at 100."""


def tail_before(kind: GroupKind) -> Callable[[CacheSpec, list[Transfer]], list[Transfer]]:
    """Groups of this kind load the tail one unit before."""

    def change(spec: CacheSpec, transfers: list[Transfer]) -> list[Transfer]:
        return [
            Transfer(each.group_index, each.end_token - UNIT, each.first_block, each.block_ids)
            if spec.groups[each.group_index].kind is kind and each.end_token % spec.chunk_tokens
            else each
            for each in transfers
        ]

    return change


def chunk_before(spec: CacheSpec, transfers: list[Transfer]) -> list[Transfer]:
    """Loads the state of the chunk before the tail."""
    return [
        Transfer(each.group_index, each.end_token // spec.chunk_tokens * spec.chunk_tokens, 0, each.block_ids)
        if spec.groups[each.group_index].kind is GroupKind.RECURRENT
        else each
        for each in transfers
    ]


@pytest.mark.parametrize(
    "change",
    [None, tail_before(GroupKind.RECURRENT), tail_before(GroupKind.FULL), chunk_before],
    ids=["right", "state_before", "full_before", "state_of_the_chunk_before"],
)
def test_a_wrong_tail_is_caught(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tail is stored, so that the wrong one exists as well."""
    loads = TailLoads(monkeypatch, change)
    settings = EngineSettings(num_blocks=200, hash_tokens=UNIT, connector=offload("async"))
    with OracleEngine(QWEN3_NEXT, settings) as engine:
        for number, prompt in enumerate(PROMPTS[::-1]):
            engine.submit(f"cold {number}", prompt, 2)
            engine.drain()
            engine.reset_prefix_cache()
        loads.tails, loads.is_changed = 0, change is not None
        engine.submit("warm", PROMPTS[0], 2)
        if change is None:
            engine.drain()
        else:
            with pytest.raises(CorruptionError):
                engine.drain()
        assert loads.tails == 1


@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
def test_a_key_without_the_length_of_its_tail_is_caught(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_wrong:
        tails_without_length(monkeypatch)
    settings = EngineSettings(num_blocks=200, hash_tokens=UNIT, connector=offload("async"))
    with OracleEngine(QWEN3_NEXT, settings) as engine:
        engine.submit("cold", PROMPTS[1], 2)
        engine.drain()
        engine.reset_prefix_cache()
        engine.submit("warm", PROMPTS[0], 2)
        if is_wrong:
            with pytest.raises(CorruptionError):
                engine.drain()
        else:
            engine.drain()
            assert engine.restored_tokens == 100


@pytest.fixture
def saves_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend saves the last state of a prompt inside the last chunk, as Mamba2 does."""
    from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

    make, advance = mixes._spec, FakeRunner._advance_states

    def spec(group: Group, layers: Layers) -> Any:
        made = make(group, layers)
        if group.kind is not Kind.RECURRENT:
            return made
        return replace(made, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)

    def advance_states(runner: FakeRunner, plane: Any, work: Any) -> None:
        advance(runner, plane, work)
        for item in work:
            (offset,), (column,) = compute_mamba_prefill_checkpoints(
                [item.end], [item.end - item.start], 4, 16, 1, False, 4
            )
            if offset and (block := int(item.running.tables[plane.group][column])):
                plane.words[block, 0] = plane.expected(item.running.transcript)[item.start + offset - 1]

    monkeypatch.setattr(mixes, "_spec", spec)
    monkeypatch.setattr(FakeRunner, "_advance_states", advance_states)


@pytest.mark.usefixtures("saves_inside")
@pytest.mark.parametrize("is_guarded", [True, False], ids=["guarded", "not_guarded"])
@pytest.mark.parametrize("where", ["own_cache", "own_cache_below_others", "own_cache_of_producer", "tier"])
def test_a_state_before_a_chunk_that_saves_one_inside_is_not_served(
    where: str, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk [36, 90) begins inside a block and does not stop at its end, so vLLM takes the state of 36 for that of
    48. The state of 88 is saved inside the chunk and is correct."""
    if not is_guarded:
        monkeypatch.setattr(compat, "inner_checkpoints", lambda *arguments: {})
    connector = Connector(CONNECTOR, {"chunk_tokens": 16, "tiers": [{"type": "ram", "capacity": "64MiB"}]})
    if where == "own_cache_below_others":
        store = block_store(QWEN3_NEXT)
        child = {"kv_connector": store.name, "kv_connector_module_path": store.module_path}
        child["kv_connector_extra_config"] = store.extra_config  # type: ignore[assignment]
        connector = Connector(MULTI_CONNECTOR, {"connectors": [child]})
    if where == "own_cache_of_producer":
        monkeypatch.setattr(worker, "open_transport", lambda name: in_memory.InMemoryTransport(name, in_memory.World()))
        connector = Connector(PEER_CONNECTOR, {"weights_digest": "oracle", **CALM}, role="kv_producer")
    settings = EngineSettings(200, max_step_tokens=256, hash_tokens=4, retention_tokens=0, connector=connector)
    third = [*range(50), *range(200, 240)]
    with OracleEngine(QWEN3_NEXT, settings) as engine:
        for name, prompt in (("first", list(range(22))), ("second", list(range(64))), ("third", third)):
            engine.submit(name, prompt, 1)
            engine.drain()
        if where == "tier":
            engine.reset_prefix_cache()
        engine.submit("victim", [*third[:49], *range(300, 320)], 2)
        if not is_guarded:
            with pytest.raises(CorruptionError, match="victim"):
                engine.drain()
            return
        engine.drain()
        before = engine.restored_tokens + engine.local_hit_tokens
        engine.submit("longer", [*third, 7], 2)
        engine.drain()
        assert engine.restored_tokens + engine.local_hit_tokens >= before + 88
