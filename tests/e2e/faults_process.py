"""An engine whose disk tier is made to fail in one way after another, as a process of its own.

Where it can be done, the fault is a real one: the directory is removed, the file system is full. What no file system
does on command, a read that never ends or fails, or the kernel's turn to read-only, is injected below the tier.

The connector's time stands still unless it is moved here, so that nothing is late because a machine is slow, and a wait
that only its deadline can end does not end by itself.
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
"""A read that ends only when `end_held_reads` says so."""
STEPS = 200
"""As many as show that a request waits."""
NUM_PROMPTS_OF_A_STALL = 6
MEDIA: list[FaultInjectingMedium] = []
COUNTED: list[StackCounts] = []
FILES_COUNTED: list[DiskCounts] = []
WRITES = {
    name: getattr(FileIO, name)
    for name in ("pwritev", "allocate", "truncate", "make_directory", "remove_directory", "remove", "rename")
}


class HeldClock:
    """Seconds, which pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = HeldClock()


def hold_time() -> None:
    """Every connector that is built from now on lives in the time of `CLOCK`."""
    tiers.clock = CLOCK


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

    TierStack.take_counts = take_counts  # type: ignore[method-assign, assignment]
    take_from_disk = DiskIndex.take_disk_counts

    def take_disk_counts(index: DiskIndex) -> DiskCounts:
        FILES_COUNTED.append(take_from_disk(index))
        return FILES_COUNTED[-1]

    DiskIndex.take_disk_counts = take_disk_counts  # type: ignore[method-assign, assignment]


def take_counts_of(stack: TierStack) -> dict[str, Any]:
    """What was counted since the last call."""
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
    """Reads that have come to nothing, or have not ended."""
    return sum(medium._num_dropped + len(medium._delayed) for medium in MEDIA)


def end_held_reads() -> None:
    for medium in MEDIA:
        medium._delayed = [(1, completion) for _, completion in medium._delayed]


def refuse_writes() -> None:
    """As a file system that the kernel has made read-only after an error. It does so for no request of ours."""

    def refuse(*arguments: object, **named: object) -> NoReturn:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in WRITES:
        setattr(FileIO, name, refuse)
    plan(Rule(Operation.STORE, Fail(FailureReason.IO)))  # what the extension writes passes those calls by


def accept_writes() -> None:
    for name, function in WRITES.items():
        setattr(FileIO, name, function)


def injected(directory: Path) -> dict[str, Callable[[], object]]:
    """Faults that need no rights of an administrator, the last one for good."""
    return {
        "none": lambda: None,
        "read-only": refuse_writes,
        "failing": lambda: plan(Rule(Operation.LOAD, Fail(FailureReason.IO))),
        "removed": lambda: shutil.rmtree(directory),
    }


def begin(engine: Engine, stored: list[list[int]]) -> tuple[TierStack, list[dict[str, Any]]]:
    """The tiers, with these prompts on a disk that works and nowhere else, and what they gave, computed."""
    stack: TierStack = engine.connector._scheduler._stack
    assert isinstance(stack.secondary["disk"], DiskIndex)
    stack._tiers[0].health = TierHealth(BreakerOptions(), BreakerOptions())
    plan()
    accept_writes()
    # What failed in the life before need not rest any longer.
    stack.secondary["disk"]._maintenance.state.retries._until_s.clear()
    cold = []
    for prompt in stored:
        cold += restart_process.run(engine, [prompt], drain=True)
        restart_process.bring_to_disk(engine, stack)
    engine.reset_prefix_cache()
    stack.primary.clear()
    return stack, cold


def life(engine: Engine, kind: str, number: int, fault: Callable[[], object]) -> dict[str, Any]:
    """Prompts of this life alone, computed and then asked again with a fault; and one that is new then."""
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
    """Whether some steps bring a request no nearer to its end."""
    for _ in range(STEPS):
        engine.step()
    return request_id not in engine._finished


def stall(engine: Engine, kind: str, number: int, rule: Rule) -> dict[str, Any]:
    """The first prompt's reads stand still; the second one comes while they do; then the disk is well again.

    The others come after that, and the first two once more at the end. The clock is moved three times: to shortly
    before the first one's deadline, to that deadline, and to where the breaker may try the disk again.
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
    parser.add_argument("--mount", action="store_true", help="put the cache on a small file system; needs the right to")
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
