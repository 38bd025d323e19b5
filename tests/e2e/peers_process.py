"""One of two engines that exchange KV, run as its own process and controlled by lines of JSON.

It steps all the time, as a server does, because a producer's leases end in its steps. Each line that it reads is a
command; each line that it writes to the same socket is an answer. The process that starts it also imports this module,
but not vLLM.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import select
import socket
from pathlib import Path
from typing import Any

import numpy as np
from harness import Engine, Result, running_engine
from noise import Noise
from peers_held import held_by

PAUSE_S = 0.002


class Pages:
    """Digests of the blocks of each group, and of the blocks of each load.

    `loaded` and `local`: by request, its pages after the load, and the number of tokens that this engine already held.
    `are_raw`: digests cover the raw bytes. Otherwise convolution states are converted to one order first.
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
        """For each group, the digest of each block's pages by the block's place in its table."""
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


def conv_layout() -> str:
    """The layout of convolution states in this engine, as vLLM names it."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def in_one_order(spec: Any, page: np.ndarray) -> np.ndarray:
    """The bytes of a page with its convolution state converted to channels-innermost order."""
    from vllm.v1.kv_cache_interface import MambaSpec

    if not isinstance(spec, MambaSpec) or conv_layout() == "SD":
        return page
    channels, steps = spec.shapes[0]
    item_bytes = spec.dtypes[0].itemsize
    size = channels * steps * item_bytes
    convolution = page[:size].reshape(channels, steps, item_bytes).swapaxes(0, 1)
    return np.concatenate([convolution.reshape(-1), page[size:]])


class Commands:
    """Executes commands.

    Args:
        engine: is stepped between commands.
        line: a socket for commands and answers.
    """

    def __init__(self, engine: Engine, line: socket.socket) -> None:
        self._engine = engine
        self._line = line
        self._pages = Pages(engine)
        self._aborts: dict[str, str] = {}
        self.is_over = False

    def run(self) -> None:
        """Run until an end command, or until the socket is closed."""
        buffer = b""
        while not self.is_over:
            busy = self._engine.scheduler.has_requests()
            if busy:
                for result in self._engine.step():
                    self.say(result.request_id, self._written(result))
                self._abort_those_due()
            ready, _, _ = select.select([self._line], [], [], PAUSE_S)
            if not ready:
                continue
            data = self._line.recv(1 << 20)
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
                self.say(name, held_by(engine))
            case "verify":
                reading = engine.worker_connector._worker._agent._reads
                reading._tools = dataclasses.replace(reading._tools, verify=command["is_on"])
                self.say(name, None)
            case "raw pages":
                self._pages.are_raw = command["is_on"]
                self.say(name, None)
            case "conv layout":
                self.say(name, conv_layout())
            case "tolerance":
                self.say(name, Noise(engine).tolerance)
            case "idle":
                engine.drain()
                self.say(name, engine.num_free_blocks)
            case "forget":
                engine.reset_prefix_cache()
                self.say(name, None)
            case "counters":
                self.say(name, engine.counters())
            case "end":
                self.is_over = True

    def _written(self, result: Result) -> dict[str, Any]:
        """A result with the digests of its blocks: those handed over, and those loaded."""
        name, params = result.request_id, result.kv_transfer_params
        written = result.as_json() | {"params": params, "loaded": self._pages.loaded.pop(name, None)}
        if params is not None:
            tables = params["remote_block_ids"], params["hybridkv"]["first_blocks"]
            written["handed_over"] = self._pages.of_tables(*tables)
        return written | {"local": self._pages.local.pop(name, 0)}

    def _abort_those_due(self) -> None:
        """Abort requests that have reached their status. Requests that are already further give their result."""
        for name, when in list(self._aborts.items()):
            if self._engine.status(name) == when:
                del self._aborts[name]
                self._engine.abort(name)
                self.say(name, {"aborted": when})

    def say(self, name: str, value: Any) -> None:
        self._line.sendall(json.dumps({"name": name, "value": value}).encode() + b"\n")


def main(
    kind: str,
    directory: Path,
    transfer: dict[str, Any],
    arguments: dict[str, Any],
    line: socket.socket,
    commands: type[Commands] = Commands,
) -> None:
    """Run an engine until an end command, or until the socket is closed."""
    from hybridkv.connectors.vllm import register

    logging.getLogger("vllm.hybridkv").setLevel(logging.INFO)
    # The plugin does this if it is installed; a second call changes nothing.
    register()
    with (
        line,
        running_engine(kind, directory, kv_transfer_config=transfer, disable_log_stats=False, **arguments) as engine,
    ):
        serving = commands(engine, line)
        serving.say("ready", engine.num_free_blocks)
        serving.run()
