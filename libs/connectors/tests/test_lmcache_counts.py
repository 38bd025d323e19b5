"""Counts of a server: each event once, under names of the catalogue."""

from __future__ import annotations

from typing import Any

from hybridkv.connectors.vllm.common.stats import ConnectorMetrics
from hybridkv.connectors.vllm.lmcache.worker import ServerCounts
from hybridkv.lmcache.calls import CallFailureReason
from hybridkv.lmcache.operations import OperationCounts
from hybridkv.metrics import LMCACHE_FAILURES


def taken(metrics: ConnectorMetrics) -> dict[str, Any]:
    stats = metrics.take()
    numbers = [] if stats is None else [*stats.data["counters"], *stats.data["gauges"]]
    return {" ".join((name.removeprefix("vllm:hybridkv_lmcache_"), *labels)): value for name, labels, value in numbers}


def test_new_events_are_counted_once() -> None:
    metrics = ConnectorMetrics()
    counts = ServerCounts(metrics)
    counts.operations(
        OperationCounts(
            lookups=7,
            found=3,
            stores=2,
            stored_chunks=5,
            retrieves=3,
            retrieved_chunks=8,
            failures={"lookup timeout": 1, "store refused": 1, "retrieve lost": 1},
        )
    )
    assert taken(metrics) == {
        "operations_total lookup timeout": 1,
        "operations_total store refused": 1,
        "operations_total retrieve lost": 1,
        "operations_total lookup done": 3,
        "operations_total lookup nothing": 3,
        "operations_total retrieve done": 2,
        "operations_total store done": 1,
        "chunks_total retrieve": 8,
        "chunks_total store": 5,
    }
    later = OperationCounts(
        lookups=8,
        found=3,
        stores=2,
        stored_chunks=5,
        retrieves=3,
        retrieved_chunks=8,
        failures={"lookup timeout": 2, "store refused": 1, "retrieve lost": 1},
    )
    counts.operations(later)
    assert taken(metrics) == {"operations_total lookup timeout": 1}
    counts.operations(later)
    assert taken(metrics) == {}


def test_every_trouble_is_a_label_of_the_catalogue() -> None:
    assert set(LMCACHE_FAILURES) == {str(reason) for reason in CallFailureReason}
    metrics = ConnectorMetrics()
    failures = {f"store {reason}": 1 for reason in CallFailureReason}
    ServerCounts(metrics).operations(OperationCounts(stores=len(failures), failures=failures))
    assert len(taken(metrics)) == len(CallFailureReason)
