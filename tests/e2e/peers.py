"""Two engines in processes of their own, and what a proxy does between them."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peers_process

START_S = 800.0
ANSWER_S = 300.0


class PeerProcess:
    """One engine. Commands return what it answers; `add` does not wait, `result` does.

    Args:
        kind: of model.
        directory: where it may write.
        transfer: its `kv_transfer_config`.
        arguments: that override the engine's usual ones.
    """

    def __init__(self, kind: str, directory: Path, transfer: dict[str, Any], **arguments: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "log.txt"
        ours, theirs = os.pipe()
        given = {"kind": kind, "directory": directory, "answers": theirs}
        given |= {"transfer": json.dumps(transfer), "arguments": json.dumps(arguments)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, peers_process.__file__, *(f"--{name}={value}" for name, value in given.items())],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )
        os.close(theirs)
        os.set_blocking(ours, False)
        self._answers = ours
        self._buffer = b""
        self._heard: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    def wait_until_ready(self) -> int:
        """Until it serves. Its free blocks."""
        return int(self._wait("ready", START_S))

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 8, params: dict[str, Any] | None = None) -> None:
        self._say(name, "add", prompt=list(prompt), max_tokens=max_tokens, params=params)

    def result(self, name: str) -> Any:
        """What a request gave."""
        return self._wait(name, ANSWER_S)

    def ask(self, do: str, **values: Any) -> Any:
        """What it answers to any other command."""
        name = f"command-{next(self._numbers)}"
        self._say(name, do, **values)
        return self._wait(name, ANSWER_S)

    def end(self) -> None:
        """Ends it, if it has not ended."""
        if self.process.poll() is None and self.process.stdin is not None:
            try:
                self._say("end", "end")
                self.process.wait(30)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait(30)
        os.close(self._answers)

    def words(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace")

    def _say(self, name: str, do: str, **values: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"name": name, "do": do, **values}).encode() + b"\n")
        self.process.stdin.flush()

    def _wait(self, name: str, limit_s: float) -> Any:
        until_s = time.monotonic() + limit_s
        while name not in self._heard:
            try:
                data = os.read(self._answers, 1 << 20)
            except BlockingIOError:
                data = b""
                time.sleep(0.005)
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            self._heard |= {each["name"]: each["value"] for each in map(json.loads, lines)}
            if name not in self._heard and (self.process.poll() is not None or time.monotonic() > until_s):
                raise RuntimeError(f"no answer to {name} (exit {self.process.poll()}):\n{self.words()[-6000:]}")
        return self._heard.pop(name)


def transfer_config(role: str, **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config` of one side."""
    return {
        "kv_connector": "HybridNixlConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"transport": "tcp", **extra},
    }
