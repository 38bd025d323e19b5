"""HybridOffloadConnector never lets the engine read a wrong byte, loses no request and leaks no block."""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, register
from hybridkv.connectors.vllm.common import layout
from hybridkv.planner import GroupKind, GroupSpec, Transfer
from hybridkv.tiers import TierCounts
from hybridkv.tiers.ram import RamIndex
from oracle.engine import OracleEngine
from oracle.mixes import GEMMA3, GPT_OSS, HEADS_BEFORE_LAYERS, NAMED, QWEN3_NEXT, Mix
from oracle.planned import change_loads
from oracle.profile import profile
from oracle.rings import LOADS, MIXES, but_full
from oracle.runner import CorruptionError
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from hybridkv.planner import CacheSpec

NEVER_FULL = "64MiB"


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def offload(load: str, chunk_tokens: int | str, capacity: int | str = NEVER_FULL) -> Connector:
    tiers = [{"type": "ram", "capacity": capacity}]
    return Connector(CONNECTOR, {"chunk_tokens": chunk_tokens, "tiers": tiers, "load": load})


def _chunk_tokens(mix: Mix) -> st.SearchStrategy[int | str]:
    return st.sampled_from(("auto", mix.alignment_tokens, 2 * mix.alignment_tokens))


BOTH = but_full(
    itertools.product(NAMED, ("async", "sync")),
    *((mix, "async") for mix in NAMED),
    (GEMMA3, "sync"),
    (QWEN3_NEXT, "sync"),
)


@pytest.mark.parametrize(("mix", "load"), BOTH, ids=lambda value: getattr(value, "name", value))
def test_offload_never_corrupts(mix: Mix, load: str) -> None:
    tally = Tally()

    @profile(160)
    @given(scenarios(mix, st.booleans()), _chunk_tokens(mix))
    def check(scenario: Scenario, chunk_tokens: int | str) -> None:
        tally.add(run(mix, with_connector(scenario, offload(load, chunk_tokens))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally


@pytest.mark.parametrize("load", LOADS)
def test_offload_never_corrupts_random_mixes(load: str) -> None:
    tally = Tally()

    @profile(300)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(mixes())
        scenario = data.draw(scenarios(mix, st.booleans()))
        tally.add(run(mix, with_connector(scenario, offload(load, data.draw(_chunk_tokens(mix))))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally


def test_blocks_with_heads_before_layers_never_corrupt() -> None:
    tally = Tally()

    @profile(50)
    @given(scenarios(HEADS_BEFORE_LAYERS, st.booleans()), _chunk_tokens(HEADS_BEFORE_LAYERS))
    def check(scenario: Scenario, chunk_tokens: int | str) -> None:
        tally.add(run(HEADS_BEFORE_LAYERS, with_connector(scenario, offload("async", chunk_tokens))))

    check()
    assert tally.with_restored > tally.scenarios // 5, tally


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_rehashed_tokens_never_corrupt(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an engine whose own block hashes differ between processes."""
    monkeypatch.setattr("hybridkv.connectors.vllm.common.compat.STABLE_HASHES", ())
    tally = Tally()

    @profile(40)
    @given(scenarios(mix))
    def check(scenario: Scenario) -> None:
        tally.add(run(mix, with_connector(scenario, offload("async", mix.alignment_tokens))))

    check()
    assert tally.with_restored > tally.scenarios // 5, tally


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_groups_of_a_drafter_never_corrupt(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention as if it were a drafter's: its chunks depend on the token after them."""
    translate = layout._group_spec

    def with_lookahead(path: str, group: Any, hash_tokens: int) -> GroupSpec:
        spec = translate(path, group, hash_tokens)
        is_full = spec.kind is GroupKind.FULL
        return msgspec.structs.replace(spec, lookahead_tokens=hash_tokens) if is_full else spec

    monkeypatch.setattr(layout, "_group_spec", with_lookahead)
    tally = Tally()

    @profile(40)
    @given(scenarios(mix))
    def check(scenario: Scenario) -> None:
        tally.add(run(mix, with_connector(scenario, offload("async", mix.alignment_tokens))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_tier_that_evicts_all_the_time_never_corrupts(mix: Mix, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = Tally()
    evictions = 0
    take_counts = RamIndex.take_counts

    def counting(index: RamIndex) -> TierCounts:
        nonlocal evictions
        counts = take_counts(index)
        evictions += counts.evictions
        return counts

    monkeypatch.setattr(RamIndex, "take_counts", counting)
    # The smallest chunk takes a granule of 4 KiB: room for about two chunks of each group. A prompt has few large
    # chunks: room for one of each group.
    capacity = 4096 * (len(mix.groups) + 1) * (2 if mix.alignment_tokens < 64 else 1)

    @profile(60)
    @given(scenarios(mix))
    def check(scenario: Scenario) -> None:
        tally.add(run(mix, with_connector(scenario, offload("async", mix.alignment_tokens, capacity))))

    check()
    assert evictions > 0
    assert tally.with_restored > 0, tally


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_corrupt_chunks_are_recomputed_and_never_read(mix: Mix, load: str) -> None:
    """Bits flip in the tier between any two steps; every load of such a chunk must fail, and its request recover."""
    tally = Tally()

    @profile(60)
    @given(scenarios(mix), st.integers(0, 1 << 32))
    def check(scenario: Scenario, seed: int) -> None:
        # How often a bit flips depends on the copy thread, so hypothesis draws the seed and not the bits.
        damage = flip_bits(Random(seed))
        tally.add(run(mix, with_connector(scenario, offload(load, mix.alignment_tokens)), damage))

    check()
    assert tally.with_failed_loads > tally.scenarios // 10, tally


def flip_bits(random: Random) -> Callable[[OracleEngine, int], None]:
    """A hook that corrupts one sealed chunk of the tier before a step, while nothing is being copied.

    A slot that is being written may hold its former seal; damage between the copy and its new seal would be sealed with
    it.
    """

    def before_step(engine: OracleEngine, step: int) -> None:
        worker = engine.worker_connector._worker  # type: ignore[union-attr]
        arena = worker._arena
        sealed = sorted(arena._seals)
        if sealed and not worker._copies._open:
            arena._buffer[random.choice(sealed)] ^= 1 << random.randrange(8)

    return before_step


# Wrong planners. The oracle must find each of them, or it proves nothing.


def skip_a_block_of_the_window(spec: CacheSpec, transfers: list[Transfer]) -> list[Transfer]:
    """The window begins one block too late."""
    for i, each in enumerate(transfers):
        if spec.groups[each.group_index].kind is GroupKind.WINDOW:
            cut = Transfer(each.group_index, each.end_token, each.first_block + 1, each.block_ids[1:])
            return [*transfers[:i], cut, *transfers[i + 1 :]]
    return transfers


def shift_the_window_by_a_block(spec: CacheSpec, transfers: list[Transfer]) -> list[Transfer]:
    """Every block of the window is written one place further."""
    return [
        Transfer(each.group_index, each.end_token, each.first_block, (*each.block_ids[1:], each.block_ids[0]))
        if spec.groups[each.group_index].kind is GroupKind.WINDOW
        else each
        for each in transfers
    ]


def take_the_state_before(spec: CacheSpec, transfers: list[Transfer]) -> list[Transfer]:
    """Loads the recurrent state of the boundary before the right one."""
    return [
        Transfer(each.group_index, each.end_token - spec.chunk_tokens, each.first_block, each.block_ids)
        if spec.groups[each.group_index].kind is GroupKind.RECURRENT
        else each
        for each in transfers
    ]


@pytest.mark.parametrize(
    ("mix", "chunk_tokens", "wrong"),
    [
        (GPT_OSS, 8, skip_a_block_of_the_window),
        (GEMMA3, 8, skip_a_block_of_the_window),
        (GEMMA3, 48, shift_the_window_by_a_block),
        (QWEN3_NEXT, 16, take_the_state_before),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
def test_a_wrong_planner_is_caught(
    mix: Mix, chunk_tokens: int, wrong: Any, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_wrong:
        change_loads(monkeypatch, lambda spec, _, transfers: wrong(spec, transfers))
    # Every state is kept, so that the one before the right one is stored as well.
    settings = EngineSettings(
        num_blocks=200, max_step_tokens=16, retention_tokens=None, connector=offload("async", chunk_tokens)
    )
    with OracleEngine(mix, settings) as engine:
        engine.submit("cold", list(range(100)), 2)
        engine.drain()
        engine.reset_prefix_cache()
        engine.submit("warm", list(range(100)), 2)
        if is_wrong:
            with pytest.raises(CorruptionError):
                engine.drain()
        else:
            engine.drain()
            assert engine.restored_tokens > 0
