"""vLLM's HTTP server in its own processes, with hybridkv installed from its wheels as a user installs it.

The server's Python sees a fresh virtual environment and, after it, the packages that came with vLLM, but no sources of
this tree and nothing that this test imports.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import patience
from harness import record_engine_start
from prometheus_client.parser import text_string_to_metric_families
from wheels import outside_environment

import tiny_models

START_DEADLINE_S: Final = patience.seconds(60.0)
STOP_DEADLINE_S: Final = patience.seconds(12.0)
REPLY_DEADLINE_S: Final = patience.seconds(12.0)
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. Get one from `running_server`."""

    port: int
    log: Path

    def get(self, path: str) -> str:
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self._ask("POST", path, json.dumps(body or {})))

    def complete(self, prompt: list[int], rank: int | None = None, **options: Any) -> Any:
        """One greedy completion with log-probabilities, from the engine `rank` of a data-parallel group."""
        fixed = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 5, "ignore_eos": True}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        return json.loads(self._ask("POST", "/v1/completions", json.dumps(fixed | options), headers))

    def reset_prefix_cache(self, *, external: bool = False) -> None:
        """Reset the engine's cache; with `external` also the connector. vLLM refuses while blocks are held."""
        deadline = time.monotonic() + REPLY_DEADLINE_S
        while not self.post(f"/reset_prefix_cache?reset_external={str(external).lower()}")["success"]:
            if time.monotonic() > deadline:
                raise TimeoutError("the prefix cache was not reset: some blocks are still in use")
            time.sleep(_POLL_S)

    def counts(self) -> dict[tuple[str, str], float]:
        """The value of each series of /metrics by its name and labels, without the labels for model and engine."""
        values = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                own = {name: value for name, value in sample.labels.items() if name not in ("engine", "model_name")}
                values[sample.name, ",".join(f"{name}={value}" for name, value in sorted(own.items()))] = sample.value
        return values

    def _ask(self, method: str, path: str, body: str | None, headers: Mapping[str, str] | None = None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REPLY_DEADLINE_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            text = reply.read().decode()
        finally:
            connection.close()
        if reply.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{method} {path}: {reply.status} {text}")
        return text


def free_port() -> int:
    """A port of the loopback that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def command(
    python: Path, kind: str, model: Path, port: int, kv_transfer_config: Mapping[str, Any], flags: Sequence[str] = ()
) -> list[str]:
    """The command of an operator."""
    arguments = list(flags)
    for name, value in tiny_models.ENGINE_ARGUMENTS[kind].items():
        flag = "--" + name.replace("_", "-")
        arguments.append(flag if value is True else f"{flag}={value}")
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *(f"--model={model}", "--host=127.0.0.1", f"--port={port}", "--enable-prompt-tokens-details"),
        f"--kv-transfer-config={json.dumps(kv_transfer_config)}",
        *arguments,
    ]


@contextlib.contextmanager
def started(
    python: Path,
    kind: str,
    directory: Path,
    kv_transfer_config: Mapping[str, Any],
    flags: Sequence[str] = (),
    **environment_variables: str,
) -> Iterator[tuple[subprocess.Popen[bytes], Server]]:
    """Start a server in `directory`, and end all its processes after the block. It may not answer yet, or ever."""
    directory.mkdir(exist_ok=True)
    model = tiny_models.make_tiny_model(kind, directory / kind)
    server = Server(free_port(), directory / "server.log")
    # Resetting caches over HTTP needs the development mode.
    environment = outside_environment() | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment |= environment_variables
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            command(python, kind, model, server.port, kv_transfer_config, flags),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
    record_engine_start()
    try:
        yield process, server
    finally:
        process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            print("the server did not end after SIGTERM")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running_server(
    python: Path,
    kind: str,
    directory: Path,
    kv_transfer_config: Mapping[str, Any],
    flags: Sequence[str] = (),
    **environment_variables: str,
) -> Iterator[Server]:
    """A server that answers requests, until the block ends."""
    with started(python, kind, directory, kv_transfer_config, flags, **environment_variables) as (process, server):
        wait_until_ready(process, server)
        yield server


def wait_until_ready(process: subprocess.Popen[bytes], server: Server) -> None:
    """Wait until a started server answers requests."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        with contextlib.suppress(OSError, RuntimeError):
            server.get("/health")
            return
        if process.poll() is not None or time.monotonic() > deadline:
            print(server.log.read_text())
            raise RuntimeError(f"the server did not start; exit status {process.poll()}, log above")
        time.sleep(_POLL_S)
