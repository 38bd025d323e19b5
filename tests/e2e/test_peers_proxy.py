"""The guide's setup: two vLLM servers, started as documented, with `examples/peers_proxy.py` in front of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import server as servers
from server import Server

import peers_proxy

KIND = "gemma3"
PROMPT_TOKENS = 1153
SECRET = "a secret that only this test uses"


@dataclasses.dataclass(frozen=True)
class Servers:
    """Two servers and the proxy."""

    prefill: Server
    decode: Server
    proxy: Server


def transfer_config(role: str, secret: Path) -> dict[str, Any]:
    return {
        "kv_connector": "HybridNixlConnector",
        "kv_connector_module_path": "hybridkv.connectors.vllm.nixl.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        # Longer than the wait for a cache reset, so that no lease expires before it.
        "kv_connector_extra_config": {"secret_file": str(secret), "lease_seconds": 600},
    }


@contextlib.contextmanager
def running_proxy(directory: Path, prefill: Server, decode: Server) -> Iterator[Server]:
    proxy = Server(servers.free_port(), directory / "proxy.log")
    asked = [f"--{side}=http://127.0.0.1:{each.port}" for side, each in (("prefill", prefill), ("decode", decode))]
    with proxy.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, peers_proxy.__file__, *asked, f"--port={proxy.port}"], stdout=log, stderr=log
        )
    try:
        wait_until_it_listens(process, proxy)
        yield proxy
    finally:
        process.terminate()
        process.wait()


def wait_until_it_listens(process: subprocess.Popen[bytes], proxy: Server) -> None:
    until_s = time.monotonic() + servers.START_DEADLINE_S
    while True:
        try:
            proxy.get("/")
        except RuntimeError:
            return  # it answers, though with an error
        except OSError:
            assert process.poll() is None and time.monotonic() < until_s, proxy.log.read_text()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = harness.scratch_directory(tmp_path_factory.mktemp("proxy"))
    harness.prepare_environment(directory / "environment")
    secret = directory / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    path = os.pathsep.join(part for part in sys.path if part)
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                servers.started(
                    Path(sys.executable), KIND, directory / role, transfer_config(role, secret), PYTHONPATH=path
                )
            )
            for role in ("kv_producer", "kv_consumer")
        ]
        for process, server in started:
            servers.wait_until_ready(process, server)
        prefill, decode = (server for _, server in started)
        yield Servers(prefill, decode, stack.enter_context(running_proxy(directory, prefill, decode)))


def count(server: Server, name: str, labels: str = "") -> float:
    return server.counts().get((f"vllm:hybridkv_peer_{name}", labels), 0.0)


def streamed(server: Server, prompt: list[int]) -> str:
    """The text of a streamed greedy completion."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=servers.REPLY_DEADLINE_S) as reply:
        assert reply.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.read().decode().splitlines() if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_the_proxy_returns_the_decoding_servers_answer(trio: Servers) -> None:
    prompt = harness.make_prompt(PROMPT_TOKENS, seed=1)
    cold = trio.decode.complete(prompt)
    trio.decode.reset_prefix_cache()
    loaded = count(trio.decode, "prompts_total", "outcome=loaded")
    warm = trio.proxy.complete(prompt)
    assert warm["choices"][0]["logprobs"] == cold["choices"][0]["logprobs"]
    assert count(trio.decode, "prompts_total", "outcome=loaded") == loaded + 1
    trio.decode.reset_prefix_cache()
    assert streamed(trio.proxy, prompt) == cold["choices"][0]["text"]
    assert count(trio.decode, "prompts_total", "outcome=loaded") == loaded + 2


def test_several_answers_need_one_prefill(trio: Servers) -> None:
    """The other answers leave no lease: the producer's cache can be reset when all are finished."""
    answer = trio.proxy.complete(harness.make_prompt(PROMPT_TOKENS, seed=2), n=2, min_tokens=8, temperature=1)
    assert len(answer["choices"]) == 2
    trio.prefill.reset_prefix_cache()
    trio.decode.reset_prefix_cache()


def test_an_error_of_a_server_is_passed_on(trio: Servers) -> None:
    """Control: the proxy does not answer by itself."""
    with pytest.raises(RuntimeError, match="400"):
        trio.proxy.complete(harness.make_prompt(PROMPT_TOKENS, seed=3), temperature=-1)
    with pytest.raises(RuntimeError, match="404"):
        trio.proxy.post("/v1/models")
