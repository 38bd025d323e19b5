"""A real Prometheus server understands every metric, alert and panel, and gets data for each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import exporter
import pytest
from panels_svg import PanelQuery, panel_queries
from prometheus_server import Prometheus, promtool, running_prometheus

from hybridkv.metrics import CATALOGUE

DEPLOY = next(
    folder / "deploy" for folder in Path(__file__).resolve().parents if (folder / "deploy/prometheus").is_dir()
)
RULES = DEPLOY / "prometheus/hybridkv-alerts.yml"
TESTS = DEPLOY / "prometheus/hybridkv-alerts-test.yml"
DASHBOARD = DEPLOY / "grafana/hybridkv.json"
TEST = "  - name: "
"""What each test of an alert begins with, before its name."""
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text())
WINDOW = "1m"
QUERIES = panel_queries(DASHBOARD, WINDOW)


@pytest.fixture(scope="module")
def exporter_port() -> Iterator[int]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, exporter.__file__], stdout=subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, exporter_port: int) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("observability") / "prometheus"
    with running_prometheus(directory, exporter_port, RULES) as server:
        server.wait_for_scrapes(3)  # a rate needs two
        yield server


def beside_each_other(directory: Path, rules: str, alert: str) -> Path:
    """The tests of one alert, beside other rules than those that are checked in."""
    (directory / RULES.name).write_text(rules)
    head, *tests = TESTS.read_text().split(TEST)
    its_own = [TEST + test for test in tests if test.startswith(f"{alert} ")]
    assert its_own
    (directory / TESTS.name).write_text(head + "".join(its_own))
    return directory / TESTS.name


def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    finished = promtool("check", "rules", RULES)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert f"{len(ALERTS)} rules found" in finished.stdout


def test_promtool_finds_what_is_wrong_with_a_rule(tmp_path: Path) -> None:
    """Control: what promtool is asked above can fail."""
    broken = tmp_path / "broken.yml"
    broken.write_text(RULES.read_text().replace("increase(", "increaze(", 1))
    assert promtool("check", "rules", broken).returncode != 0


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    finished = promtool("test", "rules", TESTS)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("threshold", ["> 1000000", "> -1"], ids=["too high", "too low"])
@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_with_another_threshold_fails_its_test(alert: str, threshold: str, tmp_path: Path) -> None:
    """Control: each alert's histories tell its threshold from one that is far off."""
    head, name, tail = RULES.read_text().partition(f"alert: {alert}\n")
    moved = re.sub(r"> [\d.]+('?\n)", rf"{threshold}\1", tail, count=1)
    assert moved != tail
    assert promtool("test", "rules", beside_each_other(tmp_path, RULES.read_text(), alert)).returncode == 0
    finished = promtool("test", "rules", beside_each_other(tmp_path, head + name + moved, alert))
    assert finished.returncode != 0
    assert alert in finished.stdout + finished.stderr


def test_promtool_has_nothing_against_the_metrics_but_the_engines_prefix(exporter_port: int) -> None:
    """The colon of vLLM's prefix, which Prometheus keeps for rules: without it the engine would not unregister us."""
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter_port}/metrics") as reply:
        text = reply.read().decode()
    complaints = promtool("check", "metrics", text=text).stderr.splitlines()
    assert complaints
    for complaint in complaints:
        assert complaint.endswith("metric names should not contain ':'"), complaint


def test_the_server_sees_every_metric_of_the_catalogue(prometheus: Prometheus) -> None:
    for metric in CATALOGUE.metrics:
        suffix = "_bucket" if metric.buckets else ""
        assert prometheus.query(f"{metric.name}{suffix}"), metric.name


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: f"{query.section}-{query.panel}-{query.legend}")
def test_every_panel_gets_data_for_each_engine(prometheus: Prometheus, query: PanelQuery) -> None:
    series = prometheus.data(query.expression)
    assert {one.labels["engine"] for one in series} == {"0", "1"}
    for one in series:
        assert all(label in one.labels for label in re.findall(r"{{(\w+)}}", query.legend)), one


def test_a_misspelt_metric_gets_no_data(prometheus: Prometheus) -> None:
    """Control: a panel that asks for what nobody exports would be seen."""
    assert not prometheus.query(QUERIES[0].expression.replace("_tokens_", "_token_"))


def test_a_query_that_is_no_query_is_refused(prometheus: Prometheus) -> None:
    """Control: a panel that Prometheus cannot parse would be seen."""
    with pytest.raises(ValueError, match="parse error"):
        prometheus.query(QUERIES[0].expression + ")")


def test_the_server_has_data_for_every_alert(prometheus: Prometheus) -> None:
    for rule in prometheus.rules():
        expression, above, _ = rule["query"].rpartition(" > ")
        assert above and prometheus.query(expression), rule["name"]


def test_the_server_evaluates_every_alert(prometheus: Prometheus) -> None:
    prometheus.wait_until(lambda server: all(rule["health"] != "unknown" for rule in server.rules()), "every rule once")
    rules = {rule["name"]: rule for rule in prometheus.rules()}
    assert rules.keys() == set(ALERTS)
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}


def test_an_alert_without_delay_fires_in_the_server(prometheus: Prometheus) -> None:
    def is_firing(server: Prometheus) -> bool:
        return any(rule["name"] == "HybridKVBytesDamaged" and rule["state"] == "firing" for rule in server.rules())

    prometheus.wait_until(is_firing, "HybridKVBytesDamaged fires")
