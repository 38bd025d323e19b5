"""One life of an engine over a server of LMCache, as a process of its own: runs prompts, and writes what they gave.

Its host memory begins empty, so what it does not compute comes from the server.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import patience
from harness import SAME_STEPS, Engine, make_prompt, running_engine
from restart_process import prompts, run

from kits.lmcache.server_process import eventually

MAX_CASCADES = 3


def meet_server(engine: Engine) -> None:
    """Let the rank register its memory, which it begins with the first step. What it is told to load waits for that
    for a few seconds alone, and a machine may be busy."""
    engine.add(make_prompt(2, seed=-1))
    engine.run()
    shelves = engine.worker_connector._worker._mover.media["lmcache"]._shelves.values()
    assert eventually(lambda: all(shelf.ready is not None for shelf in shelves)), "the server takes no memory"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--http-port", type=int, required=True)
    chosen = parser.parse_args(arguments)
    server = {"type": "lmcache", "url": chosen.url, "http_port": chosen.http_port, "pool": "32MiB"}
    # A server that is slow today is no reason for another answer.
    server |= {"ask_timeout_seconds": patience.seconds(6.0)}
    config = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "tiers": [{"type": "ram", "capacity": "64MiB"}, server],
            "load_timeout_seconds": patience.seconds(30.0),
            "compute_tokens_per_second": 1,  # whatever a question takes, it is worth it
            **SAME_STEPS,
        },
    }
    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=config) as engine:
        meet_server(engine)
        results = run(engine, prompts(chosen.kind), drain=True)
        stack = engine.connector._scheduler._stack
        for _ in range(MAX_CASCADES):  # what a slow machine had no room for on its way at first
            for key in stack.near.eviction_order():
                stack.cascade(key)
            engine.drain()
        chosen.output.write_text(json.dumps(results))
