"""One engine of two that hand each other KV, as a process of its own, told what to do by lines of JSON.

It steps all the time, as a server does: a producer's leases end in its steps. Each line that it reads is a command;
each line that it writes to the file descriptor it was given answers one.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import os
import select
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness import Engine, Result, running_engine
from noise import Noise
from peers_held import held_by
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.kv_cache_interface import MambaSpec

from hybridkv.connectors.vllm import register

PAUSE_S = 0.002


class Pages:
    """What a group's blocks hold, as digests, and what each load brought.

    `loaded` and `local`: by request, the pages that it began with, and how many of its tokens this engine held before.
    `are_raw`: digests are of the bytes as they lie. Else what a convolution remembers is put in one order before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.are_raw = False
        self.loaded: dict[str, list[dict[str, str]]] = {}
        self.local: dict[str, int] = {}
        worker = engine.worker_connector._worker
        scheduler = engine.connector._scheduler
        take_plan, results = scheduler.take_plan, worker.results
        self._loads: dict[str, Any] = {}

        def planning(*arguments: Any) -> Any:
            plan = take_plan(*arguments)
            self._loads |= {load.request_id: load for load in plan.loads}
            return plan

        def reporting() -> Any:
            found = results()
            for name in found.finished - found.failed:
                load, asked = self._loads.pop(name), name.rpartition("-")[0]
                self.loaded[asked] = self.of_tables(load.block_ids, (0,) * len(load.block_ids))
                self.local[asked] = load.computed_tokens
            return found

        scheduler.take_plan, worker.results = planning, reporting

    def of_tables(self, block_ids: Any, first_blocks: Any) -> list[dict[str, str]]:
        """For each group, the place of a block in its table to the digest of its pages."""
        groups = self._engine.kv_cache_config.kv_cache_groups
        return [
            {str(first + place): self._digest(group, block) for place, block in enumerate(ids) if block}
            for group, ids, first in zip(groups, block_ids, first_blocks, strict=True)
        ]

    def _digest(self, group: Any, block_id: int) -> str:
        digest = hashlib.blake2b(digest_size=12)
        for name in group.layer_names:
            page = self._engine.page(name, block_id).numpy()
            digest.update((page if self.are_raw else in_one_order(group.kv_cache_spec, page)).tobytes())
        return digest.hexdigest()


def in_one_order(spec: Any, page: np.ndarray) -> np.ndarray:
    """The bytes of a page with its convolution's channels innermost, whichever order this engine keeps them in."""
    if not isinstance(spec, MambaSpec) or get_conv_state_layout() == "SD":
        return page
    channels, steps = spec.shapes[0]
    item_bytes = spec.dtypes[0].itemsize
    size = channels * steps * item_bytes
    convolution = page[:size].reshape(channels, steps, item_bytes).swapaxes(0, 1)
    return np.concatenate([convolution.reshape(-1), page[size:]])


class Commands:
    """Carries out what it is told.

    Args:
        engine: which steps between commands.
        answers: where answers are written.
    """

    def __init__(self, engine: Engine, answers: Any) -> None:
        self._engine = engine
        self._answers = answers
        self._pages = Pages(engine)
        self._aborts: dict[str, str] = {}
        self.is_over = False

    def run(self) -> None:
        """Until it is told to end, or nobody is there to tell it."""
        buffer = b""
        while not self.is_over:
            busy = self._engine.scheduler.has_requests()
            if busy:
                for result in self._engine.step():
                    self._answer(result.request_id, self._written(result))
                self._abort_those_due()
            ready, _, _ = select.select([sys.stdin], [], [], PAUSE_S)
            if not ready:
                continue
            data = os.read(sys.stdin.fileno(), 1 << 20)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._carry_out(json.loads(line))

    def _carry_out(self, command: dict[str, Any]) -> None:
        name, engine = command["name"], self._engine
        match command["do"]:
            case "add":
                engine.add(
                    command["prompt"],
                    max_tokens=command["max_tokens"],
                    request_id=name,
                    kv_transfer_params=command["params"],
                )
                if command["abort_when"] is not None:
                    self._aborts[name] = command["abort_when"]
                    self._abort_those_due()
            case "held":
                self._answer(name, held_by(engine))
            case "verify":
                reading = engine.worker_connector._worker._agent._reading
                reading._tools = dataclasses.replace(reading._tools, verify=command["is_on"])
                self._answer(name, None)
            case "raw pages":
                self._pages.are_raw = command["is_on"]
                self._answer(name, None)
            case "conv layout":
                self._answer(name, get_conv_state_layout())
            case "tolerance":
                self._answer(name, Noise(engine).tolerance)
            case "idle":
                engine.drain()
                self._answer(name, engine.num_free_blocks)
            case "forget":
                engine.reset_prefix_cache()
                self._answer(name, None)
            case "counters":
                self._answer(name, engine.counters())
            case "end":
                self.is_over = True

    def _written(self, result: Result) -> dict[str, Any]:
        """A result, and what its blocks hold: those that are handed over, and those that were."""
        name, params = result.request_id, result.kv_transfer_params
        written = result.as_json() | {"params": params, "loaded": self._pages.loaded.pop(name, None)}
        if params is not None:
            tables = params["remote_block_ids"], params["hybridkv"]["first_blocks"]
            written["handed_over"] = self._pages.of_tables(*tables)
        return written | {"local": self._pages.local.pop(name, 0)}

    def _abort_those_due(self) -> None:
        """Requests that are as far as they were to come. What has come further by now gives its result."""
        for name, when in list(self._aborts.items()):
            if self._engine.status(name) == when:
                del self._aborts[name]
                self._engine.abort(name)
                self._answer(name, {"aborted": when})

    def _answer(self, name: str, value: Any) -> None:
        self._answers.write(json.dumps({"name": name, "value": value}) + "\n")
        self._answers.flush()


def main(commands: type[Commands] = Commands) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--answers", type=int, required=True)
    parser.add_argument("--transfer", required=True)
    parser.add_argument("--arguments", default="{}")
    chosen = parser.parse_args()
    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    # The plugin does it where it is installed; once more changes nothing.
    register()
    with (
        os.fdopen(chosen.answers, "w") as answers,
        running_engine(
            chosen.kind,
            chosen.directory,
            kv_transfer_config=json.loads(chosen.transfer),
            disable_log_stats=False,
            **json.loads(chosen.arguments),
        ) as engine,
    ):
        answers.write(json.dumps({"name": "ready", "value": engine.num_free_blocks}) + "\n")
        answers.flush()
        commands(engine, answers).run()


if __name__ == "__main__":
    main()
