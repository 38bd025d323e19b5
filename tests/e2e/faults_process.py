"""An engine whose disk tier fails in several ways, run as its own process.

Faults are real where possible: the directory is removed, the file system is full. Reads that never end or fail, and a
file system that becomes read-only, are injected below the tier. The connector's time passes only on command, so a slow
machine delays nothing, and a wait with a deadline does not end by itself.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import restart_process
from harness import SAME_STEPS, Engine, make_prompt, running_engine
from restart_process import prompts

from hybridkv.connectors.vllm.offload import tiers
from hybridkv.tiers import FailureReason, TierMedium
from hybridkv.tiers.disk import DiskCounts, DiskIndex, FileIO
from hybridkv.tiers.stack import BreakerOptions, BreakerState, Direction, StackCounts, TierStack
from hybridkv.tiers.stack.health import TierHealth
from kits.tiers.faults import Delay, Drop, Fail, FaultInjectingMedium, FaultPlan, Operation, Rule
from kits.tiers.faults.plan import Trigger

LOAD_TIMEOUT_S = 30.0
HELD = Delay(num_polls=1 << 60)
"""A read that ends only with `end_held_reads`."""
STEPS = 200
"""Enough steps to show that a request waits."""
NUM_PROMPTS_OF_A_STALL = 6
MEDIA: list[FaultInjectingMedium] = []
COUNTED: list[StackCounts] = []
FILES_COUNTED: list[DiskCounts] = []
WRITES = {
    name: getattr(FileIO, name)
    for name in ("pwritev", "allocate", "truncate", "make_directory", "remove_directory", "remove", "rename")
}


class HeldClock:
    """Seconds that pass only on command."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = HeldClock()


def hold_time() -> None:
    """Connectors created from now on use the time of `CLOCK`."""
    tiers.clock = CLOCK


def inject_below_the_tier() -> None:
    """Disk media created from now on can be made to fail."""
    build = tiers.DiskMedium

    def disk_medium(*arguments: Any) -> TierMedium:
        MEDIA.append(FaultInjectingMedium(build(*arguments), FaultPlan()))
        return MEDIA[-1]

    tiers.DiskMedium = disk_medium  # type: ignore[misc, assignment]


def count() -> None:
    """Keep the counts that the engine's statistics take."""
    take = TierStack.take_counts

    def take_counts(stack: TierStack) -> StackCounts:
        COUNTED.append(take(stack))
        return COUNTED[-1]

    TierStack.take_counts = take_counts  # type: ignore[method-assign, assignment]
    take_from_disk = DiskIndex.take_disk_counts

    def take_disk_counts(index: DiskIndex) -> DiskCounts:
        FILES_COUNTED.append(take_from_disk(index))
        return FILES_COUNTED[-1]

    DiskIndex.take_disk_counts = take_disk_counts  # type: ignore[method-assign, assignment]


def take_counts_of(stack: TierStack) -> dict[str, Any]:
    """The counts since the last call."""
    stack.take_counts()
    assert isinstance(stack.secondary["disk"], DiskIndex)
    stack.secondary["disk"].drain(restart_process.DRAIN_S)
    stack.secondary["disk"].take_disk_counts()
    promotions: Counter[str] = Counter()
    cascades: Counter[str] = Counter()
    openings: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for counts in (each.moves for each in COUNTED):
        promotions.update({str(result): number for result, number in counts.promotions.items()})
        cascades.update({str(result): number for result, number in counts.cascades.items()})
        openings.update({str(direction): number for direction, number in counts.breaker_openings.items()})
        failures.update(counts.failures)
    files = reduce(DiskCounts.merge, FILES_COUNTED)
    counted = {
        "promotions": promotions,
        "cascades": cascades,
        "failures": failures,
        "timeouts": sum(counts.timeouts for counts in COUNTED),
        "openings": openings,
        "file_errors": files.failures,
    }
    COUNTED.clear()
    FILES_COUNTED.clear()
    return counted


def plan(*rules: Rule) -> None:
    for medium in MEDIA:
        medium._trigger = Trigger(FaultPlan(rules))


def num_stalled() -> int:
    """The number of reads that were dropped or have not ended."""
    return sum(medium._num_dropped + len(medium._delayed) for medium in MEDIA)


def end_held_reads() -> None:
    for medium in MEDIA:
        medium._delayed = [(1, completion) for _, completion in medium._delayed]


def refuse_writes() -> None:
    """Make the file system appear read-only, as the kernel does after an error, but never on request."""

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in WRITES:
        setattr(FileIO, name, refuse)
    plan(Rule(Operation.STORE, Fail(FailureReason.IO)))  # writes by the extension bypass those calls


def accept_writes() -> None:
    for name, function in WRITES.items():
        setattr(FileIO, name, function)


def injected(directory: Path) -> dict[str, Callable[[], object]]:
    """Faults that need no administrator rights; the last one is permanent."""
    return {
        "none": lambda: None,
        "read-only": refuse_writes,
        "failing": lambda: plan(Rule(Operation.LOAD, Fail(FailureReason.IO))),
        "removed": lambda: shutil.rmtree(directory),
    }


def begin(engine: Engine, stored: list[list[int]]) -> tuple[TierStack, list[dict[str, Any]]]:
    """Put these prompts on a working disk only. The tiers, and the results of computing the prompts."""
    stack: TierStack = engine.connector._scheduler._stack
    assert isinstance(stack.secondary["disk"], DiskIndex)
    stack._tiers[0].health = TierHealth(BreakerOptions(), BreakerOptions())
    plan()
    accept_writes()
    # Failures of the previous life must not delay retries any longer.
    stack.secondary["disk"]._maintenance.state.retries._until_s.clear()
    cold = []
    for prompt in stored:
        cold += restart_process.run(engine, [prompt], drain=True)
        restart_process.bring_to_disk(engine, stack)
    engine.reset_prefix_cache()
    stack.primary.clear()
    return stack, cold


def life(engine: Engine, kind: str, number: int, fault: Callable[[], object]) -> dict[str, Any]:
    """Compute prompts of this life, request them again with a fault, and then request a new prompt."""
    stored = prompts(kind, first_seed=100 * number)
    stack, cold = begin(engine, stored)
    before = take_counts_of(stack)
    fault()
    warm = restart_process.run(engine, stored, drain=True)
    restart_process.run(engine, [make_prompt(len(stored[-1]), seed=100 * number + 99)], drain=True)
    disk = stack.secondary["disk"]
    disk_bytes = disk._segments.allocated_bytes if isinstance(disk, DiskIndex) else None
    return {"cold": cold, "warm": warm, "before": before, "disk_bytes": disk_bytes, **take_counts_of(stack)}


def waits(engine: Engine, request_id: str) -> bool:
    """Whether a number of steps does not finish a request."""
    for _ in range(STEPS):
        engine.step()
    return request_id not in engine._finished


def stall(engine: Engine, kind: str, number: int, rule: Rule) -> dict[str, Any]:
    """The reads of the first prompt stall, the second prompt runs meanwhile, then the disk works again.

    The other prompts follow, and the first two are repeated at the end. The clock is moved three times: to shortly
    before the first prompt's deadline, to that deadline, and to the time when the breaker tries the disk again.
    """
    stored = prompts(kind, NUM_PROMPTS_OF_A_STALL, first_seed=100 * number)
    stack, cold = begin(engine, stored)
    take_counts_of(stack)
    before = num_stalled()
    plan(rule)
    request_id = engine.add(stored[0])
    while num_stalled() == before:
        engine.step()
    waited = [waits(engine, request_id)]
    CLOCK.now_s += LOAD_TIMEOUT_S - 1
    waited.append(waits(engine, request_id))
    early = take_counts_of(stack)
    CLOCK.now_s += 1
    engine.run()
    engine.drain()
    first = engine.result(request_id).as_json()
    second = restart_process.run(engine, stored[1:2], drain=True)
    state, late = stack.breaker_state(Direction.PROMOTE, "disk"), take_counts_of(stack)
    plan()
    end_held_reads()
    CLOCK.now_s += BreakerOptions().max_backoff_s
    engine.reset_prefix_cache()
    others = restart_process.run(engine, stored[2:], drain=True)
    return {
        "cold": cold,
        "warm": [first, *second, *others],
        "again": restart_process.run(engine, stored[:2], drain=True),
        "waited": waited,
        "early": early,
        "late": late,
        "after": take_counts_of(stack),
        "was_open": state is BreakerState.OPEN,
        "is_closed": stack.breaker_state(Direction.PROMOTE, "disk") is BreakerState.CLOSED,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--mount", action="store_true", help="put the cache on a small file system; requires permission to mount"
    )
    chosen = parser.parse_args()
    cache = chosen.directory / "faulty"
    cache.mkdir(mode=0o700)
    if chosen.mount:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(cache)], check=True)
    disk = {"type": "disk", "path": str(cache), "capacity": "256MiB"}
    extra = {
        "tiers": [{"type": "ram", "capacity": "64MiB"}, disk],
        "load_timeout_seconds": LOAD_TIMEOUT_S,
        **SAME_STEPS,
    }
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    hold_time()
    inject_below_the_tier()
    count()
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=config) as engine:
        # The small file system is full from the beginning.
        faults: dict[str, Callable[[], object]] = {"full": lambda: None} if chosen.mount else injected(cache)
        stalls: dict[str, Delay | Drop] = {} if chosen.mount else {"held": HELD, "stalled": Drop()}
        lives = {}
        for number, (name, action) in enumerate(stalls.items()):
            lives[name] = stall(engine, chosen.kind, number, Rule(Operation.LOAD, action))
        for number, (name, fault) in enumerate(faults.items(), len(stalls)):
            lives[name] = life(engine, chosen.kind, number, fault)
        chosen.output.write_text(json.dumps(lives))


if __name__ == "__main__":
    main()
