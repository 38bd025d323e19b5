"""An engine of two tensor-parallel ranks with a disk tier, as a process of its own.

Each rank has a worker in another process, with its own host memory and its own segment files. What is on disk of one
rank is damaged, and forged: zeros, with headers and checksums that are right.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults_process
import restart_process
from harness import Engine, running_engine

from hybridkv.tiers.disk.format import RecordHeader, checksum, decode_record, encode_record
from hybridkv.tiers.disk.layout import PAGE_BYTES, SEGMENT_HEAD_BYTES, record_bytes
from hybridkv.tiers.stack import Breaker
from hybridkv.tiers.stack.moves import MoveResult

RANKS = 2


def records(segment: Path) -> Iterator[tuple[int, RecordHeader]]:
    """Where each record of a segment file begins, and its header."""
    data = segment.read_bytes()
    offset = SEGMENT_HEAD_BYTES
    while (header := decode_record(data[offset : offset + PAGE_BYTES])) is not None:
        yield offset, header
        offset += record_bytes(header.payload_bytes)


def segments(cache: Path, rank: int) -> list[Path]:
    return sorted(cache.glob(f"*/rank-{rank}/segment-*"))


def damage(cache: Path, rank: int) -> None:
    """One bit of each record of a rank."""
    for segment in segments(cache, rank):
        found = list(records(segment))
        with segment.open("r+b") as file:
            for offset, _ in found:
                file.seek(offset + PAGE_BYTES)
                [byte] = file.read(1)
                file.seek(offset + PAGE_BYTES)
                file.write(bytes([byte ^ 1]))


def forge(cache: Path, rank: int) -> None:
    """Zeros in place of each payload of a rank, and a header that says so."""
    for segment in segments(cache, rank):
        found = list(records(segment))
        with segment.open("r+b") as file:
            for offset, header in found:
                zeros = bytes(header.payload_bytes)
                file.seek(offset)
                file.write(encode_record(header._replace(payload_checksum=checksum(zeros))))
                file.seek(offset + PAGE_BYTES)
                file.write(zeros)


def life(engine: Engine, kind: str, forgets_host_memory: bool = False) -> dict[str, Any]:
    """The prompts again, after the engine has forgotten its own blocks."""
    stack = engine.connector._scheduler._stack
    stack._breaker = Breaker()
    engine.reset_prefix_cache()
    if forgets_host_memory:
        stack.near.clear()
    faults_process.COUNTED.clear()
    results = restart_process.run(engine, kind, drain=True)
    stack.take_counts()
    counted = faults_process.COUNTED
    return {
        "results": results,
        "promoted": sum(counts.promotions.get(MoveResult.DONE, 0) for counts in counted),
        "failures": sum(sum(counts.failures.values()) for counts in counted),
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
            # Three processes that spin while they wait share the machine: a step may take long, and nothing here is
            # about time.
            "load_timeout_seconds": 300,
        },
    }
    faults_process.count()
    parallel = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=config, **parallel) as engine:
        lives = {"cold": life(engine, chosen.kind), "near": life(engine, chosen.kind)}
        lives["far"] = life(engine, chosen.kind, forgets_host_memory=True)
        damage(cache, rank=1)
        lives["damaged"] = life(engine, chosen.kind, forgets_host_memory=True)
        # What failed is computed and stored again; what the open breaker kept from being tried fails once more.
        for _ in range(restart_process.NUM_PROMPTS):
            lives["mended"] = life(engine, chosen.kind, forgets_host_memory=True)
        forge(cache, rank=1)
        lives["forged"] = life(engine, chosen.kind, forgets_host_memory=True)
        chosen.output.write_text(json.dumps(lives))


if __name__ == "__main__":
    main()
