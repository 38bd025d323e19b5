"""`hybridkv plan` prints before the start what the engine logs at its start."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import harness
import pytest
from plans import planned, start_lines

import tiny_models
from hybridkv.cli.output import ReportError
from hybridkv.cli.planning import transfer_of


def test_the_plan_matches_the_engines_start_log(
    kind: str, kv_transfer_config: dict[str, Any], tmp_path_factory: Any
) -> None:
    directory: Path = harness.scratch_directory(tmp_path_factory.mktemp("plan"))
    harness.prepare_environment(directory / "environment")
    model = tiny_models.make_tiny_model(kind, directory / kind)
    disk = {"type": "disk", "path": str(directory / "cache"), "capacity": "1GiB"}
    extra = kv_transfer_config["kv_connector_extra_config"]
    transfer = kv_transfer_config | {"kv_connector_extra_config": extra | {"tiers": [*extra["tiers"], disk]}}
    arguments = tiny_models.ENGINE_ARGUMENTS[kind]
    startup = planned(model, arguments, transfer).startup
    with start_lines() as lines, harness.running_model(model, arguments | {"kv_transfer_config": transfer}):
        pass
    [line] = [line for line in lines if "groups 0 " in line]
    assert line.rpartition("; cache ")[0] == startup.line
    assert "disk 1 GiB at" in line
    assert [line for line in lines if line in startup.warnings] == list(startup.warnings)
    assert len(startup.warnings) == 1 and "shutdown_timeout" in startup.warnings[0]


@pytest.fixture
def settled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = harness.scratch_directory(tmp_path_factory.mktemp("large"))
    harness.prepare_environment(directory / "environment")
    return directory


def write_config(directory: Path, model_type: str, architecture: str, **settings: Any) -> Path:
    """A model with a real model's sizes, without weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **settings).to_dict()
    model = directory / model_type
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config | {"architectures": [architecture], "dtype": "bfloat16"}))
    return model


def test_the_plan_of_a_huge_model_needs_no_memory(settled: Path) -> None:
    """Llama 405B on eight ranks: 126 layers with 8 KV heads of 128 values with two bytes each."""
    model = write_config(
        settled,
        "llama",
        "LlamaForCausalLM",
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        vocab_size=128256,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = planned(model, {"tensor_parallel_size": 8}, transfer_of(None))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
    assert (report.ranks, report.max_model_len) == (8, 131072)
    assert report.bytes_per_token == {"FULL": 126 * 2 * 8 * 128 * 2}


def test_a_layer_that_reads_a_tensor_value_when_built_does_not_stop_the_plan(settled: Path) -> None:
    report = planned(write_config(settled, "gemma3n_text", "Gemma3nForCausalLM"), {}, transfer_of(None))
    assert {group.kind for group in report.startup.groups} == {"FULL", "WINDOW"}


def test_an_unknown_vllm_option_and_a_drafter_are_refused(settled: Path) -> None:
    model = write_config(settled, "llama", "LlamaForCausalLM", num_hidden_layers=2)
    with pytest.raises(ReportError, match="unrecognized arguments: --blok-size 32"):
        planned(model, {"blok_size": 32}, transfer_of(None))
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with pytest.raises(ReportError, match="speculative_config: expected an engine without a drafter"):
        planned(model, {"speculative_config": ngram}, transfer_of(None))
    with pytest.raises(ReportError, match="must be divisible by tensor parallel size"):
        planned(model, {"tensor_parallel_size": 3}, transfer_of(None))
