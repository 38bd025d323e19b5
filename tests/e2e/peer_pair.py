"""A producer and a consumer with the same connector, each a `peer_engine.py`, and one prompt at a time between them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """A connector, and how it is asked for: its `kv_transfer_config` without roles."""

    transfer: dict[str, Any]
    are_spinners_last: bool = False


class EngineProcess:
    """One engine in a process of its own.

    Args:
        kind: of model.
        arguments: that override the engine's usual ones.
        variant: of connector.
        role: of this side.
        directory: where it may write.
    """

    def __init__(self, kind: str, arguments: dict[str, Any], variant: Variant, role: str, directory: Path) -> None:
        directory.mkdir(parents=True)
        transfer = {"kv_role": role, "kv_load_failure_policy": "fail"} | variant.transfer
        self._log = directory / "log.txt"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        given = {"kind": kind, "directory": directory, "port": port}
        given |= {"transfer": json.dumps(transfer), "arguments": json.dumps(arguments)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("peer_engine.py")),
                    *(f"--{name}={value}" for name, value in given.items()),
                    *(["--spinners-last"] if variant.are_spinners_last else []),
                ],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def wait_until_ready(self) -> None:
        assert self._hear() == "ready"

    def ask(self, do: str, **values: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._hear())

    def rest(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.wake()
        self._process.kill()
        self._process.wait()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"an engine ended:\n{self._log.read_text(errors='replace')[-4000:]}")
        return line


class Pair:
    """A producer and a consumer of one variant."""

    def __init__(self, kind: str, arguments: dict[str, Any], variant: Variant, directory: Path) -> None:
        self.producer = EngineProcess(kind, arguments, variant, "kv_producer", directory / "producer")
        self.consumer = EngineProcess(kind, arguments, variant, "kv_consumer", directory / "consumer")

    @property
    def both(self) -> tuple[EngineProcess, EngineProcess]:
        return self.producer, self.consumer

    def decode_s(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of the consumer, whose prompt the producer has computed."""
        filled = self.producer.ask("first_token", prompt=prompt, params={"do_remote_decode": True})
        found = self.consumer.ask("first_token", prompt=prompt, params=filled["params"])
        assert found["computed"] == 1, f"{found['computed']} tokens were computed"
        for each in self.both:
            each.ask("idle")
        return float(found["seconds"])

    def alone_s(self, prompt: Sequence[int]) -> float:
        return float(self.consumer.ask("first_token", prompt=prompt, params=None)["seconds"])
