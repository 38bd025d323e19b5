"""A real server under load: its explanations, /metrics and Prometheus agree."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import panels_svg
import patience
import pytest
import server as servers
import wheels
from panels_svg import PanelQuery, panel_queries
from prometheus_server import Prometheus, promtool, running_prometheus
from server import Server

KIND = "qwen3-next"
CHUNK_TOKENS = 128
NUM_CLIENTS = 6
NUM_WAVES = 10
COUNTS_DEADLINE_S = patience.seconds(6.0)
WINDOW = "30m"
DEPLOY = next(
    folder / "deploy" for folder in Path(__file__).resolve().parents if (folder / "deploy/prometheus").is_dir()
)
DASHBOARD = DEPLOY / "grafana/hybridkv.json"
QUERIES = panel_queries(DASHBOARD, WINDOW)
PREFIX = "vllm:hybridkv_"


@dataclass(frozen=True)
class Loaded:
    """A server after a load, its counts and records, and the Prometheus server that scraped it."""

    server: Server
    prometheus: Prometheus
    counts: dict[tuple[str, str], float]
    records: list[dict[str, Any]]
    began_s: float

    def counted(self, name: str) -> Counter[str]:
        """A counter's non-zero values by label."""
        return +Counter({labels: int(value) for (found, labels), value in self.counts.items() if found == name})

    def shows(self, name: str) -> bool:
        """Whether a panel of this metric has data; a histogram needs an observation."""
        return any(
            found == name or (found == f"{name}_count" and value > 0) for (found, _), value in self.counts.items()
        )

    def recorded(self, *fields: str, weight: str | None = None) -> Counter[str]:
        """Number of records, or the sum of `weight`, by these fields, with labels in the format of `counted`."""
        total: Counter[str] = Counter()
        for record in self.records:
            labels = ",".join(f"{field}={record[field]}" for field in sorted(fields))
            total[labels] += record[weight] if weight else 1
        return +total


def run_load(server: Server) -> None:
    """Run waves of conversations with concurrent clients. The engine's own cache is reset repeatedly.

    The prompts of a wave begin like one that ran alone before, so no state was stored where they leave it.
    """
    for wave in range(NUM_WAVES):
        opening = harness.make_prompt(6 * CHUNK_TOKENS, seed=100 * wave)
        first_turns = [
            harness.make_prompt(6 * CHUNK_TOKENS + 17, seed=100 * wave + 1 + i, prefix=opening[: (i % 3) * 300])
            for i in range(NUM_CLIENTS)
        ]
        second_turns = [turn + harness.make_prompt(300, seed=100 * wave + 50 + i) for i, turn in enumerate(first_turns)]
        for prompts in ([opening], first_turns, second_turns, first_turns):
            ask_together(server, prompts)
            server.reset_prefix_cache()
        ask_together(server, first_turns)
        ask_together(server, first_turns)  # which the engine still holds


def ask_together(server: Server, prompts: list[list[int]]) -> None:
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(server.complete, prompts))


def settled(server: Server, explained: Path) -> tuple[dict[tuple[str, str], float], list[dict[str, Any]]]:
    """Counts and records, once their numbers agree: counts of a step reach /metrics after its tokens."""
    deadline = time.monotonic() + COUNTS_DEADLINE_S
    while True:
        records = [json.loads(line) for line in explained.read_text().splitlines()]
        counts = server.counts()
        num_counted = sum(
            value
            for (name, labels), value in counts.items()
            if name == f"{PREFIX}lookups_total" and "pending" not in labels
        )
        if num_counted == len(records) or time.monotonic() > deadline:
            return counts, records
        time.sleep(0.1)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    directory = harness.scratch_directory(tmp_path_factory.mktemp("metrics"))
    harness.prepare_environment(directory / "environment")
    python = wheels.install(
        Path(os.environ["HYBRIDKV_WHEELHOUSE"]).resolve(),
        directory / "venv",
        "hybridkv-vllm",
        beside=wheels.packages_beside("vllm"),
    )
    # Too small for all waves, so that chunks are evicted.
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "12MiB"}], "chunk_tokens": CHUNK_TOKENS},
    }
    logging_file = str(DEPLOY / "vllm/explain-logging.json")
    # No subscriber exists, but published events are counted.
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    flags = [f"--kv-events-config={json.dumps(events)}"]
    with servers.running_server(
        python, KIND, directory / "server", config, flags, VLLM_LOGGING_CONFIG_PATH=logging_file
    ) as server:
        rules = DEPLOY / "prometheus/hybridkv-alerts.yml"
        with running_prometheus(directory / "prometheus", server.port, rules) as prometheus:
            prometheus.wait_for_scrapes(1)
            began_s = time.time()
            run_load(server)
            counts, records = settled(server, directory / "server/explain.jsonl")
            prometheus.wait_for_scrapes(2)
            yield Loaded(server, prometheus, counts, records, began_s)
        print(server.log.read_text())


def test_each_request_is_explained(loaded: Loaded) -> None:
    assert len(loaded.records) == NUM_WAVES * (1 + 5 * NUM_CLIENTS)
    reasons = {labels.removeprefix("reason=") for labels in loaded.recorded("reason")}
    assert {"not_stored", "group_limits", "prefix_ends", "complete", "no_boundary"} <= reasons


def test_the_tokens_of_a_record_add_up(loaded: Loaded) -> None:
    for record in loaded.records:
        parts = record["engine_tokens"] + record["offered_tokens"] + record["compute_tokens"]
        assert parts == record["num_tokens"], record


def test_counted_lookups_match_the_records(loaded: Loaded) -> None:
    counted = loaded.counted(f"{PREFIX}lookups_total")
    recorded = loaded.recorded("result", "reason")
    assert {labels: value for labels, value in counted.items() if "pending" not in labels} == recorded


def test_tokens_by_source_match_the_records_exactly(loaded: Loaded) -> None:
    counted = loaded.counted(f"{PREFIX}lookup_tokens_total")
    assert counted["source=engine"] == sum(record["engine_tokens"] for record in loaded.records)
    assert counted["source=compute"] == sum(record["compute_tokens"] for record in loaded.records) > 0
    assert counted["source=ram"] == loaded.recorded("source", weight="offered_tokens")["source=ram"] > 0
    assert loaded.counted(f"{PREFIX}hit_tokens_total")[""] == counted["source=ram"]


def test_lost_tokens_match_the_records_exactly(loaded: Loaded) -> None:
    counted = loaded.counted(f"{PREFIX}lost_tokens_total")
    assert counted == loaded.recorded("limiting_kind", weight="lost_tokens")
    assert counted["limiting_kind=recurrent"] > 0


def test_counted_junctions_match_the_records(loaded: Loaded) -> None:
    recorded = loaded.recorded("junction")
    recorded.pop("junction=", None)
    assert {labels.replace("junction", "outcome"): value for labels, value in recorded.items()} == loaded.counted(
        f"{PREFIX}junctions_total"
    )


def test_the_engine_counts_the_same_tokens(loaded: Loaded) -> None:
    """vLLM counts each prompt once, so they agree only if no load failed and no request was preempted."""
    assert not loaded.counted("vllm:num_preemptions_total")
    assert "outcome=failed" not in loaded.counted(f"{PREFIX}loads_total")
    by_source = loaded.counted("vllm:prompt_tokens_by_source_total")
    for name, field in (
        ("external_kv_transfer", "offered_tokens"),
        ("local_cache_hit", "engine_tokens"),
        ("local_compute", "compute_tokens"),
    ):
        assert by_source[f"source={name}"] == sum(record[field] for record in loaded.records), name


def test_a_tier_that_is_too_small_reports_evictions(loaded: Loaded) -> None:
    assert loaded.counted(f"{PREFIX}evictions_total")["tier=ram"] > 0
    assert loaded.counted(f"{PREFIX}evicted_bytes_total")["tier=ram"] > 0


def test_promtool_complains_only_about_the_engines_prefix(loaded: Loaded) -> None:
    lines = loaded.server.get("/metrics").splitlines(keepends=True)
    complaints = promtool(
        "check", "metrics", text="".join(line for line in lines if PREFIX in line)
    ).stderr.splitlines()
    assert complaints
    for complaint in complaints:
        assert complaint.endswith("metric names should not contain ':'"), complaint


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.section}-{query.panel}-{query.legend}")
def test_each_panel_shows_this_server(loaded: Loaded, query: PanelQuery) -> None:
    """The server has one tier, one store, no peers, no LMCache server and no failed loads."""
    is_counted = all(loaded.shows(name) for name in query.metrics) and 'outcome="failed"' not in query.expression
    series = loaded.prometheus.data(query.expression)
    assert {one.labels["engine"] for one in series} == ({"0"} if is_counted else set())


def test_many_panels_have_data(loaded: Loaded) -> None:
    shown = [query for query in QUERIES if all(loaded.shows(name) for name in query.metrics)]
    assert len(shown) > len(QUERIES) // 3


def test_a_scrape_has_few_series(loaded: Loaded) -> None:
    """vLLM itself has 438 series."""
    ours = {series for series in loaded.counts if series[0].startswith(PREFIX) and not series[0].endswith("_created")}
    assert len(ours) <= 300


def test_prometheus_has_the_counts_of_the_server(loaded: Loaded) -> None:
    (found,) = loaded.prometheus.query(f"{PREFIX}hit_tokens_total")
    assert found.value == loaded.counted(f"{PREFIX}hit_tokens_total")[""]


def test_each_alert_is_evaluated_and_none_fires(loaded: Loaded) -> None:
    loaded.prometheus.wait_until(
        lambda server: all(rule["health"] != "unknown" for rule in server.rules()), "all rules"
    )
    rules = loaded.prometheus.rules()
    assert {rule["name"] for rule in rules if rule["health"] != "ok"} == set()
    assert {rule["name"] for rule in rules if rule["state"] == "firing"} == set()


def test_the_panels_can_be_drawn(loaded: Loaded, tmp_path: Path) -> None:
    """This is the picture in docs/guides/observing.md; Bazel keeps it with the test's log."""
    picture = Path(os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR", tmp_path)) / "observing.svg"
    panels = panels_svg.read_panels(loaded.prometheus.url, DASHBOARD, loaded.began_s, time.time())
    shown = [panel for panel in panels if panel.curves]
    picture.write_text(panels_svg.draw(shown))
    text = picture.read_text()
    assert {"Tokens by source", "Tokens lost to a kind of group", "Space"} <= {panel.title for panel in shown}
    assert all(f">{panel.title}<" in text for panel in shown)
