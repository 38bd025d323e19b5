"""An engine with any connector that offloads, or with none: a process that `checkpoint_cost.py` tells what to do.

`serve` is such a process for whoever can be told more, as `ttft_engine.py` is.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from harness import running_engine
from told_process import PAUSE_S, Serving, take_answers


class CheckpointServing(Serving):
    """What it can be told."""

    _placing: Any = None
    """Who says where prompts stop."""

    def first_token(self, prompt: list[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Seconds from a request to its first token, and where its steps ended. `params` are for connectors."""
        engine = self.engine
        began_s = time.perf_counter()
        engine.add(prompt, max_tokens=1, kv_transfer_params=params)
        while not (finished := engine.step()):
            if not engine.has_computed:
                time.sleep(PAUSE_S)
        ended_s = time.perf_counter()
        [result] = finished
        ends = [step.first_token + step.num_tokens for step in result.steps]
        return {
            "seconds": ended_s - began_s,
            "hit": len(prompt) - sum(s.num_tokens for s in result.steps),
            "ends": ends,
            "token": result.token_ids[0],
        }

    def place(self, is_on: bool) -> None:
        """Whether prompts stop from now on, in an engine that has them stop."""
        scheduler = self.engine.connector._scheduler
        self._placing = self._placing or scheduler._checkpoints
        scheduler._checkpoints = self._placing if is_on else None

    def forget(self) -> None:
        """Drop the engine's own prefix cache, as soon as nobody reads or writes it."""
        self.engine.reset_prefix_cache()

    def forget_all(self) -> None:
        """And what was stored."""
        self.engine.reset_prefix_cache()
        if self.engine.connector is not None:
            self.engine.connector.reset_cache()


def serve(serving: type[CheckpointServing]) -> None:
    """Start the engine that the command line describes, and do what is told until nobody is there to tell it."""
    parser = argparse.ArgumentParser()
    for name in ("kind", "transfer", "arguments"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    chosen = parser.parse_args()
    answers = take_answers()
    transfer = json.loads(chosen.transfer)
    if transfer is not None and transfer["kv_connector"] == "HybridOffloadConnector":
        from hybridkv.connectors.vllm import register

        register()
    arguments = json.loads(chosen.arguments)
    with running_engine(chosen.kind, chosen.directory, kv_transfer_config=transfer, **arguments) as engine:
        serving(engine).run(answers)


if __name__ == "__main__":
    serve(CheckpointServing)
