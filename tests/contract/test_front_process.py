"""A wrong configuration is refused while vLLM builds its configuration, before an engine process starts and loads
weights.

If the platform has CUDA graphs, vLLM calls the connector class at that point. The CPU platform has none, so the tests
patch it.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR, LMCACHE_CONNECTOR, MULTI_CONNECTOR, PEER_CONNECTOR
from hybridkv.connectors.vllm.multi.connector import HybridMultiConnector
from hybridkv.connectors.vllm.nixl.connector import HybridNixlConnector
from hybridkv.connectors.vllm.offload.connector import HybridOffloadConnector
from hybridkv.peers.transport import nixl_library

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
    """The configuration that a server creates before it starts its engine."""
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


def below(tmp_path: Path, *tiers: dict[str, Any]) -> dict[str, Any]:
    """A configuration with these secondary tiers. `{}` in a string is a directory with one file that all users may
    read."""
    (tmp_path / "readable").write_text("0123456789abcdef" * 2)
    (tmp_path / "readable").chmod(0o644)
    (tmp_path / "words").write_text("not JSON")
    (tmp_path / "words").chmod(0o600)
    text = json.dumps({"tiers": [RAM, *tiers], "weights_digest": "model-1"})
    return dict(json.loads(text.replace("{}", str(tmp_path))))


DISK = {"type": "disk", "capacity": "1GiB"}
PEER = {"type": "peer", "listen": "127.0.0.1:7300"}
OBJECT = {"type": "object", "url": "s3://bucket/prefix"}


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ({"type": "ram", "capacity": "900TiB"}, "tiers[0].capacity: expected at most the"),
        (DISK | {"path": "{}/missing/cache"}, "tiers[1].path: expected a directory that can be used"),
        (DISK | {"path": "{}/words"}, "tiers[1].path: expected a directory that can be used"),
        (PEER | {"secret_file": "{}/missing"}, "tiers[1].secret_file: expected"),
        (PEER | {"secret_file": "{}/readable"}, "tiers[1].secret_file: expected"),
        (OBJECT | {"secret_file": "{}/words"}, "tiers[1].secret_file: expected"),
        (OBJECT | {"credentials_file": "{}/missing"}, "tiers[1].credentials_file: expected a file that can be read"),
        (OBJECT | {"credentials_file": "{}/words"}, "tiers[1].credentials_file: expected a JSON object"),
        (OBJECT | {"url": "file://{}/missing/store"}, "tiers[1].url: expected a directory that can be used"),
        (OBJECT | {"url": "file://{}/words"}, "tiers[1].url: expected a directory that can be used"),
    ],
)
@pytest.mark.parametrize("is_child", [False, True])
def test_a_missing_or_unusable_file_is_named_before_an_engine_starts(
    is_child: bool, tier: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_library, "MODULES", ("json",))  # NIXL is not installed here
    extra = below(tmp_path, *([] if tier["type"] == "ram" else [tier]))
    if tier["type"] == "ram":
        extra["tiers"] = [tier]
    path = f"kv_connector_extra_config.{words}"
    if is_child:
        connector: type = HybridMultiConnector
        extra = {"connectors": [{"kv_connector": CONNECTOR, "kv_connector_extra_config": extra}]}
        path = f"kv_connector_extra_config.connectors[0].{path}"
    else:
        connector = HybridOffloadConnector
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError) as caught:
        connector.requires_piecewise_for_cudagraph(extra)  # type: ignore[attr-defined]
    assert str(caught.value).startswith(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_library_is_named_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    for connector, extra, path in (
        (HybridOffloadConnector, below(tmp_path, PEER), "kv_connector_extra_config.tiers[1].type"),
        (HybridOffloadConnector, below(tmp_path, OBJECT), "kv_connector_extra_config.tiers[1].url"),
        (HybridNixlConnector, {}, "kv_connector"),
    ):
        with pytest.raises(ConfigurationError, match="pip install") as caught:
            connector.requires_piecewise_for_cudagraph(extra)
        assert caught.value.path == path


def test_existing_files_and_libraries_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library, "MODULES", ("json",))  # NIXL is not installed here
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef" * 2)
    secret.chmod(0o600)
    named = {"secret_file": str(secret)}
    disk, store = DISK | {"path": "{}/cache"}, OBJECT | named | {"url": "file://{}/store"}
    extra = below(tmp_path, disk, PEER | named, store)
    assert HybridOffloadConnector.requires_piecewise_for_cudagraph(extra) is False
    assert HybridNixlConnector.requires_piecewise_for_cudagraph(named) is False
    assert not (tmp_path / "cache").exists() and not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("connector", "extra"), [(CONNECTOR, {"tiers": [RAM]}), (MULTI_CONNECTOR, {"connectors": [GOOD]})]
)
def test_a_valid_configuration_passes_and_changes_no_cuda_graphs(
    connector: str, extra: dict[str, Any], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda self: True)
    built = front_process(model, connector, extra)
    assert built.compilation_config.cudagraph_mode.has_full_cudagraphs()
