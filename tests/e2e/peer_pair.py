"""A producer and a consumer with the same connector, each a `peer_engine.py`, which exchange one prompt at a time."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driven_process import DrivenProcess


class Variant(NamedTuple):
    """A connector with its `kv_transfer_config`, without roles."""

    transfer: dict[str, Any]
    are_spinners_last: bool = False


class EngineProcess(DrivenProcess):
    """One engine in its own process.

    Args:
        kind: the model.
        arguments: replace the engine's usual arguments.
        variant: the connector.
        role: the role of this side.
        directory: for its files.
    """

    def __init__(self, kind: str, arguments: dict[str, Any], variant: Variant, role: str, directory: Path) -> None:
        directory.mkdir(parents=True)
        transfer = {"kv_role": role, "kv_load_failure_policy": "fail"} | variant.transfer
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        given = {"kind": kind, "directory": directory, "port": port, "spinners-last": int(variant.are_spinners_last)}
        given |= {"transfer": json.dumps(transfer), "arguments": json.dumps(arguments)}
        super().__init__(Path(__file__).with_name("peer_engine.py"), given, directory / "log.txt")


class Pair:
    """A producer and a consumer of one variant."""

    def __init__(self, kind: str, arguments: dict[str, Any], variant: Variant, directory: Path) -> None:
        self.producer = EngineProcess(kind, arguments, variant, "kv_producer", directory / "producer")
        self.consumer = EngineProcess(kind, arguments, variant, "kv_consumer", directory / "consumer")

    @property
    def both(self) -> tuple[EngineProcess, EngineProcess]:
        return self.producer, self.consumer

    def decode_s(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of the consumer for a prompt that the producer has computed."""
        filled = self.producer.ask("first_token", prompt=prompt, params={"do_remote_decode": True})
        found = self.consumer.ask("first_token", prompt=prompt, params=filled["params"])
        assert found["computed"] == 1, f"{found['computed']} tokens were computed"
        for each in self.both:
            each.ask("idle")
        return float(found["seconds"])

    def alone_s(self, prompt: Sequence[int]) -> float:
        return float(self.consumer.ask("first_token", prompt=prompt, params=None)["seconds"])
