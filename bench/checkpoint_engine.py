"""Process with an engine for `checkpoint_cost.py`, with any connector that offloads or with none.

`serve` also runs subclasses with more commands, as in `ttft_engine.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from driven_process import PAUSE_S, Serving, take_answers
from harness import running_engine


class CheckpointServing(Serving):
    """Commands of the process."""

    _placing: Any = None
    """The connector's object that chooses stops."""

    def first_token(self, prompt: list[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Seconds from a request to its first token, and the ends of its steps. `params` are for connectors."""
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
        """Turns stops on or off, in an engine with `checkpoints: auto`."""
        scheduler = self.engine.connector._scheduler
        self._placing = self._placing or scheduler._checkpoints
        scheduler._checkpoints = self._placing if is_on else None

    def forget(self) -> None:
        """Drops the engine's own prefix cache, after pending reads and writes."""
        self.engine.reset_prefix_cache()

    def forget_all(self) -> None:
        """Drops the engine's own prefix cache and all stored chunks."""
        self.engine.reset_prefix_cache()
        if self.engine.connector is not None:
            self.engine.connector.reset_cache()


def serve(serving: type[CheckpointServing]) -> None:
    """Starts the engine of the command line, and runs commands until the input ends."""
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
