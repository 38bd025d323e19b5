"""An engine whose disk tier is made to fail in one way after another, as a process of its own.

Where it can be done, the fault is a real one: the directory is removed, the file system is full. What no file system
does on command, a read that never ends or fails, or the kernel's turn to read-only, is injected below the tier.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import restart_process
from harness import Engine, running_engine

from hybridkv.connectors.vllm import tiers
from hybridkv.tiers import TierMedium
from hybridkv.tiers.disk import FileIO
from hybridkv.tiers.faults import Drop, Fail, FaultInjectingMedium, FaultPlan, Operation, Rule
from hybridkv.tiers.faults.plan import Trigger
from hybridkv.tiers.stack import Breaker, StackCounts, TierStack
from hybridkv.tiers.stack.moves import MoveResult

LOAD_TIMEOUT_S = 2.0
MEDIA: list[FaultInjectingMedium] = []
COUNTED: list[StackCounts] = []
WRITES = {
    name: getattr(FileIO, name)
    for name in ("pwritev", "allocate", "truncate", "make_directory", "remove_directory", "remove", "rename")
}


def inject_below_the_tier() -> None:
    """Every disk medium that is built from now on can be told to fail."""
    build = tiers.disk_medium

    def disk_medium(*arguments: Any) -> TierMedium:
        MEDIA.append(FaultInjectingMedium(build(*arguments), FaultPlan()))
        return MEDIA[-1]

    tiers.disk_medium = disk_medium  # type: ignore[assignment]


def count() -> None:
    """Keep what the engine's statistics take away."""
    take = TierStack.take_counts

    def take_counts(stack: TierStack) -> StackCounts:
        COUNTED.append(take(stack))
        return COUNTED[-1]

    TierStack.take_counts = take_counts  # type: ignore[method-assign]


def plan(*rules: Rule) -> None:
    for medium in MEDIA:
        medium._trigger = Trigger(FaultPlan(rules))


def refuse_writes() -> None:
    """As a file system that the kernel has made read-only after an error. It does so for no request of ours."""

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in WRITES:
        setattr(FileIO, name, refuse)
    plan(Rule(Operation.STORE, Fail()))  # what the extension writes passes those calls by


def accept_writes() -> None:
    for name, function in WRITES.items():
        setattr(FileIO, name, function)


def injected(directory: Path) -> dict[str, Callable[[], object]]:
    """Faults that need no rights of an administrator, the last one for good."""
    return {
        "none": lambda: None,
        "read-only": refuse_writes,
        "stalled": lambda: plan(Rule(Operation.LOAD, Drop())),
        "failing": lambda: plan(Rule(Operation.LOAD, Fail())),
        "removed": lambda: shutil.rmtree(directory),
    }


def warm(engine: Engine, kind: str, fault: Callable[[], object]) -> dict[str, Any]:
    """The prompts again, from disk as far as it still works."""
    stack = engine.connector._scheduler._stack
    stack._breaker = Breaker()
    engine.reset_prefix_cache()
    stack.near.clear()
    COUNTED.clear()
    plan()
    accept_writes()
    fault()
    started_s = time.monotonic()
    results = restart_process.run(engine, kind, drain=True)
    stack.take_counts()
    return {
        "results": results,
        "seconds": time.monotonic() - started_s,
        "promoted": sum(counts.promotions.get(MoveResult.DONE, 0) for counts in COUNTED),
        "timeouts": sum(counts.timeouts for counts in COUNTED),
        "failures": sum(sum(counts.failures.values()) for counts in COUNTED),
        "openings": sum(counts.breaker_openings for counts in COUNTED),
        "disk_bytes": stack.far.disk_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--mount", action="store_true", help="put the cache on a small file system; needs the right to")
    chosen = parser.parse_args()
    cache = chosen.directory / "faulty"
    cache.mkdir(mode=0o700)
    if chosen.mount:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(cache)], check=True)
    disk = {"type": "disk", "path": str(cache), "capacity": "256MiB"}
    extra = {"tiers": [{"type": "ram", "capacity": "64MiB"}, disk], "load_timeout_seconds": LOAD_TIMEOUT_S}
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    inject_below_the_tier()
    count()
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=config) as engine:
        lives = {"cold": {"results": restart_process.run(engine, chosen.kind, drain=True)}}
        # The small file system is full from the beginning.
        faults: dict[str, Callable[[], object]] = {"full": lambda: None} if chosen.mount else injected(cache)
        for name, fault in faults.items():
            lives[name] = warm(engine, chosen.kind, fault)
        chosen.output.write_text(json.dumps(lives))


if __name__ == "__main__":
    main()
