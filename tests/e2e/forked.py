"""Processes that begin with vLLM imported, which takes several times as long as a tiny engine's start.

They are forks of one process, which has imported vLLM (`vllm_imported.py`), and has no engine and no thread. They have
its environment, settled before that import, and the seed by which it hashes strings, and nothing else in common. What
must begin with a new interpreter is no matter of this module.
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
    """A process that calls `main`, a function of a module, and ends with this one at the latest.

    Args:
        arguments: of `main`. A socket among them is its own then, and may be closed here.
        log: a file for all that it writes.
        environment: variables besides those of all such processes.
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
    """Such a process from its start to its end: its exit status, which is negative after a signal, and its log."""
    process = start(main, *arguments, log=log, environment=environment)
    process.join(within_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"it did not end in {within_s:.0f} s:\n{log.read_text(errors='replace')}")
    return process.exitcode, log.read_text(errors="replace")


@functools.cache
def _context() -> ForkServerContext:
    """The parent has been started, and imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_imported"])
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.copy():
            patch.setenv(name, os.environ[name])  # so that it is as it was behind the block
        prepare_environment(scratch_directory(Path(tempfile.mkdtemp())) / "parent")
        os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
        # vLLM's hashes of blocks depend on it where it is set, and a user does not set it.
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
