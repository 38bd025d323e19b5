"""Metrics of HybridNixlConnector reach Prometheus under the names of the catalogue, and all of them are counted."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import pytest
from test_stats import exposed

from hybridkv.connectors.vllm.common.stats import OffloadStats
from hybridkv.connectors.vllm.nixl.stats import NixlMetrics
from hybridkv.metrics import CATALOGUE, PEER_FAILURES, Kind

NAMES = {metric.name for metric in CATALOGUE.metrics if metric.name.startswith("vllm:hybridkv_peer_")}
PROMPTS = ("loaded", "held_already", "refused", "failed", "cancelled")
LEASES = ("done", "expired", "dropped", "no_room")


def everything() -> NixlMetrics:
    metrics = NixlMetrics()
    for prompt in PROMPTS:
        metrics.count_prompt(prompt)
    for lease in LEASES:
        metrics.count_lease(lease)
    metrics.count_misled("partial_copy")
    metrics.set_held(3)
    metrics.count_read(0.02, 4096, 5)
    for reason in (*PEER_FAILURES, "what nobody has heard of"):
        metrics.count_failure(reason)
    return metrics


def taken(metrics: NixlMetrics) -> OffloadStats:
    stats = metrics.take()
    assert stats is not None
    return stats


def test_every_event_reaches_prometheus_under_a_declared_name() -> None:
    text = exposed(taken(everything()))
    for line in (
        *(f'vllm:hybridkv_peer_prompts_total{{engine="0",outcome="{outcome}"}} 1.0' for outcome in PROMPTS),
        *(f'vllm:hybridkv_peer_leases_total{{engine="0",outcome="{outcome}"}} 1.0' for outcome in LEASES),
        *(
            f'vllm:hybridkv_peer_read_failures_total{{engine="0",reason="{reason}"}} {1 + (reason == "other")}.0'
            for reason in PEER_FAILURES
        ),
        'vllm:hybridkv_misled_requests_total{cause="partial_copy",engine="0"} 1.0',
        'vllm:hybridkv_peer_leases_held{engine="0"} 3.0',
        'vllm:hybridkv_peer_read_bytes_total{engine="0"} 4096.0',
        'vllm:hybridkv_peer_read_descriptors_total{engine="0"} 5.0',
        'vllm:hybridkv_peer_read_seconds_count{engine="0"} 1.0',
        'vllm:hybridkv_peer_read_seconds_sum{engine="0"} 0.02',
        'vllm:hybridkv_peer_read_seconds_bucket{engine="0",le="0.03"} 1.0',
        'vllm:hybridkv_peer_read_seconds_bucket{engine="0",le="0.01"} 0.0',
    ):
        assert line in text, text


def test_each_metric_of_peers_is_counted_with_all_its_labels() -> None:
    """A metric that is declared and never counted would be a line of zeroes on a dashboard."""
    text = exposed(taken(everything()))
    for metric in CATALOGUE.metrics:
        if metric.name in NAMES:
            [suffix] = {Kind.HISTOGRAM: ["_count"]}.get(metric.kind, [""])
            shown = re.findall(rf"^{metric.name}{suffix}(?:{{.*}})? (?!0\.0$)\S+$", text, re.MULTILINE)
            assert len(shown) == math.prod(len(label.values) for label in metric.series_labels or ()), metric.name


def test_an_undeclared_label_is_an_error() -> None:
    with pytest.raises(Exception, match="forgotten"):
        NixlMetrics().count_lease("forgotten")


def test_stats_of_both_halves_and_of_two_ranks_are_summed() -> None:
    first, second = taken(everything()), taken(everything())
    merged = first.aggregate(second).reduce()
    assert merged["vllm:hybridkv_peer_read_bytes_total"] == 8192
    assert first.reduce()["vllm:hybridkv_peer_read_bytes_total"] == 4096
    assert NixlMetrics().take() is None


def test_a_count_during_a_take_is_counted_once() -> None:
    """A rank's thread counts while the engine takes the counts: at worst between the read and the write of a
    counter.
    """
    metrics = NixlMetrics()
    taken_away: list[OffloadStats | None] = []
    threads: list[threading.Thread] = []

    class Overtaken(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            threads.append(threading.Thread(target=lambda: taken_away.append(metrics.take())))
            threads[-1].start()
            # It may have to wait until this count is written.
            threads[-1].join(0.2)
            return found

    metrics.count_lease("done")
    metrics._counts._counters = Overtaken(metrics._counts._counters)
    metrics.count_lease("done")
    for thread in threads:
        thread.join()
    taken_away.append(metrics.take())
    found = [stats.reduce()["vllm:hybridkv_peer_leases_total"] for stats in taken_away if stats is not None]
    assert threads and sum(found) == 2
