"""An engine of two tensor-parallel ranks with a disk tier, run as its own process.

Each rank has a worker in another process, with its own host memory and segment files. One rank's host memory is
damaged, and so is its disk; its disk is also forged with zeros whose headers and checksums are correct.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import faults_process
import patience
import restart_process
from harness import SAME_STEPS, Engine, running_engine
from stored_records import records, segments

from hybridkv.planner import GroupKind
from hybridkv.tiers import Slot
from hybridkv.tiers.disk.format.layout import PAGE_BYTES, checksum
from hybridkv.tiers.disk.format.segment import encode_record
from hybridkv.tiers.stack import BreakerOptions
from hybridkv.tiers.stack.health import TierHealth
from hybridkv.tiers.stack.moves import MoveResult

RANKS = 2
FAILURES = "vllm:hybridkv_load_failures,"


def damage(cache: Path, rank: int) -> None:
    """Flip one bit of each record of a rank."""
    for segment in segments(cache, rank):
        found = list(records(segment))
        with segment.open("r+b") as file:
            for offset, _ in found:
                file.seek(offset + PAGE_BYTES)
                [byte] = file.read(1)
                file.seek(offset + PAGE_BYTES)
                file.write(bytes([byte ^ 1]))


def forge(cache: Path, rank: int) -> None:
    """Replace each payload of a rank by zeros, with matching headers."""
    for segment in segments(cache, rank):
        found = list(records(segment))
        with segment.open("r+b") as file:
            for offset, header in found:
                zeros = bytes(header.payload_bytes)
                file.seek(offset)
                file.write(encode_record(header._replace(payload_checksum=checksum(zeros))))
                file.seek(offset + PAGE_BYTES)
                file.write(zeros)


def flip_in_host_memory(worker: Any, rank: int, slot: Slot) -> bool:
    """Runs in each worker: flip one bit of a chunk on one rank only."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank != rank:
        return False
    get_kv_transfer_group()._worker._arena.views(slot)[-1][-1] ^= 1
    return True


class LoadLog:
    """The loads planned by the scheduler, and their results.

    Attributes:
        plans: the loads of each request, in order: the group and key of each chunk.
        failed: requests with a load reported as failed.
        blamed: the reason of each failure that workers reported.
    """

    def __init__(self, engine: Engine) -> None:
        self.plans: dict[str, list[list[tuple[int, bytes]]]] = {}
        self.failed: list[str] = []
        self.blamed: list[str] = []
        scheduler = engine.connector._scheduler
        plan_step, on_output = scheduler.plan_step, scheduler.on_output

        def planning(*arguments: Any) -> Any:
            plan = plan_step(*arguments)
            for load in plan.loads:
                copied = [(copy.group_index, copy.key) for copy in load.copies]
                self.plans.setdefault(load.request_id, []).append(copied)
            return plan

        def hearing(output: Any) -> None:
            self.failed += sorted(output.failed_recving or ())
            failures = getattr(output.kv_connector_worker_meta, "load_failures", {})
            self.blamed += [failure.reason for request in failures.values() for failure in request]
            on_output(output)

        scheduler.plan_step, scheduler.on_output = planning, hearing

    def forget(self) -> None:
        self.plans.clear()
        self.failed.clear()
        self.blamed.clear()


def damage_host_memory(engine: Engine, key: bytes, rank: int) -> None:
    """Flip one bit of a chunk in one rank's host memory."""
    near = engine.connector._scheduler._stack.primary
    slot = near.pin(key)
    near.unpin(key)
    flipped = engine.core.model_executor.collective_rpc(flip_in_host_memory, args=(rank, slot))
    assert sorted(flipped) == [False] * (RANKS - 1) + [True]


def first_full_chunk(engine: Engine, plan: list[tuple[int, bytes]]) -> bytes:
    """A chunk without which no request could resume at any boundary."""
    groups = engine.connector._scheduler._layout.spec.groups
    return next(key for group, key in plan if groups[group].kind is GroupKind.FULL)


def life(engine: Engine, kind: str, loads: LoadLog, forgets_host_memory: bool = False) -> dict[str, Any]:
    """Run the prompts again after a reset of the engine's own cache."""
    stack = engine.connector._scheduler._stack
    stack._tiers[0].health = TierHealth(BreakerOptions(), BreakerOptions())
    engine.reset_prefix_cache()
    if forgets_host_memory:
        stack.primary.clear()
    faults_process.COUNTED.clear()
    loads.forget()
    before = engine.counters()
    results = restart_process.run(engine, restart_process.prompts(kind), drain=True)
    stack.take_counts()
    counted = faults_process.COUNTED
    return {
        "results": results,
        "promoted": sum(counts.moves.promotions.get(MoveResult.DONE, 0) for counts in counted),
        "failures": sum(sum(counts.moves.failures.values()) for counts in counted),
        "loads": [len(plans) for plans in loads.plans.values()],
        "failed_loads": len(loads.failed),
        "blamed": loads.blamed.copy(),
        "counted": {
            series.partition(",reason=")[2]: value - before.get(series, 0.0)
            for series, value in engine.counters().items()
            if series.startswith(FAILURES) and value != before.get(series, 0.0)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    chosen = parser.parse_args()
    cache = chosen.directory / "cache"
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": [
                {"type": "ram", "capacity": "64MiB"},
                {"type": "disk", "path": str(cache), "capacity": "1GiB"},
            ],
            # Three busy-waiting processes share the machine, so a step may be slow; this test does not measure time.
            "load_timeout_seconds": patience.seconds(30.0),
            "load": "async",
            **SAME_STEPS,
        },
    }
    faults_process.count()
    parallel: dict[str, Any] = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
    with running_engine(
        chosen.kind, chosen.directory, kv_transfer_config=config, disable_log_stats=False, **parallel
    ) as engine:
        stack, loads = engine.connector._scheduler._stack, LoadLog(engine)
        lives = {"cold": life(engine, chosen.kind, loads), "near": life(engine, chosen.kind, loads)}
        [first_load] = next(iter(loads.plans.values()))
        key = first_full_chunk(engine, first_load)
        damage_host_memory(engine, key, rank=1)
        lives["torn, whole on disk"] = life(engine, chosen.kind, loads)
        damage_host_memory(engine, key, rank=1)
        stack.secondary["disk"].invalidate(key)
        lives["torn"] = life(engine, chosen.kind, loads)
        lives["far"] = life(engine, chosen.kind, loads, forgets_host_memory=True)
        damage(cache, rank=1)
        lives["damaged"] = life(engine, chosen.kind, loads, forgets_host_memory=True)
        # Failed chunks are computed and stored again; chunks skipped by the open breaker fail once more.
        for _ in range(restart_process.NUM_PROMPTS):
            lives["mended"] = life(engine, chosen.kind, loads, forgets_host_memory=True)
        forge(cache, rank=1)
        lives["forged"] = life(engine, chosen.kind, loads, forgets_host_memory=True)
        chosen.output.write_text(json.dumps(lives))


if __name__ == "__main__":
    main()
