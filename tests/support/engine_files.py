"""Pytest plugin: tests run on vLLM's Python files of another version than the locked one.

`HYBRIDKV_VLLM_FILES` names their folder, `HYBRIDKV_VLLM_SKIPS` the tests that are skipped there, by name. A test fails
if it is skipped and not named, or named and not skipped. Processes that a test starts use the same files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

FILES = Path(os.environ["HYBRIDKV_VLLM_FILES"]).absolute()
SKIPS = frozenset(os.environ.get("HYBRIDKV_VLLM_SKIPS", "").split())

sys.path.insert(0, str(FILES))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FILES), os.environ.get("PYTHONPATH"))))


def pytest_sessionstart() -> None:
    import vllm

    if not Path(vllm.__file__).parent.parent.samefile(FILES):
        raise pytest.UsageError(f"vllm was imported from {vllm.__file__}, not from {FILES}")


def is_named(item: pytest.Item) -> bool:
    """Whether a test, or its whole module, is named. Parameters of the test are ignored."""
    return (getattr(item, "originalname", None) or item.name) in SKIPS or item.path.stem in SKIPS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not is_named(item):
        report.outcome, report.longrepr = "failed", f"skipped, but not named as such: {report.longrepr}"
    elif call.when == "call" and report.passed and is_named(item) and not hasattr(item, "callspec"):
        report.outcome, report.longrepr = "failed", "named as skipped, but it runs: remove it"
    return report
