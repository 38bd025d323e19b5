"""One engine with a disk tier, run as its own process: runs prompts, writes the results, and ends.

Its end varies: clean, clean with most chunks still unwritten, SIGKILL after everything is on disk, or SIGKILL during
writes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import patience
from harness import SAME_STEPS, Engine, exact_prompt_lengths, make_prompt, running_engine

NUM_PROMPTS = 3
MAX_CASCADES = 3
DRAIN_S = patience.seconds(6.0)


def prompts(kind: str, count: int = NUM_PROMPTS, first_seed: int = 0) -> list[list[int]]:
    lengths = exact_prompt_lengths(kind, count)
    return [make_prompt(length, seed=seed) for seed, length in enumerate(lengths, first_seed)]


def run(engine: Engine, prompts: Sequence[Sequence[int]], drain: bool) -> list[dict[str, Any]]:
    """The result of each prompt, run one after the other."""
    results = []
    for prompt in prompts:
        request_id = engine.add(prompt)
        engine.run()
        if drain:
            engine.drain()
        results.append(engine.result(request_id).as_json())
    return results


def bring_to_disk(engine: Engine, stack: Any) -> None:
    """Store chunks on disk for which a slow machine had no room at first."""
    for _ in range(MAX_CASCADES):
        stack.secondary["disk"].drain(DRAIN_S)
        for key in stack.primary.eviction_order():
            stack.cascade(key)
        engine.drain()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--end", choices=["clean", "at-once", "killed", "killed-early"], required=True)
    parser.add_argument("--capacity", default="1GiB")
    parser.add_argument("--dtype")
    parser.add_argument("--weights-seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    tiers = [
        {"type": "ram", "capacity": "64MiB"},
        {"type": "disk", "path": str(chosen.directory / "cache"), "capacity": chosen.capacity},
    ]
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A slow disk must not change the result.
        "kv_connector_extra_config": {"tiers": tiers, "load_timeout_seconds": patience.seconds(30.0), **SAME_STEPS},
    }
    options = {"dtype": chosen.dtype} if chosen.dtype else {}
    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    options["weights_seed"] = chosen.weights_seed
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=config, **options) as engine:
        is_patient = chosen.end in ("clean", "killed")
        results = run(engine, prompts(chosen.kind), drain=is_patient)
        if is_patient:
            bring_to_disk(engine, engine.connector._scheduler._stack)
        chosen.output.write_text(json.dumps(results))
        if chosen.end in ("killed", "killed-early"):
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
