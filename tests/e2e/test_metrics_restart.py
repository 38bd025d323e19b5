"""An engine that starts a second time in one process registers no metric twice and counts from zero."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import harness
import prometheus_client
import pytest
from prometheus_client import REGISTRY

from hybridkv.metrics import CATALOGUE, Catalogue, Kind, Metric, PrometheusSink

PROMPT_TOKENS = 1100


def hybridkv_names() -> Counter[str]:
    """How often each of our metrics is registered."""
    names: Counter[str] = Counter()
    for collector in list(REGISTRY._collector_to_names):
        name = str(getattr(collector, "_name", ""))
        if name.startswith("vllm:hybridkv_"):
            names[name] += 1
    return names


def counted(name: str, **labels: str) -> float:
    """A counter's value, summed over labels that are not given."""
    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def lives(kind: str, directory: Path, kv_transfer_config: dict[str, Any]) -> tuple[Counter[str], float]:
    """Run one engine. The metrics that it registered, and its number of lookups."""
    options = {"disable_log_stats": False}
    with harness.running_engine(kind, directory, kv_transfer_config=kv_transfer_config, **options) as engine:
        assert counted("vllm:hybridkv_lookups_total") == 0
        engine.generate([harness.make_prompt(PROMPT_TOKENS, seed=1)])
        return hybridkv_names(), counted("vllm:hybridkv_lookups_total")


def test_two_engines_of_one_process_register_each_metric_once(
    kind: str, kv_transfer_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    declared = {metric.name.removesuffix("_total") for metric in CATALOGUE.metrics if metric.series_labels is not None}
    for life in ("first", "second"):
        directory = harness.scratch_directory(tmp_path_factory.mktemp(life)) / life
        names, lookups = lives(kind, directory, kv_transfer_config)
        assert names == Counter(declared)
        assert lookups == 1


def test_a_metric_that_vllm_does_not_unregister_is_a_duplicate() -> None:
    """Control: each start after the first would fail like this with a prefix of our own."""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    foreign = Catalogue((Metric("hybridkv:restarts_total", Kind.COUNTER, "restarts", "Restarts."),))
    classes = [prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram]
    start = partial(PrometheusSink, foreign, *classes, ["engine"], {0: ["0"]})
    start()
    try:
        unregister_vllm_metrics()
        with pytest.raises(ValueError, match="Duplicated"):
            start()
    finally:
        REGISTRY.unregister(REGISTRY._names_to_collectors["hybridkv:restarts"])
