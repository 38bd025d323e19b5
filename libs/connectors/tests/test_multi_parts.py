"""Parts of HybridMultiConnector other than the selection: saves, messages, statistics."""

from __future__ import annotations

import itertools
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_events import KVConnectorKVEvents
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata

from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.multi.children import Child, ChildClass
from hybridkv.connectors.vllm.multi.config import ChildConfig
from hybridkv.connectors.vllm.multi.messages import (
    MultiHandshakeMetadata,
    MultiKVEvents,
    MultiWorkerMetadata,
    of_child,
)
from hybridkv.connectors.vllm.multi.stats import MultiPromMetrics, MultiStats
from hybridkv.connectors.vllm.multi.worker_side import SchedulerStoresInFlight, SyncLoadTimer, WorkerStoresInFlight
from hybridkv.connectors.vllm.offload.connector import HybridOffloadConnector
from hybridkv.metrics import ChildSelection, SelectionStats
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, PlanError, plan_load_runs

SPEC = CacheSpec((GroupSpec(GroupKind.FULL, 16),), 16)


# Stores in flight.


@given(st.permutations(range(4)), st.sets(st.integers(0, 3), min_size=1))
def test_blocks_are_freed_when_the_last_reading_child_is_done(order: list[int], reading: set[int]) -> None:
    begun, open_stores = SchedulerStoresInFlight(), WorkerStoresInFlight()
    assert begun.request_ended("r", reading)
    open_stores.begin(begun.take())
    done = [bool(open_stores.end(child, {"r"})) for child in order]
    last = max(order.index(child) for child in reading)
    assert done == [place == last for place in range(4)]


def test_a_child_that_reads_a_partial_tail_is_waited_for_once() -> None:
    begun, open_stores = SchedulerStoresInFlight(), WorkerStoresInFlight()
    begun.tail_accepted("r", [0, 1])
    assert begun.request_ended("r", [1])
    assert begun.take() == {"r": {0, 1}} and begun.take() == {}
    open_stores.begin({"r": frozenset({0, 1})})
    assert open_stores.end(1, {"r"}) == set()
    assert open_stores.end(0, {"r"}) == {"r"}


def test_a_request_read_by_no_child_is_not_waited_for() -> None:
    begun = SchedulerStoresInFlight()
    assert not begun.request_ended("r", [])
    assert begun.take() == {}


def test_a_report_of_a_child_without_a_save_frees_nothing() -> None:
    open_stores = WorkerStoresInFlight()
    open_stores.begin({"r": frozenset({0})})
    assert open_stores.end(1, {"r", "other"}) == set()
    assert open_stores.end(0, {"r"}) == {"r"}
    assert open_stores.end(0, {"r"}) == set(), "only once"


# Messages.


class Seen(KVConnectorWorkerMetadata):
    def __init__(self, *seen: int) -> None:
        self.seen = seen

    def aggregate(self, other: Any) -> Seen:
        return Seen(*self.seen, *other.seen)


def test_worker_metadata_is_aggregated_per_child() -> None:
    first = MultiWorkerMetadata((Seen(1), None, Seen(3)), 7, {0: 0.5})
    second = MultiWorkerMetadata((Seen(10), Seen(20), None), None, {0: 0.25, 2: 1.0})
    both = pickle.loads(pickle.dumps(first)).aggregate(second)
    assert [each.seen for each in both.children] == [(1, 10), (20,), (3,)]
    assert (both.step, both.sync_load_seconds) == (7, {0: 0.5, 2: 1.0})


@pytest.mark.parametrize("other", [Seen(1), MultiWorkerMetadata((None,))])
def test_metadata_with_another_number_of_children_is_not_aggregated(other: KVConnectorWorkerMetadata) -> None:
    with pytest.raises(TypeError, match="of 2 children"):
        MultiWorkerMetadata((None, None)).aggregate(other)


class Events(KVConnectorKVEvents):
    """Counts like vLLM's connectors: only an event of every worker is an event of the whole."""

    def __init__(self, *events: str) -> None:
        self.events, self.workers = list(events), 1

    def add_events(self, events: list[Any]) -> None:
        self.events += events

    def aggregate(self) -> Events:
        self.events = sorted({each for each in self.events if self.events.count(each) == self.workers})
        return self

    def increment_workers(self, count: int = 1) -> None:
        self.workers += count

    def get_all_events(self) -> list[Any]:
        return self.events

    def get_number_of_workers(self) -> int:
        return self.workers

    def clear_events(self) -> None:
        self.events.clear()


def test_events_of_two_ranks_are_merged_per_child() -> None:
    mine, theirs = MultiKVEvents({0: Events("a", "b")}), MultiKVEvents({0: Events("b"), 2: Events("c")})
    mine.add_events(theirs.get_all_events())
    mine.increment_workers(1)
    mine.aggregate()
    assert {child: events.get_all_events() for child, events in mine.children.items()} == {0: ["b"], 2: ["c"]}
    assert mine.get_number_of_workers() == 2


def test_a_child_gets_the_handshake_metadata_of_its_own_kind() -> None:
    mine, other = KVConnectorHandshakeMetadata(), KVConnectorHandshakeMetadata()
    metadata = {0: MultiHandshakeMetadata({1: mine}), 1: MultiHandshakeMetadata({0: other, 1: mine})}
    assert of_child(metadata, 1) == {0: mine, 1: mine}
    assert of_child(metadata, 0) == {1: other}
    assert of_child({0: other}, 5) == {0: other}, "metadata of another kind is for every child"


def test_only_children_that_load_within_the_step_are_timed() -> None:
    ticks = itertools.count()
    timer = SyncLoadTimer(lambda: next(ticks))
    timer.begin(frozenset({1}))
    for child in (0, 1, 1):
        timer.run(child, lambda *args, **options: None, "context", more=True)
    assert timer.take() == {1: 2.0}
    assert timer.take() == {}


# Statistics.


def counted(metrics: ConnectorMetrics, num_bytes: int) -> None:
    metrics.stored_bytes(num_bytes)


def children_of(*all_metrics: ConnectorMetrics) -> list[Child]:
    """HybridOffloadConnectors with only their statistics."""
    children = []
    for number, metrics in enumerate(all_metrics):
        connector = HybridOffloadConnector.__new__(HybridOffloadConnector)
        connector.__dict__ |= {"_metrics": metrics, "_scheduler": None}
        children.append(Child(ChildConfig(f"HybridOffloadConnector-{number}", "", 1.0, {}), connector, True))
    return children


def test_empty_statistics_are_not_sent() -> None:
    assert MultiStats.collect(None, children_of(ConnectorMetrics())) is None
    assert MultiStats().is_empty() and MultiStats.build(None).is_empty()


def test_statistics_of_ranks_and_steps_are_summed_and_survive_encoding() -> None:
    all_metrics = ConnectorMetrics(), ConnectorMetrics()
    parts = []
    for num_tokens in (16, 32):
        counted(all_metrics[0], num_tokens)
        counted(all_metrics[1], 100)
        selection = SelectionStats({"HybridOffloadConnector-0": ChildSelection(hits=1, hit_tokens=num_tokens)})
        stats = MultiStats.collect(selection, children_of(*all_metrics))
        assert stats is not None
        parts.append(pickle.loads(pickle.dumps(stats)))
    total = parts[0].aggregate(parts[1])
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(total.to_dict()))
    rebuilt = MultiStats.build(carried)
    assert rebuilt.selection == total.selection and rebuilt.children.keys() == total.children.keys()
    reduced = rebuilt.reduce()
    assert reduced["HybridOffloadConnector-0.hit_tokens"] == 48
    assert reduced["HybridOffloadConnector-0.vllm:hybridkv_store_bytes_total"] == 48
    assert reduced["HybridOffloadConnector-1.vllm:hybridkv_store_bytes_total"] == 200
    assert not rebuilt.is_empty()
    rebuilt.reset()
    assert rebuilt.is_empty()


def test_statistics_of_another_connector_are_not_summed() -> None:
    from hybridkv.connectors.vllm.common.stats import OffloadStats

    with pytest.raises(TypeError, match="MultiStats"):
        MultiStats().aggregate(OffloadStats())


def make_metrics(registry: CollectorRegistry, engines: dict[int, list[object]]) -> MultiPromMetrics:
    types = {each: partial(each, registry=registry) for each in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    classes = [
        ChildClass(ChildConfig(f"HybridOffloadConnector-{i}", "", 1.0, {}), HybridOffloadConnector, config)  # type: ignore[arg-type]
        for i in (0, 1)
    ]
    return MultiPromMetrics(config, types, ["model_name", "engine"], engines, classes)


def test_children_of_one_class_are_shown_separately_in_each_engine() -> None:
    registry = CollectorRegistry()
    metrics = make_metrics(registry, {0: ["tiny", "0"], 1: ["tiny", "1"]})
    for engine in (0, 1):
        all_metrics = ConnectorMetrics(), ConnectorMetrics()
        for number, child_metrics in enumerate(all_metrics):
            child_metrics._counts.set("vllm:hybridkv_tier_used_bytes", 10 * engine + number, tier="ram")
        selection = SelectionStats(
            {f"HybridOffloadConnector-{engine}": ChildSelection(queries=1, hits=1, hit_tokens=5)}
        )
        stats = MultiStats.collect(selection, children_of(*all_metrics))
        assert stats is not None
        metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())), engine)
    for engine, child in itertools.product((0, 1), (0, 1)):
        labels = {"model_name": "tiny", "engine": str(engine), "connector": f"HybridOffloadConnector-{child}"}
        used = registry.get_sample_value("vllm:hybridkv_tier_used_bytes", {**labels, "tier": "ram"})
        assert used == 10 * engine + child
        tokens = registry.get_sample_value("vllm:kv_connector_mc_hit_tokens_total", labels)
        assert tokens == (5 if engine == child else None)
    assert "vllm:kv_connector_mc_queries_total" in generate_latest(registry).decode()


def test_negative_counts_do_not_end_the_metrics_loop() -> None:
    registry = CollectorRegistry()
    metrics = make_metrics(registry, {0: ["tiny", "0"]})
    stats = MultiStats({"selection": SelectionStats(), "children": {}})
    stats.selection.child("HybridOffloadConnector-1").hit_tokens = -64
    metrics.observe(stats.to_dict())
    labels = {"model_name": "tiny", "engine": "0", "connector": "HybridOffloadConnector-1"}
    assert registry.get_sample_value("vllm:kv_connector_mc_hit_tokens_total", labels) == 0
    assert registry.get_sample_value("vllm:kv_connector_mc_clamped_tokens_total", labels) == 64


# Why no two children load one request (ADR 11). The tables are those of a request that resumes at 96: the engine gives
# blocks to a recurrent group for the last state alone, and to a window for its last tokens alone.

FULL, WINDOW, STATES = (
    GroupSpec(GroupKind.FULL, 16),
    GroupSpec(GroupKind.WINDOW, 16, window_tokens=64),
    GroupSpec(GroupKind.RECURRENT, 16),
)
FULL_TABLE = [1, 2, 3, 4, 5, 6]
OTHER_TABLES = {WINDOW: [0, 0, 13, 14, 15, 16], STATES: [0, 0, 0, 0, 0, 26]}


def test_a_first_child_cannot_end_before_the_resume_point_of_a_window_or_a_state() -> None:
    for other, table in OTHER_TABLES.items():
        spec = CacheSpec((FULL, other), 16)
        assert plan_load_runs(spec, 96, 0, [FULL_TABLE, table])
        with pytest.raises(PlanError):
            plan_load_runs(spec, 48, 0, [FULL_TABLE, table])
    assert plan_load_runs(CacheSpec((FULL,), 16), 48, 0, [FULL_TABLE])


def test_a_second_child_does_not_fill_the_part_of_a_window_before_its_own_beginning() -> None:
    runs = plan_load_runs(CacheSpec((FULL, WINDOW), 16), 96, 64, [FULL_TABLE, OTHER_TABLES[WINDOW]])
    loaded = {block_id for run in runs if run.group_index == 1 for block_id in run.block_ids}
    assert loaded == {15, 16} and {13, 14} <= set(OTHER_TABLES[WINDOW])
