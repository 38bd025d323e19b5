"""docs/guides/sizing.md agrees with `hybridkv plan` for four models, each with the sizes of the real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).absolute().parents[2] / "docs/guides/sizing.md"
GEMMA3_27B = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "query_pre_attn_scalar": 168,
}
DEEPSEEK_V4_FLASH = {
    "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0],
    "num_hash_layers": 3,
    "expert_dtype": "bf16",
    "mlp_layer_types": None,
    "layer_types": None,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3-Next 80B": ("qwen3_next", "Qwen3NextForCausalLM", {}),
    "gpt-oss 120B": ("gpt_oss", "GptOssForCausalLM", {}),
    "Gemma 3 27B": ("gemma3_text", "Gemma3ForCausalLM", GEMMA3_27B),
    "DeepSeek-V4 Flash": ("deepseek_v4", "DeepseekV4ForCausalLM", DEEPSEEK_V4_FLASH),
}
"""Type and class of each model, and differences from the defaults of transformers. None removes the key from the
file.
"""
PROGRAM = """
import json, sys
from pathlib import Path

import torch
from transformers import AutoConfig

directory, model_type, architecture, changes, options = json.loads(sys.argv[1])
if model_type == "deepseek_v4":
    # Without AMX, vLLM's CPU build would refuse it; without CUDA, torch has no events.
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.cuda.Event = torch.cuda.Stream = type("Stub", (), {"__init__": lambda self, *args, **kwargs: None})
    config = AutoConfig.for_model(model_type).to_dict() | changes  # keys that transformers does not write
else:
    config = AutoConfig.for_model(model_type, **changes).to_dict()
config = {key: value for key, value in config.items() if value is not None}
config |= {"architectures": [architecture], "dtype": "bfloat16"}
Path(directory, "config.json").write_text(json.dumps(config))
from hybridkv.cli.app import main

sys.argv = ["hybridkv", "plan", directory, *options]
main()
"""


def number(text: str) -> int:
    return int(re.sub(r"[^\d]", "", text))


def rows() -> list[list[str]]:
    """Rows of the table: model, chunk, bytes per token by kind, smallest hit, tokens in host memory and on disk."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith(tuple(f"| {name} |" for name in MODELS))]


def plan(model: str, chunk: int | str, directory: Path) -> dict[str, Any]:
    tiers = [
        {"type": "ram", "capacity": "16GiB"},
        {"type": "disk", "path": "/var/cache/hybridkv", "capacity": "1TiB"},
    ]
    transfer = {
        "kv_connector": "HybridOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tiers": tiers, "chunk_tokens": chunk},
    }
    options = ["--json", "--config", json.dumps(transfer), "--max-model-len", "32768", "--shutdown-timeout", "30"]
    argument = json.dumps([str(directory), *MODELS[model], options])
    environment = os.environ | {
        "HOME": str(directory),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-c", PROGRAM, argument]
    finished = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    report: dict[str, Any] = json.loads(finished.stdout[finished.stdout.index("{") :])
    return report


def test_the_page_has_two_rows_for_each_model() -> None:
    assert [row[0] for row in rows()] == [name for name in MODELS for _ in range(2)]


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}, {row[1]}")
def test_each_row_matches_the_plan(row: list[str], tmp_path: Path) -> None:
    model, chunk, kinds, smallest, ram, disk = row
    report = plan(model, "auto" if chunk.startswith("auto") else number(chunk), tmp_path)
    startup = report["startup"]
    assert startup["chunk_tokens"] == number(chunk)
    assert {kind: round(size) for kind, size in report["bytes_per_token"].items()} == {
        kind: number(size) for kind, size in re.findall(r"([A-Z]+) ([\d,]+)", kinds)
    }
    assert startup["smallest_prompt_tokens"] == number(smallest)
    assert [tier["tokens"] for tier in startup["tiers"]] == [number(ram), number(disk)]
