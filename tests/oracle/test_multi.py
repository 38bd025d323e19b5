"""HybridMultiConnector over several stores: no wrong byte, no lost request, no leaked block, whichever store loads."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from hybridkv.connectors.vllm import CONNECTOR, MULTI_CONNECTOR, register
from hybridkv.connectors.vllm.multi.worker_side import MultiWorkerSide
from oracle.block_store import BlockStoreConnector, Metadata, block_store
from oracle.engine import OracleEngine
from oracle.mixes import GPT_OSS, Group, Kind, Layers, Mix
from oracle.profile import profile
from oracle.rings import LOADS, MIXES
from oracle.runner import CorruptionError, FakeRunner
from oracle.scenarios import Scenario, Tally, mixes, run, scenarios, with_connector
from oracle.settings import Connector, EngineSettings

if TYPE_CHECKING:
    from collections.abc import Callable

Entry = dict[str, Any]
DENSE = Mix("dense", (Group(Kind.FULL, 16, (Layers(2, cell_bytes=16, heads=2),)),))
"""One group: only then vLLM accepts reports of invalid blocks."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register()


def multi(*children: Entry) -> Connector:
    # Computing is as good as waiting here, so no child is waited for: the drawn scenario decides, not the clock.
    return Connector(MULTI_CONNECTOR, {"connectors": list(children), "lookup_timeout_seconds": 0})


def offload(chunk_tokens: int, capacity: int | str = "64MiB", load: str = "async", weight: float | str = 1.0) -> Entry:
    tiers = [{"type": "ram", "capacity": capacity}]
    extra = {"chunk_tokens": chunk_tokens, "tiers": tiers, "load": load, "load_weight": weight}
    return {"kv_connector": CONNECTOR, "kv_connector_extra_config": extra}


def foreign(mix: Mix, load: str, delay_steps: int, fail_every: int, weight: float) -> Entry:
    """The oracle's own small connector as a store of another vendor."""
    store = block_store(mix, load, delay_steps, fail_every)
    return {
        "kv_connector": store.name,
        "kv_connector_module_path": store.module_path,
        "kv_connector_extra_config": {**store.extra_config, "load_weight": weight},
    }


def small(mix: Mix) -> int:
    """Room for about two chunks of each group, so that the other store often has more."""
    return 4 * 4096 * (len(mix.groups) + 1)


weights = st.sampled_from((0.5, 1.0, 4.0, "auto"))


class Loaded:
    """Number of loads of each child."""

    def __init__(self) -> None:
        self.by_child: dict[str, int] = {}

    def add(self, engine: OracleEngine) -> OracleEngine:
        stats = engine.scheduler_connector._total  # type: ignore[union-attr]
        for name, child in stats.children.items():
            self.by_child[name] = self.by_child.get(name, 0) + child.hits
        return engine


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """Keeps the counts of the connectors."""
    from hybridkv.connectors.vllm.multi.connector import HybridMultiConnector
    from hybridkv.metrics import SelectionStats

    take = HybridMultiConnector.get_kv_connector_stats

    def taking(connector: Any) -> Any:
        total = connector.__dict__.setdefault("_total", SelectionStats())
        stats = take(connector)
        if stats is not None:
            total.merge(stats.selection)
        return stats

    monkeypatch.setattr(HybridMultiConnector, "get_kv_connector_stats", taking)
    return Loaded()


@pytest.mark.parametrize("num_blocks", [40, 200])
@pytest.mark.parametrize("has_sibling", [False, True])
def test_a_hit_of_an_offload_child_waits_for_room(num_blocks: int, has_sibling: bool) -> None:
    """The sibling has no hit. With few blocks, the second load must wait for the first request."""
    prompts = list(range(100)), list(range(1000, 1100))
    children = [offload(8), *([foreign(GPT_OSS, "async", 0, 0, 1.0)] if has_sibling else [])]
    with OracleEngine(GPT_OSS, EngineSettings(num_blocks=num_blocks, connector=multi(*children))) as engine:
        for number, prompt in enumerate(prompts):
            engine.submit(f"cold-{number}", prompt, 2)
            engine.drain()
        if has_sibling:
            engine.scheduler_connector.sub_connectors[1]._store.clear()  # type: ignore[union-attr]
        engine.reset_prefix_cache()
        for number, prompt in enumerate(prompts):
            engine.submit(f"warm-{number}", prompt, 2)
        engine.drain()
        assert engine.restored_tokens == 2 * 96
        engine.check_idle()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_two_offload_connectors_never_corrupt(mix: Mix, load: str, loaded: Loaded) -> None:
    tally = Tally()

    @profile(60)
    @given(scenarios(mix, st.booleans()), weights, weights)
    def check(scenario: Scenario, first: Any, second: Any) -> None:
        unit = mix.alignment_tokens
        children = offload(unit, small(mix), load, first), offload(2 * unit, load=load, weight=second)
        tally.add(loaded.add(run(mix, with_connector(scenario, multi(*children)))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
    assert sum(loaded.by_child.values()), "which child loads depends on measured speeds, see the test of weights below"


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_foreign_store_beside_an_offload_connector_never_corrupts(mix: Mix, loaded: Loaded) -> None:
    tally = Tally()

    @profile(60)
    @given(
        scenarios(mix, st.booleans()),
        st.sampled_from(("async", "sync")),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from((0.5, 2.0)),
    )
    def check(scenario: Scenario, load: str, delay_steps: int, fail_every: int, weight: float) -> None:
        children = foreign(mix, load, delay_steps, fail_every, 1.0), offload(mix.alignment_tokens, weight=weight)
        tally.add(loaded.add(run(mix, with_connector(scenario, multi(*children)))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally
    assert all(loaded.by_child.values()) and len(loaded.by_child) == 2, loaded.by_child


def test_random_mixes_over_three_stores_never_corrupt() -> None:
    tally = Tally()

    @profile(120)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        mix = data.draw(mixes())
        scenario = data.draw(scenarios(mix, st.booleans()))
        unit = mix.alignment_tokens
        children = [
            offload(unit, small(mix), data.draw(st.sampled_from(("async", "sync"))), data.draw(weights)),
            offload(2 * unit, weight=data.draw(weights)),
            foreign(mix, "async", data.draw(st.integers(0, 3)), data.draw(st.sampled_from((0, 0, 3))), 1.0),
        ]
        children = data.draw(st.permutations(children))
        tally.add(run(mix, with_connector(scenario, multi(*children))))

    check()
    assert tally.with_restored > tally.scenarios // 8, tally


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_corrupt_chunks_of_one_store_are_loaded_from_the_other_or_computed(mix: Mix) -> None:
    """Bits flip in the preferred store: its loads fail, and the retries use the other store."""
    tally = Tally()

    @profile(40)
    @given(scenarios(mix), st.integers(0, 1 << 32))
    def check(scenario: Scenario, seed: int) -> None:
        children = offload(mix.alignment_tokens, weight=10.0), offload(2 * mix.alignment_tokens)
        tally.add(run(mix, with_connector(scenario, multi(*children)), flip_bits_of_the_first(Random(seed))))

    check()
    assert tally.with_failed_loads > tally.scenarios // 10, tally


def flip_bits_of_the_first(random: Random) -> Callable[[OracleEngine, int], None]:
    def before_step(engine: OracleEngine, step: int) -> None:
        worker = engine.worker_connector.sub_connectors[0]._worker  # type: ignore[union-attr]
        sealed = sorted(worker._arena._seals)
        if sealed and not worker._copies._open:
            worker._arena._buffer[random.choice(sealed)] ^= 1 << random.randrange(8)

    return before_step


def warm(engine: OracleEngine, name: str, num_tokens: int = 100) -> None:
    engine.reset_prefix_cache()
    engine.submit(name, list(range(num_tokens)), 2)
    engine.drain()


@pytest.mark.parametrize(("first", "second"), [(10.0, 1.0), (1.0, 10.0)])
def test_the_store_with_the_larger_weight_loads(first: float, second: float, loaded: Loaded) -> None:
    connector = multi(offload(8, weight=first), offload(16, weight=second))
    with OracleEngine(GPT_OSS, EngineSettings(num_blocks=200, connector=connector)) as engine:
        engine.submit("cold", list(range(100)), 2)
        engine.drain()
        warm(engine, "warm")
        loaded.add(engine)
    assert loaded.by_child == {f"{CONNECTOR}-0": int(first > second), f"{CONNECTOR}-1": int(second > first)}


def test_a_failed_load_bars_its_store_and_the_retry_takes_the_other(loaded: Loaded) -> None:
    connector = multi(offload(8, weight=10.0), offload(16))
    with OracleEngine(GPT_OSS, EngineSettings(num_blocks=200, connector=connector)) as engine:
        engine.submit("cold", list(range(100)), 2)
        engine.drain()
        arena = engine.worker_connector.sub_connectors[0]._worker._arena  # type: ignore[union-attr]
        for slot in arena._seals:
            arena._buffer[slot] ^= 1
        warm(engine, "warm")
        stats = engine.scheduler_connector._total.children  # type: ignore[union-attr]
    assert stats[f"{CONNECTOR}-0"].failures == 1
    assert (stats[f"{CONNECTOR}-1"].hits, stats[f"{CONNECTOR}-1"].hit_tokens) == (1, 96)
    assert stats[f"{CONNECTOR}-1"].load_bytes > 0


def lose_everything(engine: OracleEngine, child: int) -> None:
    index = engine.scheduler_connector.sub_connectors[child]._scheduler._stack.primary  # type: ignore[union-attr]
    index.invalidate_all(index.eviction_order())


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_a_child_stores_what_another_child_loaded(mix: Mix) -> None:
    """So no child lacks the beginning of a prefix that it could extend."""
    unit = mix.alignment_tokens
    num_tokens = 2 * unit + 1
    connector = multi(offload(unit, weight=10.0), offload(unit))
    with OracleEngine(mix, EngineSettings(num_blocks=400, connector=connector)) as engine:
        engine.submit("cold", list(range(num_tokens)), 2)
        engine.drain()
        lose_everything(engine, 1)
        warm(engine, "loads from the first", num_tokens)
        from_first = engine.restored_tokens
        lose_everything(engine, 0)
        warm(engine, "loads from the second", num_tokens)
        assert engine.restored_tokens == 2 * from_first > 0


@pytest.mark.parametrize(
    ("is_async", "num_steps", "is_aborted"),
    # With asynchronous scheduling, vLLM 0.32 computes such a request again with more tokens than it has.
    [(False, 1, False), (False, 1, True), (True, 2, True), (True, 1, True)],
    ids=["computed again", "aborted", "aborted, async", "aborted before the report"],
)
@pytest.mark.parametrize("parent", [MULTI_CONNECTOR, "MultiConnector"])
def test_nothing_is_stored_after_a_failed_load_of_another_child_within_the_step(
    parent: str, is_async: bool, num_steps: int, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is reported after the step, in which the other child already begins to store the blocks."""
    invalid: set[int] = set()

    def fail(store: BlockStoreConnector, forward_context: object, **kwargs: object) -> None:
        metadata = store._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        invalid.update(block_id for load in metadata.loads for _, block_id in load.copies)

    def take(_: BlockStoreConnector) -> set[int]:
        taken = set(invalid)
        invalid.clear()
        return taken

    report, write = FakeRunner._report, FakeRunner._write

    def report_others(runner: FakeRunner, plane: Any, item: Any, *rest: Any) -> None:
        if item.request_id != "fails":  # it reads the wrong content before the failure is reported, as in vLLM
            report(runner, plane, item, *rest)

    def write_wrong(runner: FakeRunner, plane: Any, item: Any) -> None:
        """Writes what a request computes from the wrong content."""
        was_misled, item.running.is_misled = item.running.is_misled, item.request_id == "fails"
        write(runner, plane, item)
        item.running.is_misled = was_misled

    monkeypatch.setattr(FakeRunner, "_report", report_others)
    monkeypatch.setattr(BlockStoreConnector, "get_block_ids_with_load_errors", take)
    children = [foreign(DENSE, "sync", 0, 0, 4.0), offload(16)]
    extra: Entry = {"connectors": children, "lookup_timeout_seconds": 0}
    if parent != MULTI_CONNECTOR:
        del extra["lookup_timeout_seconds"]
        for child in children:
            del child["kv_connector_extra_config"]["load_weight"]
            child["kv_role"] = "kv_both"
    settings = EngineSettings(
        num_blocks=200, connector=Connector(parent, extra), async_scheduling=is_async, max_step_tokens=64
    )
    prompt = list(range(150))
    with OracleEngine(DENSE, settings) as engine:
        engine.submit("cold", prompt[:34], 2)
        engine.drain()
        theirs, ours = engine.scheduler_connector._connectors  # type: ignore[union-attr]
        ours.reset_cache()  # as after a restart: only the other store has the prefix now
        engine.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(BlockStoreConnector, "start_load_kv", fail)
            patch.setattr(FakeRunner, "_write", write_wrong)
            engine.submit("fails", prompt, 2)
            for _ in range(num_steps):
                engine.step()
        if is_aborted:
            engine.abort("fails")
        engine.drain()
        assert ours._scheduler._stack.primary.used_bytes == 0
        theirs.reset_cache()
        engine.submit("victim", prompt, 2)
        engine.drain()
        assert ours._scheduler._stack.primary.used_bytes > 0, "another request stores the prefix"
        theirs.reset_cache()
        engine.submit("longer", [*prompt, *range(1000, 1060)], 2)
        engine.drain()
        theirs.reset_cache()
        engine.reset_prefix_cache()
        restored_tokens = engine.restored_tokens
        engine.submit("last", [*prompt, *range(1000, 1060)], 2)
        engine.drain()
        assert engine.restored_tokens == restored_tokens + 208


def test_the_flush_at_shutdown_drops_stores_only_while_a_load_within_the_step_may_still_fail() -> None:
    connector = multi(foreign(DENSE, "sync", 0, 0, 4.0), offload(16))
    with OracleEngine(DENSE, EngineSettings(num_blocks=200, connector=connector)) as engine:
        engine.submit("cold", list(range(34)), 2)
        engine.drain()
        ours = engine.scheduler_connector._connectors[1]  # type: ignore[union-attr]
        ours.reset_cache()
        engine.reset_prefix_cache()
        engine.submit("loads", list(range(64)), 40)
        stores, failures = ours._scheduler._stores, []
        plan = stores.plan

        def plan_and_flush(*arguments: Any) -> Any:
            store = plan(*arguments)
            if store is not None:
                stores.drop_unconfirmed()
                failures.append(stores._stores[store.store_id].reason)
            return store

        stores.plan = plan_and_flush
        engine.drain()
        assert failures == ["closed", None, None]


@pytest.mark.parametrize("is_wrong", [True, False], ids=["wrong", "right"])
def test_a_load_reported_before_its_child_has_loaded_is_caught(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(connector: Any, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loads = {load.request_id for child in connector._connectors for load in child._connector_metadata.loads}
        return KVConnectorTransferResults(finished_recving=loads)

    connector = multi(offload(8), offload(16))
    with OracleEngine(GPT_OSS, EngineSettings(num_blocks=200, connector=connector)) as engine:
        engine.submit("cold", list(range(100)), 2)
        engine.drain()
        if not is_wrong:
            warm(engine, "warm")
            assert engine.restored_tokens > 0
            return
        monkeypatch.setattr(MultiWorkerSide, "get_transfer_results", early)
        for child in engine.worker_connector.sub_connectors:  # type: ignore[union-attr]
            monkeypatch.setattr(child, "start_load_kv", lambda context: None)
        with pytest.raises(CorruptionError):
            warm(engine, "warm")
