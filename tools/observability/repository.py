"""Files of the repository that describe the metrics."""

from __future__ import annotations

from pathlib import Path

DASHBOARD = "deploy/grafana/hybridkv.json"
RULES = "deploy/prometheus/hybridkv-alerts.yml"
TESTS = "deploy/prometheus/hybridkv-alerts-test.yml"
RUNBOOK = "docs/guides/runbook.md"
PAGE = "docs/reference/metrics.md"


def read(path: str) -> str:
    """Text of a file of the repository: also in the copy of the tree in which Bazel runs tests."""
    found = [folder / path for folder in Path(__file__).resolve().parents if (folder / path).is_file()]
    return found[0].read_text(encoding="utf-8")
