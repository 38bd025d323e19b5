"""One of several engines on one LMCache server, run as its own process and controlled by lines of JSON.

It answers each line, in order, on the given file descriptor. It starts work on command, so that several engines can
start together.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from harness import Engine, running_engine
from lmcache_witness import may_ask, num_pages_under_way

from hybridkv.connectors.vllm import register
from kits.lmcache.server_process import eventually


def carry_out(engine: Engine, command: dict[str, Any]) -> Any:
    """Execute a command, and return its answer."""
    match command["do"]:
        case "answer":  # one prompt after the other
            return [engine.generate([prompt])[0].as_json() for prompt in command["prompts"]]
        case "forget":  # after the server has answered everything; whether it did, and nothing was pinned
            engine.drain()
            is_done = eventually(lambda: not num_pages_under_way(engine.worker_connector._worker))
            engine.reset_prefix_cache()
            return is_done
    raise ValueError(command["do"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--answers", type=int, required=True)
    parser.add_argument("--transfer", required=True)
    parser.add_argument("--arguments", required=True)
    chosen = parser.parse_args()
    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    # The plugin does this if it is installed; a second call changes nothing.
    register()
    transfer, arguments = json.loads(chosen.transfer), json.loads(chosen.arguments)
    with (
        os.fdopen(chosen.answers, "w") as answers,
        running_engine(chosen.kind, chosen.directory, kv_transfer_config=transfer, **arguments) as engine,
    ):
        assert eventually(lambda: may_ask(engine)), "the server was not found"
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(carry_out(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
