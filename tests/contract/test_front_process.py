"""A wrong configuration is refused while vLLM builds its own, before an engine process starts and weights are loaded.

vLLM asks the connector's class there if the platform has CUDA graphs. The CPU platform has none, so tests patch it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from hybridkv.connectors.vllm import CONNECTOR, LMCACHE_CONNECTOR, MULTI_CONNECTOR, PEER_CONNECTOR

RAM = {"type": "ram", "capacity": "64MiB"}
GOOD = {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"tiers": [RAM]}}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


def front_process(model: Path, connector: str, extra: dict[str, Any]) -> VllmConfig:
    """The configuration that a server makes before it starts its engine."""
    transfer: Any = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    graphs: Any = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
    arguments = EngineArgs(
        model=str(model), skip_tokenizer_init=True, kv_transfer_config=transfer, compilation_config=graphs
    )
    return arguments.create_engine_config()


@pytest.mark.parametrize(
    ("connector", "extra", "words"),
    [
        (CONNECTOR, {"tiers": [{"type": "ram", "capacity": "4 gigs"}]}, ".tiers[0].capacity: expected a unit among"),
        (
            CONNECTOR,
            {"tiers": [RAM], "chunk_token": 64},
            ".chunk_token: expected a known key, got an unknown one\nhint: did",
        ),
        (CONNECTOR, {"tiers": [RAM, RAM]}, ".tiers[1].type: expected a type that no other tier has"),
        (PEER_CONNECTOR, {"lease_seconds": "long"}, ".lease_seconds: expected"),
        (LMCACHE_CONNECTOR, {"url": "tcp:/x"}, ".url: expected"),
        (MULTI_CONNECTOR, {"connectors": []}, ".connectors: expected a list of at least one connector"),
        (
            MULTI_CONNECTOR,
            {"connectors": [GOOD, GOOD | {"kv_connector_extra_config": {"tiers": [RAM], "load": "fast"}}]},
            ".connectors[1].kv_connector_extra_config.load: expected",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_before_an_engine_starts(
    connector: str, extra: dict[str, Any], words: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda self: True)
    with pytest.raises(ValueError, match="kv_connector_extra_config") as caught:
        front_process(model, connector, extra)
    assert f"kv_connector_extra_config{words}" in str(caught.value)
    assert "\nhint: " in str(caught.value)


@pytest.mark.parametrize(
    ("connector", "extra"), [(CONNECTOR, {"tiers": [RAM]}), (MULTI_CONNECTOR, {"connectors": [GOOD]})]
)
def test_a_valid_configuration_passes_and_changes_no_cuda_graphs(
    connector: str, extra: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda self: True)
    built = front_process(model, connector, extra)
    assert built.compilation_config.cudagraph_mode.has_full_cudagraphs()
