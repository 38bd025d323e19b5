"""The steps of a user: install the wheels beside vLLM, start its server with the connector, and send requests over
HTTP.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import patience
import pytest
import server as servers
import wheels
from server import Server

KIND = "qwen3-next"
CHUNK_TOKENS = 128
PROMPT_TOKENS = 1100
RESTORABLE_TOKENS = (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
COUNTS_DEADLINE_S = patience.seconds(6.0)


def transfer_config(**extra: Any) -> dict[str, Any]:
    tiers = [{"type": "ram", "capacity": "256MiB"}]
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": tiers, **extra},
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = harness.scratch_directory(tmp_path_factory.mktemp("server"))
    harness.prepare_environment(scratch / "environment")
    return scratch


@pytest.fixture(scope="module")
def python(directory: Path) -> Path:
    return wheels.install(
        Path(os.environ["HYBRIDKV_WHEELHOUSE"]).resolve(),
        directory / "venv",
        "hybridkv-vllm",
        beside=wheels.packages_beside("vllm"),
    )


@pytest.fixture(scope="module")
def running(python: Path, directory: Path) -> Iterator[Server]:
    config = transfer_config(chunk_tokens=CHUNK_TOKENS, **harness.SAME_STEPS)
    with servers.running_server(python, KIND, directory / "positive", config) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """The only server. Its log is printed, and pytest shows it if the test fails."""
    yield running
    print(running.log.read_text())


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Two completions of one prompt with a cache reset between them, and the counts of that time."""

    prompt: list[int]
    cold: Any
    warm: Any
    counted: dict[tuple[str, str], float]


def counted_since(server: Server, before: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {series: value - before.get(series, 0.0) for series, value in server.counts().items()}


@pytest.fixture(scope="module")
def exchange(running: Server) -> Exchange:
    prompt = harness.make_prompt(PROMPT_TOKENS, seed=1)
    before = running.counts()
    cold = running.complete(prompt)
    running.reset_prefix_cache()
    warm = running.complete(prompt)
    # Counts of a step reach the API process after its tokens.
    deadline = time.monotonic() + COUNTS_DEADLINE_S
    while time.monotonic() < deadline:
        counted = counted_since(running, before)
        if counted.get(("vllm:hybridkv_loads_total", "outcome=loaded")):
            break
        time.sleep(0.1)
    return Exchange(prompt, cold, warm, counted)


def cached_tokens(completion: Any) -> int:
    return int(completion["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_server_imports_hybridkv_only_from_its_wheels(python: Path) -> None:
    script = """
import importlib.metadata, json, sys, hybridkv
points = importlib.metadata.entry_points(group="vllm.general_plugins", name="hybridkv")
print(json.dumps([list(hybridkv.__path__), [str(point.dist.locate_file("")) for point in points]]))
"""
    output = subprocess.run(
        [python, "-c", script], capture_output=True, check=True, cwd=python.parent, env=wheels.outside_environment()
    ).stdout
    (site_packages,) = (str(path) for path in python.parents[1].glob("lib/python*/site-packages"))
    assert json.loads(output) == [[f"{site_packages}/hybridkv"], [site_packages]]


def test_a_restored_prefix_gives_equal_text_and_log_probabilities(server: Server, exchange: Exchange) -> None:
    assert cached_tokens(exchange.cold) == 0
    assert cached_tokens(exchange.warm) == RESTORABLE_TOKENS
    (cold,), (warm,) = exchange.cold["choices"], exchange.warm["choices"]
    assert warm["text"] == cold["text"]
    assert warm["logprobs"] == cold["logprobs"]
    assert len(cold["logprobs"]["token_logprobs"]) == 8


def test_another_first_chunk_gives_other_log_probabilities(server: Server, exchange: Exchange) -> None:
    """Control: the answers above depend on all restored tokens, even the oldest."""
    prompt = harness.make_prompt(CHUNK_TOKENS, seed=3) + exchange.prompt[CHUNK_TOKENS:]
    assert server.complete(prompt)["choices"][0]["logprobs"] != exchange.cold["choices"][0]["logprobs"]


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("vllm:external_prefix_cache_hits_total", "", RESTORABLE_TOKENS),
        ("vllm:prompt_tokens_by_source_total", "source=external_kv_transfer", RESTORABLE_TOKENS),
        ("vllm:prompt_tokens_by_source_total", "source=local_cache_hit", 0),
        ("vllm:prompt_tokens_by_source_total", "source=local_compute", 2 * PROMPT_TOKENS - RESTORABLE_TOKENS),
        ("vllm:prompt_tokens_cached_by_source_total", "source=host", RESTORABLE_TOKENS),
        ("vllm:hybridkv_lookups_total", "reason=complete,result=hit", 1),
        ("vllm:hybridkv_hit_tokens_total", "", RESTORABLE_TOKENS),
        ("vllm:hybridkv_loads_total", "outcome=loaded", 1),
        ("vllm:hybridkv_loads_total", "outcome=failed", 0),
        ("vllm:hybridkv_load_seconds_count", "", 1),
    ],
)
def test_vllm_and_hybridkv_count_the_restored_tokens(
    server: Server, exchange: Exchange, name: str, labels: str, expected: int
) -> None:
    assert exchange.counted.get((name, labels), 0) == expected


def test_stored_and_loaded_bytes_are_counted(server: Server, exchange: Exchange) -> None:
    loaded = exchange.counted["vllm:hybridkv_load_bytes_total", ""]
    assert 0 < loaded <= exchange.counted["vllm:hybridkv_store_bytes_total", ""]
    assert server.counts()["vllm:hybridkv_tier_used_bytes", "tier=ram"] >= loaded


def test_prompts_are_recomputed_after_a_reset_of_the_connector(server: Server) -> None:
    prompt = harness.make_prompt(PROMPT_TOKENS, seed=2)
    cold = server.complete(prompt)
    server.reset_prefix_cache(external=True)
    again = server.complete(prompt)
    assert cached_tokens(again) == 0
    assert again["choices"][0]["logprobs"] == cold["choices"][0]["logprobs"]


@pytest.mark.full
def test_an_unknown_key_ends_the_server_with_a_suggestion(python: Path, directory: Path) -> None:
    config = transfer_config(chunk_token=CHUNK_TOKENS)
    with servers.started(python, KIND, directory / "negative", config) as (process, server):
        status = process.wait(servers.START_DEADLINE_S)
    log = server.log.read_text()
    print(log)
    assert status > 0
    assert "kv_connector_extra_config.chunk_token: expected a known key, got an unknown one" in log
    assert 'hint: did you mean "chunk_tokens"?' in log
