"""Two engines of a data-parallel group share an object tier: one restores the prompt that the other computed.

The model is dense: with experts, vLLM's CPU build fails in the dummy step of the idle engine, with and without a
connector.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import harness
import patience
import server as servers
from server import Server

KIND = "gemma3"
CHUNK_TOKENS = 128
PROMPT_TOKENS = 1500
MODULE = "hybridkv.connectors.vllm.offload.connector"


def transfer_config(store: Path) -> dict[str, Any]:
    tiers = [
        {"type": "ram", "capacity": "64MiB"},
        # A slow machine is no reason for a miss.
        {"type": "object", "url": f"file://{store}", "cascade": "all", "lookup_timeout_seconds": patience.seconds(3.0)},
    ]
    extra = {
        "tiers": tiers,
        "weights_digest": "full",
        "chunk_tokens": CHUNK_TOKENS,
        "compute_tokens_per_second": 1,
        "load_timeout_seconds": patience.seconds(30.0),  # at least the timeout of a lookup
    }
    return {
        "kv_connector": "HybridOffloadConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra | harness.SAME_STEPS,
    }


def complete(server: Server, rank: int, prompt: list[int]) -> tuple[int, Any]:
    """Cached tokens and the choice of the engine `rank`."""
    answer = server.complete(prompt, rank=rank)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0), answer["choices"][0]


def num_cascaded(server: Server) -> float:
    return sum(
        value
        for (name, labels), value in server.counts().items()
        if name == "vllm:hybridkv_moves_total" and "direction=cascade" in labels and "result=done" in labels
    )


def test_an_engine_restores_what_another_engine_of_its_group_stored(tmp_path: Path) -> None:
    directory = harness.scratch_directory(tmp_path) / "group"
    directory.mkdir()
    harness.prepare_environment(directory / "environment")
    config, prompt = transfer_config(directory / "store"), harness.make_prompt(PROMPT_TOKENS, seed=1)
    path = os.pathsep.join(part for part in sys.path if part)
    python, flags = Path(sys.executable), ["--data-parallel-size=2"]
    with servers.running_server(python, KIND, directory / "server", config, flags, PYTHONPATH=path) as server:
        cold, first = complete(server, 0, prompt)
        expected = PROMPT_TOKENS // CHUNK_TOKENS
        patience.wait_until(lambda: num_cascaded(server) >= expected, "the prompt is in the object store")
        warm, second = complete(server, 1, prompt)
        other, _ = complete(server, 1, harness.make_prompt(PROMPT_TOKENS, seed=2))
        print(server.log.read_text())
    assert cold == other == 0
    assert warm == (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    assert second["text"] == first["text"] and second["logprobs"] == first["logprobs"]
