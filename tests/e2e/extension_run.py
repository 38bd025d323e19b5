"""One engine's answers as JSON, with hybridkv.native or without: cold, from host memory, and from disk.

Also what it then has on disk.

A process of its own, because who copies is chosen once for a process:

    python extension_run.py KIND with|without DIRECTORY OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import harness
import patience
import restart_process
from harness import SAME_STEPS, exact_prompt_lengths, make_prompt


def connector(cache: Path) -> dict[str, Any]:
    tiers = [
        {"type": "ram", "capacity": "512MiB"},
        {"type": "disk", "path": str(cache), "capacity": "1GiB"},
    ]
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A disk that is slow today is no reason for another answer.
        "kv_connector_extra_config": {"tiers": tiers, "load_timeout_seconds": patience.seconds(30.0), **SAME_STEPS},
    }


def main(kind: str, choice: str, directory: str, output: str) -> None:
    if choice == "without":
        sys.modules["hybridkv.native"] = None  # type: ignore[assignment]
    prompts = [make_prompt(length, seed=i) for i, length in enumerate(exact_prompt_lengths(kind, 3))]
    scratch = harness.scratch_directory(Path(directory))
    cache = scratch / f"cache-{choice}"
    with harness.running_engine(kind, scratch, kv_transfer_config=connector(cache)) as engine:
        stack = engine.connector._scheduler._stack
        cold = restart_process.run(engine, prompts, drain=True)
        restart_process.bring_to_disk(engine, stack)
        engine.reset_prefix_cache()
        warm = restart_process.run(engine, prompts, drain=True)
        engine.reset_prefix_cache()
        stack.near.clear()
        far = restart_process.run(engine, prompts, drain=True)
        runner = type(engine.worker_connector._worker._mover.media["disk"]._runner).__name__

    from stored_records import payload_digests

    from hybridkv.tiers.digests import digest_by_xxhash, records_digest
    from hybridkv.transfer.native import copy_one_by_one, runs_copier

    was_used = runs_copier.cache_info().currsize == records_digest.cache_info().currsize == 1
    used = {
        "was_used": was_used,
        "copies": runs_copier() is not copy_one_by_one,
        "checksums": records_digest(1) is not digest_by_xxhash,
        "disk": runner,
    }
    phases = {"cold": cold, "warm": warm, "far": far}
    stored = payload_digests(cache, rank=0)
    Path(output).write_text(json.dumps({"extension": used, **phases, "stored": stored}))


if __name__ == "__main__":
    main(*sys.argv[1:])
