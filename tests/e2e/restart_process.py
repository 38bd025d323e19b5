"""One life of an engine with a disk tier, as a process of its own: runs prompts, writes what they gave, and ends.

How it ends is the point: cleanly, by SIGKILL once everything is on disk, or by SIGKILL in the middle of it.
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

from harness import Engine, Result, exact_prompt_lengths, make_prompt, running_engine

NUM_PROMPTS = 3


def prompts(kind: str, count: int = NUM_PROMPTS, first_seed: int = 0) -> list[list[int]]:
    lengths = exact_prompt_lengths(kind, count)
    return [make_prompt(length, seed=seed) for seed, length in enumerate(lengths, first_seed)]


def run(engine: Engine, prompts: Sequence[Sequence[int]], drain: bool) -> list[dict[str, Any]]:
    """What each prompt gave, one after the other."""
    results = []
    for prompt in prompts:
        request_id = engine.add(prompt)
        engine.run()
        if drain:
            engine.drain()
        results.append(as_json(engine.result(request_id)))
    return results


def as_json(result: Result) -> dict[str, Any]:
    """A result that survives being written down, to the last digit."""
    logprobs = [{str(token): value.hex() for token, value in step.items()} for step in result.logprobs]
    return {"tokens": result.token_ids, "logprobs": logprobs, "cached": result.num_cached_tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--end", choices=["clean", "killed", "killed-early"], required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--weights-seed", type=int, default=0)
    chosen = parser.parse_args()
    tiers = [
        {"type": "ram", "capacity": "64MiB"},
        {"type": "disk", "path": str(chosen.directory / "cache"), "capacity": "1GiB"},
    ]
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": tiers},
    }
    arguments = {"dtype": chosen.dtype} if chosen.dtype else {}
    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    arguments["weights_seed"] = chosen.weights_seed
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=config, **arguments) as engine:
        results = run(engine, prompts(chosen.kind), drain=chosen.end != "killed-early")
        chosen.output.write_text(json.dumps(results))
        if chosen.end != "clean":
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
