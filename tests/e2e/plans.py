"""The plan of an engine by `hybridkv plan`, and the engine's log at its start."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

from hybridkv.cli.planning import PlanReport, plan


def as_options(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of `vllm.LLM` as options of `vllm serve`."""
    options = []
    for name, value in arguments.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            options.append(option if value else f"--no-{option[2:]}")
        else:
            options += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return options


def planned(model: Path, arguments: Mapping[str, Any], transfer: Mapping[str, Any]) -> PlanReport:
    """The plan. No engine may run in this process: it would lose its process groups."""
    harness.inspect_model_here(
        *json.loads((model / "config.json").read_text())["architectures"]
    )  # as vLLM does in a subprocess, but faster
    return plan(str(model), transfer, as_options(arguments))


@contextmanager
def start_lines() -> Iterator[list[str]]:
    """Collects what connectors of this process log during the block, one text per line."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, collector = logging.getLogger("vllm.hybridkv"), Collector()
    before = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(collector)
