"""With `kv_load_failure_policy: fail`, a request whose load fails ends with an error, and no other request does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults_process
import harness
import pytest
from audit import Audit
from equality import require_same_output
from harness import SAME_STEPS, Engine, exact_prompt_lengths, make_prompt

from hybridkv.planner import GroupKind
from hybridkv.tiers import FailureReason
from kits.tiers.faults import Fail, Operation, Rule


@pytest.fixture(scope="module")
def kind() -> str:
    return "gpt-oss"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.scratch_directory(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def kv_transfer_config(directory: Path) -> dict[str, Any]:
    tiers = [
        {"type": "ram", "capacity": "512MiB"},
        {"type": "disk", "path": str(directory / "cache"), "capacity": "1GiB"},
    ]
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"tiers": tiers, **SAME_STEPS},
    }


class Lines(logging.Filter):
    """Collects log messages. Not a handler, because vLLM replaces all handlers when an engine starts."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True


@pytest.fixture(scope="module")
def log_lines() -> Iterator[list[str]]:
    """Log lines of the connector, from before the engine starts."""
    logger, lines = logging.getLogger("vllm.hybridkv"), Lines()
    logger.addFilter(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        yield lines.lines
    logger.removeFilter(lines)


@pytest.fixture(scope="module")
def engine(log_lines: list[str], kind: str, kv_transfer_config: dict[str, Any], directory: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults_process.tiers, "DiskMedium", faults_process.tiers.DiskMedium)
        faults_process.inject_below_the_tier()
        with harness.running_engine(kind, directory, kv_transfer_config=kv_transfer_config) as running:
            yield running


def test_the_start_logs_the_failure_policy(engine: Engine, log_lines: list[str]) -> None:
    warning, line = [line for line in log_lines if "kv_load_failure_policy" in line]
    assert 'warning: kv_load_failure_policy: expected "recompute", got "fail"' in warning
    assert "kv_load_failure_policy fail; " in line


def test_only_the_request_of_a_failed_load_ends_with_an_error(engine: Engine, audit: Audit, kind: str) -> None:
    damaged, sound = (make_prompt(exact_prompt_lengths(kind, 1)[0], seed=seed) for seed in (1, 2))
    cold = [engine.generate([prompt])[0] for prompt in (damaged, sound)]
    first_keys = len(audit.stored) // 2
    engine.reset_prefix_cache()
    arena = engine.worker_connector._worker._arena
    near = engine.connector._scheduler._stack.primary
    for key in list(audit.stored)[:first_keys]:
        slot = near.pin(key)
        arena.views(slot)[-1][-1] ^= 1
        near.unpin(key)
    warm = [engine.generate([prompt])[0] for prompt in (damaged, sound)]
    assert warm[0].finish_reason == "error" and warm[0].token_ids == ()
    require_same_output([cold[1]], [warm[1]])
    assert warm[1].num_cached_tokens > 0
    # The damaged chunks were withdrawn, so the repeated request gives the right answer, computed or restored.
    again = engine.generate([damaged])[0]
    require_same_output([cold[0]], [again])


def test_a_prefix_with_all_windows_damaged_fails_one_request_only(engine: Engine, audit: Audit, kind: str) -> None:
    prompt = make_prompt(exact_prompt_lengths(kind, 1)[0], seed=4)
    cold = engine.generate([prompt])[0]
    stack = engine.connector._scheduler._stack
    engine.reset_prefix_cache()
    # Slower tiers must not hold intact copies.
    for tier in stack.secondary.values():
        tier.clear()
    layout = engine.connector._layout
    (window,) = [index for index, group in enumerate(layout.spec.groups) if group.kind is GroupKind.WINDOW]
    keys = audit.keys_of(window)
    assert len(keys) >= 3
    arena = engine.worker_connector._worker._arena
    for key in keys:
        slot = stack.primary.pin(key)
        arena.views(slot)[-1][-1] ^= 1
        stack.primary.unpin(key)
    warm = [engine.generate([prompt])[0] for _ in range(3)]
    assert [each.finish_reason for each in warm] == ["error", cold.finish_reason, cold.finish_reason]
    require_same_output([cold, cold], warm[1:])
    assert warm[2].num_cached_tokens > 0


def test_a_failed_disk_read_is_not_a_failed_load(engine: Engine, audit: Audit, kind: str) -> None:
    """It fails before the engine has allocated blocks for the request, so no request can fail."""
    prompt = make_prompt(exact_prompt_lengths(kind, 1)[0], seed=3)
    cold = engine.generate([prompt])[0]
    stack = engine.connector._scheduler._stack
    engine.reset_prefix_cache()
    stack.primary.clear()
    faults_process.plan(Rule(Operation.LOAD, Fail(FailureReason.IO)))
    warm = engine.generate([prompt])[0]
    faults_process.plan()
    require_same_output([cold], [warm])
    assert warm.finish_reason == cold.finish_reason != "error"
    assert warm.num_cached_tokens == 0 and audit.loads == []
