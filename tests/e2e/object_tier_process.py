"""One engine on a fleet's object store, run as its own process: runs prompts, and writes the results.

Its host memory is empty at the start, so restored tokens come from the store.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import patience
from harness import SAME_STEPS, running_engine
from restart_process import prompts, run

MAX_CASCADES = 3


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tier", type=json.loads, required=True)
    chosen = parser.parse_args(arguments)
    # A slow server must not change the result.
    tier = {"type": "object", "lookup_timeout_seconds": patience.seconds(6.0), "cascade": "all", **chosen.tier}
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": [{"type": "ram", "capacity": "64MiB"}, tier],
            "weights_digest": "full",
            "load_timeout_seconds": patience.seconds(30.0),
            "compute_tokens_per_second": 1,  # every lookup is worth its wait
            **SAME_STEPS,
        },
    }
    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=config) as engine:
        results = run(engine, prompts(chosen.kind), drain=True)
        stack = engine.connector._scheduler._stack
        for _ in range(MAX_CASCADES):  # stores chunks for which a slow machine had no room at first
            for key in stack.primary.eviction_order():
                stack.cascade(key)
            engine.drain()
        chosen.output.write_text(json.dumps(results))
