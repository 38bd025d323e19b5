"""docs/guides/fleet.md, "Try it on one machine": with its settings, a second engine restores what the first one stored.

One test runs its commands with two servers. The others run its settings with two engines, on a directory and on a real
object server, and compare with what the second engine restores from its own host memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fleet_process
import patience
import pytest
from harness import record_engine_start, scratch_directory
from one_life import LIFE_S, Life, one_life

import tiny_models
from kits.tiers.object_server import BUCKET, VARIABLE, ObjectServer, command

GUIDE = Path(__file__).absolute().parents[2] / "docs" / "guides" / "fleet.md"
CHUNK_TOKENS = 128
LOAD_TIMEOUT_S = 30.0
"""The default of `load_timeout_seconds`, the upper limit for the timeout of a lookup."""


def commands() -> str:
    """All commands of the section as one script."""
    section = GUIDE.read_text().split("## Try it on one machine", 1)[1].split("\n## ", 1)[0]
    return "\n".join(line[4:] for line in section.splitlines() if line.startswith("    ") or not line)


def settings(tier: Mapping[str, Any]) -> Any:
    """`kv_transfer_config` of the guide, with another store."""
    found = re.search(r"SETTINGS='(.*?)'", commands(), re.DOTALL)
    assert found is not None
    config = json.loads(found[1])
    assert config["kv_connector_extra_config"]["tiers"][1]["type"] == "object"
    config["kv_connector_extra_config"]["tiers"][1] = tier
    return config


@contextlib.contextmanager
def directory_store(directory: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    yield {"type": "object", "url": f"file://{directory / 'store'}"}, {}


@contextlib.contextmanager
def seaweedfs(directory: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    weed = command()
    if weed is None:
        pytest.skip(f"{VARIABLE} does not name an object server")
    with ObjectServer(weed, directory / "server") as server:
        options = server.settings()
        tier = {"type": "object", "url": f"s3://{BUCKET}/guide", **{n: options.pop(n) for n in ("endpoint", "region")}}
        # A slow server must not change the result.
        tier["lookup_timeout_seconds"] = min(patience.seconds(6.0), LOAD_TIMEOUT_S)
        yield tier, {f"AWS_{name.upper()}": value for name, value in options.items()}


STORES = {"directory": directory_store, "SeaweedFS": seaweedfs}
CASES = [(kind, store) for store in STORES for kind in tiny_models.KINDS]


@pytest.mark.parametrize(
    ("kind", "store"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.full) for case in CASES[1:])]
)
def test_a_second_engine_restores_as_much_as_from_its_host_memory(kind: str, store: str, tmp_path: Path) -> None:
    directory = scratch_directory(tmp_path) / f"guide-{kind}-{store}"
    directory.mkdir()
    with STORES[store](directory) as (tier, environment):

        def live(engine: str) -> Life:
            arguments = ["--engine", engine, "--config", json.dumps(settings(tier))]
            return one_life(fleet_process.main, kind, directory, *arguments, environment=environment)

        first, second = live("first"), live("second")
    num_lookups = len(fleet_process.LENGTHS) + 1
    by_store, by_memory = second.cached[:num_lookups], second.cached[num_lookups:]
    *alike, system = zip(by_store, by_memory, strict=True)
    for restored, own in alike:
        assert restored >= own - CHUNK_TOKENS > 0, (second.cached, first.log, second.log)
    # The question after the system prompt is not in the store.
    assert system[0] > fleet_process.SYSTEM_TOKENS - CHUNK_TOKENS, (second.cached, first.log, second.log)
    assert max(first.cached[-2:]) <= fleet_process.SYSTEM_TOKENS, (
        "the engine's own cache served more than the system prompt"
    )


@pytest.mark.full
def test_the_guides_commands_restore_a_prompt_on_the_second_server(tmp_path: Path) -> None:
    kind, directory = "gpt-oss", scratch_directory(tmp_path) / "guide-commands"
    directory.mkdir()
    model = tiny_models.make_tiny_model(kind, directory / kind)
    script = commands()
    replaced = {"MODEL": str(model), "/tmp/fleet": str(directory / "store")}
    replaced |= {str(port): str(free) for port, free in zip((8001, 8002), _free_ports(2), strict=True)}
    for old, new in replaced.items():
        assert old in script, old
        script = script.replace(old, new)
    written, log = directory / "output.txt", directory / "log.txt"
    with written.open("wb") as output, log.open("wb") as errors:
        process = subprocess.Popen(
            ["bash", "-c", f"set -e\n{script}"],
            cwd=directory,
            env=_environment(directory, kind),
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        for _ in range(2):
            record_engine_start()
        try:
            process.wait(2 * LIFE_S)
        finally:
            # The script does not stop the servers.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = written.read_text(errors="replace")
    assert process.returncode == 0, text + log.read_text(errors="replace")
    decode = json.JSONDecoder().raw_decode
    answers = [decode(text, found.start())[0]["usage"] for found in re.finditer(r'\{"id"', text)]
    cached = [(usage["prompt_tokens_details"] or {}).get("cached_tokens", 0) for usage in answers]
    assert len(cached) == 3 and cached[0] == 0, text
    assert cached[2] >= answers[2]["prompt_tokens"] - 2 * CHUNK_TOKENS > 1000, text
    assert 'tier="object"' in text


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def _environment(directory: Path, kind: str) -> dict[str, str]:
    """An environment whose `vllm` command is this interpreter's vLLM, with arguments for the tiny model."""
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in tiny_models.ENGINE_ARGUMENTS[kind].items()
    ]
    programs = directory / "programs"
    programs.mkdir()
    vllm = programs / "vllm"
    # The CPU build has no metadata of a package "vllm", which the real command needs. If a server ends before the
    # script, the script ends too.
    start = f'{sys.executable} -m vllm.entrypoints.openai.api_server --model "$@" {" ".join(flags)}'
    vllm.write_text(f'#!/bin/sh\n[ "$1" = serve ] && shift\n{start}\nkill $PPID\n')
    vllm.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return environment | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HOME": str(directory),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "VLLM_CACHE_ROOT": str(directory / "vllm"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
