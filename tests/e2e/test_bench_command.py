"""`hybridkv bench` on a real server: what it restores from the tiers counts as cached, and a new prompt does not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import harness
import pytest
import server as servers
from click.testing import CliRunner

from hybridkv.cli.app import main

CHUNK_TOKENS = 128
PROMPT_TOKENS = 1100
RESTORABLE_TOKENS = (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS
CONFIG = {
    "kv_connector": "HybridOffloadConnector",
    "kv_connector_module_path": "hybridkv.connectors.vllm.offload.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"tiers": [{"type": "ram", "capacity": "256MiB"}], "chunk_tokens": CHUNK_TOKENS},
}


def test_a_restore_is_measured_beside_a_new_prompt(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory: Path = harness.scratch_directory(tmp_path_factory.mktemp("bench"))
    harness.prepare_environment(directory / "environment")
    path = os.pathsep.join(part for part in sys.path if part)
    with servers.running_server(
        Path(sys.executable), "qwen3-next", directory / "server", CONFIG, PYTHONPATH=path
    ) as server:
        arguments = ["bench", f"http://127.0.0.1:{server.port}", "--tokens", str(PROMPT_TOKENS), "--prompts", "2"]
        result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    cached = {each["kind"]: each["cached_tokens"] for each in report["measurements"]}
    assert cached == {"cold": 0, "own": RESTORABLE_TOKENS, "restored": RESTORABLE_TOKENS}
    assert report["verdict"].startswith("A new prompt of 1,100 tokens takes ")
    assert all(0 < second < 60 for each in report["measurements"] for second in each["seconds"])
