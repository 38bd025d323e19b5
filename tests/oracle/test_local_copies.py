"""Blocks that the engine holds beyond its deepest state are copied locally: never a wrong byte, and none is loaded."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridkv.connectors.vllm import CONNECTOR, register
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.offload.loads.local_blocks import LocalBlocks
from hybridkv.connectors.vllm.offload.scheduler import OffloadScheduler
from hybridkv.tiers.ram import RamIndex
from oracle.disk_tier import LARGE, SMALL, forget, stack_of, stacked
from oracle.engine import LeakError, OracleEngine
from oracle.lost_blocks import lose, losing
from oracle.mixes import GEMMA3, QWEN3_NEXT, Kind, Mix
from oracle.mutants import of_another_place
from oracle.profile import profile
from oracle.rings import LOADS, MIXES
from oracle.runner import CorruptionError
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPT = list(range(100))
FEW_BLOCKS = 14
"""Enough for one request with such a prompt, with hardly any room for cached blocks of another."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


@dataclass
class Seen:
    """Totals of loads that did not fail, on one rank."""

    loads: int = 0
    tier_bytes: int = 0
    local_tokens: int = 0
    local_bytes: int = 0
    sources: set[str] = field(default_factory=set)
    """Tiers that held the copied content."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    load, local = ConnectorMetrics.load, ConnectorMetrics.local

    def loading(metrics: ConnectorMetrics, num_bytes: int, failed: bool, failures: Any) -> None:
        found.loads += not failed
        found.tier_bytes += num_bytes * (not failed)
        load(metrics, num_bytes, failed, failures)

    def copying(metrics: ConnectorMetrics, source: str, num_tokens: int, num_bytes: int) -> None:
        found.local_tokens += num_tokens
        found.local_bytes += num_bytes
        found.sources |= {source} if num_bytes else set()
        local(metrics, source, num_tokens, num_bytes)

    monkeypatch.setattr(ConnectorMetrics, "load", loading)
    monkeypatch.setattr(ConnectorMetrics, "local", copying)
    return found


def offload(mix: Mix, load: str = "async", **extra: Any) -> Connector:
    tiers = [{"type": "ram", "capacity": "64MiB"}]
    return Connector(CONNECTOR, {"chunk_tokens": mix.alignment_tokens, "tiers": tiers, "load": load, **extra})


def settings(mix: Mix, num_blocks: int = 200, **extra: Any) -> EngineSettings:
    # Every state is kept, so that each boundary can be resumed.
    return EngineSettings(
        num_blocks=num_blocks, max_step_tokens=16, retention_tokens=None, connector=offload(mix, **extra)
    )


def lose_states(engine: OracleEngine) -> None:
    """Loses the states, so that the engine has no hit although it holds all attention."""
    lose(engine, lambda group, _: engine.mix.groups[group].kind is Kind.RECURRENT)


def evict_last(engine: OracleEngine) -> None:
    """Makes the remaining blocks the last to be given out, the end of a prefix first, once its stores have ended."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    left = [block for block in pool.blocks if block.ref_cnt == 0 and block.block_hash is not None]
    pool.touch(left)
    pool.free_blocks(sorted(left, key=lambda block: -(block.block_hash_num_tokens or 0)))


def restore(engine: OracleEngine) -> None:
    engine.submit("cold", PROMPT, 2)
    engine.drain()
    lose_states(engine)
    evict_last(engine)
    engine.submit("warm", PROMPT, 2)
    engine.drain()
    engine.check_idle()


@pytest.mark.parametrize("load", LOADS)
def test_attention_blocks_held_beyond_the_state_are_not_loaded_again(load: str, seen: Seen) -> None:
    with OracleEngine(QWEN3_NEXT, settings(QWEN3_NEXT, load=load)) as engine:
        restore(engine)
        restored = engine.restored_tokens
        states = 3 * engine.scheduler_connector._layout.content_bytes(0)  # type: ignore[union-attr]
        attention = restored // 16 * engine.scheduler_connector._layout.content_bytes(3)  # type: ignore[union-attr]
    assert restored == 96
    assert seen == Seen(1, states, restored, attention, {"ram"})


def test_everything_is_loaded_with_local_copies_disabled(seen: Seen) -> None:
    with OracleEngine(QWEN3_NEXT, settings(QWEN3_NEXT, local_copies=False)) as engine:
        restore(engine)
        assert engine.restored_tokens == 96
    assert seen.loads == 1 and seen.local_tokens == seen.local_bytes == 0


def test_loads_before_the_forward_pass_use_no_local_copies(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a pass comes after all loads of its step, so hashed blocks may lack the content that it is going to
    write."""
    monkeypatch.setattr(compat, "loads_after_forward", lambda output: False)
    with OracleEngine(QWEN3_NEXT, settings(QWEN3_NEXT)) as engine:
        restore(engine)
        assert engine.restored_tokens == 96
    assert seen.loads == 1 and seen.local_tokens == seen.local_bytes == 0 and seen.tier_bytes > 0


def test_blocks_given_out_to_the_request_itself_are_loaded(seen: Seen) -> None:
    """The pool has room for the new blocks only if it reuses blocks with the same content."""
    with OracleEngine(QWEN3_NEXT, settings(QWEN3_NEXT, FEW_BLOCKS)) as engine:
        restore(engine)
        assert engine.restored_tokens == 96
    assert (seen.loads, seen.local_tokens) == (1, 64)


def test_needless_promotions_are_counted_for_the_tier_that_held_them(seen: Seen, tmp_path: Path) -> None:
    connector = stacked(QWEN3_NEXT, tmp_path)
    with OracleEngine(QWEN3_NEXT, replace(settings(QWEN3_NEXT), connector=connector)) as engine:
        engine.submit("cold", PROMPT, 2)
        engine.drain()
        near = stack_of(engine).primary
        assert isinstance(near, RamIndex)
        near.clear()
        lose_states(engine)
        engine.submit("warm", PROMPT, 2)
        engine.drain()
        engine.check_idle()
        assert engine.restored_tokens == seen.local_tokens == 96
    assert seen.sources == {"disk"}


@pytest.mark.parametrize("steps", range(1, 4))
@pytest.mark.parametrize("in_step", [True, False])
def test_an_abort_during_local_copies_frees_all_blocks(steps: int, in_step: bool) -> None:
    with OracleEngine(QWEN3_NEXT, settings(QWEN3_NEXT)) as engine:
        engine.submit("cold", PROMPT, 2)
        engine.drain()
        lose_states(engine)
        engine.submit("warm", PROMPT, 2)
        for _ in range(steps - 1):
            engine.step()
        engine.abort("warm", in_step=in_step)
        engine.step()
        engine.drain()
        engine.check_idle()
        engine.reset_prefix_cache()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_copies_from_the_engines_own_blocks_never_corrupt(mix: Mix, load: str, seen: Seen) -> None:
    tally = Tally()

    @profile(120)
    @given(scenarios(mix), st.integers(0, 1 << 32))
    def check(scenario: Scenario, seed: int) -> None:
        waves = tuple(replace(wave, reset_engine=False) for wave in scenario.waves)
        scenario = replace(scenario, waves=waves)
        tally.add(run(mix, with_connector(scenario, offload(mix, load)), losing(Random(seed))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
    assert seen.local_bytes > 0, seen


def test_copies_from_the_engines_own_blocks_never_corrupt_random_mixes(seen: Seen) -> None:
    tally = Tally()

    @profile(200)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(mixes())
        scenario = data.draw(scenarios(mix))
        scenario = replace(scenario, waves=tuple(replace(wave, reset_engine=False) for wave in scenario.waves))
        hook = losing(Random(data.draw(st.integers(0, 1 << 32))))
        tally.add(run(mix, with_connector(scenario, offload(mix)), hook))

    check()
    assert tally.with_preemptions > 0, tally
    assert seen.local_bytes > 0, seen


def test_copies_beside_a_disk_never_corrupt(seen: Seen) -> None:
    tally = Tally()

    @profile(60)
    @given(scenarios(QWEN3_NEXT), st.sampled_from((SMALL, LARGE)), st.integers(0, 1 << 32))
    def check(scenario: Scenario, chunks: int, seed: int) -> None:
        scenario = replace(scenario, waves=tuple(replace(wave, reset_engine=False) for wave in scenario.waves))
        random = Random(seed)
        hooks = (losing(random), forget(random))

        def before_step(engine: OracleEngine, step: int) -> None:
            for hook in hooks:
                hook(engine, step)

        with tempfile.TemporaryDirectory() as directory:
            tally.add(
                run(QWEN3_NEXT, with_connector(scenario, stacked(QWEN3_NEXT, directory, chunks=chunks)), before_step)
            )

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
    assert seen.sources == {"ram", "disk"}, seen


# Injected faults. The oracle must find each of them, or it proves nothing.


def of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a window are copied from those of its neighbour, which has the same shape."""
    cached = compat.cached_block
    monkeypatch.setattr(
        compat, "cached_block", lambda pool, name, group: cached(pool, name, group + 1 if group < 4 else group)
    )


def blocks_given_out_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are looked up before the engine gives out new ones, which may be the same."""
    seen: dict[tuple[Any, int], int | None] = {}
    cached, ask = compat.cached_block, OffloadScheduler.matched_tokens

    def asking(scheduler: Any, request: Any, computed_tokens: int) -> int | None:
        pool = scheduler._loads._pool
        for name in request.block_hashes:
            seen[name, 3] = cached(pool, name, 3)
        return ask(scheduler, request, computed_tokens)

    monkeypatch.setattr(OffloadScheduler, "matched_tokens", asking)
    monkeypatch.setattr(compat, "cached_block", lambda pool, name, group: seen.get((name, group)))


def blocks_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are being copied may be given to the next request."""
    monkeypatch.setattr(LocalBlocks, "pin", lambda *arguments: None)


def blocks_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBlocks, "free", lambda *arguments: None)


def without_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fault."""


def is_found(mix: Mix, num_blocks: int) -> bool:
    """Whether the oracle, or the connector itself, finds an error after the engine has lost a part."""
    with OracleEngine(mix, settings(mix, num_blocks, load="sync")) as engine:
        engine.submit("cold", PROMPT, 2)
        engine.drain()
        if mix is QWEN3_NEXT:
            lose_states(engine)
        else:
            lose(engine, lambda group, _: group == 4)
        evict_last(engine)
        engine.submit("warm", PROMPT, 2)
        engine.submit("other", PROMPT[:-21:-1], 2)
        try:
            engine.drain()
            engine.check_idle()
        except (CorruptionError, LeakError):
            return True
        assert engine.restored_tokens > 0
        return engine.failed_loads > 0


@pytest.mark.parametrize(
    ("mix", "num_blocks", "wrong", "is_wrong"),
    [
        (QWEN3_NEXT, 40, of_another_place, True),
        (GEMMA3, 200, of_another_place, True),
        (GEMMA3, 200, of_another_group, True),
        (QWEN3_NEXT, FEW_BLOCKS, blocks_given_out_meanwhile, True),
        (QWEN3_NEXT, 17, blocks_not_pinned, True),
        (QWEN3_NEXT, 40, blocks_never_freed, True),
        (QWEN3_NEXT, FEW_BLOCKS, without_fault, False),
        (QWEN3_NEXT, 17, without_fault, False),
        (QWEN3_NEXT, 40, without_fault, False),
        (GEMMA3, 200, without_fault, False),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", str(value)),
)
def test_copies_from_wrong_blocks_are_found(
    mix: Mix,
    num_blocks: int,
    wrong: Callable[[pytest.MonkeyPatch], None],
    is_wrong: bool,
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong(monkeypatch)
    assert is_found(mix, num_blocks) is is_wrong
    assert is_wrong or seen.local_bytes > 0
