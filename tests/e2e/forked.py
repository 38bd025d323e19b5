"""Processes with vLLM already imported, because the import takes several times longer than the start of a tiny engine.

They are forks of one process that has imported vLLM (`vllm_imported.py`) and has no engine and no other thread. They
inherit only its environment, set before that import, and its hash seed for strings. Tests that need a fresh interpreter
do not use this module.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from harness import prepare_environment, scratch_directory

NOTHING: Mapping[str, str] = MappingProxyType({})


def start(
    main: Callable[..., None], *arguments: Any, log: Path, environment: Mapping[str, str] = NOTHING
) -> ForkServerProcess:
    """Start a process that calls `main`, a function of a module. It ends with this process at the latest.

    Args:
        arguments: of `main`. A socket is duplicated, and the caller may close its own.
        log: a file for its output.
        environment: additional variables.
    """
    process = _context().Process(target=_begin, args=(main, arguments, log, dict(environment)), daemon=True)
    process.start()
    return process


def run(
    main: Callable[..., None],
    *arguments: Any,
    log: Path,
    within_s: float,
    environment: Mapping[str, str] = NOTHING,
) -> tuple[int, str]:
    """Run such a process to its end. Its exit status, which is negative after a signal, and its log."""
    process = start(main, *arguments, log=log, environment=environment)
    process.join(within_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"it did not end in {within_s:.0f} s:\n{log.read_text(errors='replace')}")
    return process.exitcode, log.read_text(errors="replace")


@functools.cache
def _context() -> ForkServerContext:
    """Start the parent process, which imports vLLM."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_imported"])
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.copy():
            patch.setenv(name, os.environ[name])  # restores the variable after the block
        prepare_environment(scratch_directory(Path(tempfile.mkdtemp())) / "parent")
        os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
        # vLLM's block hashes depend on it if it is set, and users do not set it.
        os.environ.pop("PYTHONHASHSEED", None)
        forkserver.ensure_running()
    return context


def _begin(main: Callable[..., None], arguments: tuple[Any, ...], log: Path, environment: Mapping[str, str]) -> None:
    if "vllm_imported" not in sys.modules:
        raise RuntimeError("the parent has not imported vLLM: is PYTHONPATH of no use to this interpreter?")
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ |= environment
    main(*arguments)
