"""If vLLM does not resume a prefix itself, neither role of the connector starts, even if a setting changes later.

libs/connectors tests which facts count. These tests check that the facts are read from real vLLM objects, and when.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import stores
import torch
from starting import refusal_of, start
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import CONNECTOR, LMCACHE_CONNECTOR, MULTI_CONNECTOR, PEER_CONNECTOR
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.specs.resumable import ModelFacts, gather
from oracle.mixes import GPT_OSS, QWEN3_NEXT, Mix
from oracle.settings import Configs, Connector, EngineSettings, make_configs

OFFLOAD = {"tiers": [{"type": "ram", "capacity": "64MiB"}]}
EXCEPTED = OFFLOAD | {"without_prefix_caching": True}
FOREIGN = {"kv_connector": "RecordingConnector", "kv_connector_module_path": stores.MODULE}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("vllm.hybridkv")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm.hybridkv")
    yield caplog
    logger.removeHandler(caplog.handler)


def configure(
    extra: Mapping[str, Any] = OFFLOAD, name: str = CONNECTOR, mix: Mix = GPT_OSS, **settings: Any
) -> Configs:
    return make_configs(mix, EngineSettings(num_blocks=64, connector=Connector(name, extra), **settings))


def warnings(log: pytest.LogCaptureFixture) -> set[str]:
    """The warnings of hybridkv."""
    return {
        record.getMessage()
        for record in log.records
        if record.levelno == logging.WARNING and record.name.startswith("vllm.hybridkv")
    }


def test_prefix_caching_off_is_refused_with_a_solution() -> None:
    error = refusal_of(configure(prefix_caching=False))
    assert error.path == "enable_prefix_caching"
    assert "--enable-prefix-caching" in error.hint and '"without_prefix_caching": true' in error.hint


def test_prefix_caching_off_with_the_exception_starts_with_a_warning(
    started: list[Any], log: pytest.LogCaptureFixture
) -> None:
    configs = configure(EXCEPTED, prefix_caching=False)
    started += [start(configs, role) for role in KVConnectorRole]
    assert any("as without_prefix_caching says" in record.getMessage() for record in log.records)


def test_the_exception_is_not_needed_if_prefix_caching_is_on(started: list[Any], log: pytest.LogCaptureFixture) -> None:
    configs = configure(EXCEPTED)
    started += [start(configs, role) for role in KVConnectorRole]
    assert not any("prefix caching is off" in record.getMessage() for record in log.records)


@pytest.mark.parametrize("extra", [OFFLOAD, EXCEPTED])
def test_chunked_prefill_off_is_refused_with_and_without_the_exception(extra: Mapping[str, Any]) -> None:
    for prefix_caching in (True, False):
        configs = configure(extra, prefix_caching=prefix_caching)
        configs.vllm.scheduler_config.enable_chunked_prefill = False
        assert refusal_of(configs).path == "enable_chunked_prefill"


@pytest.mark.parametrize("extra", [OFFLOAD, EXCEPTED])
def test_a_spec_with_lookahead_is_refused_with_and_without_the_exception(extra: Mapping[str, Any]) -> None:
    configs = configure(extra, prefix_caching=False)
    for kv_cache in (configs.scheduler, configs.worker):
        group = kv_cache.kv_cache_groups[1]
        group.kv_cache_spec = replace(group.kv_cache_spec, non_causal=True)
    error = refusal_of(configs)
    assert error.path == "kv_cache_groups[1].kv_cache_spec" and "non_causal True" in str(error.got)


def test_recurrent_states_that_the_engine_drops_are_refused_despite_the_exception() -> None:
    configs = configure(EXCEPTED, mix=QWEN3_NEXT, prefix_caching=False)
    for kv_cache in (configs.scheduler, configs.worker):
        group = kv_cache.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, mamba_cache_mode="none")
    assert "mamba_cache_mode none" in str(refusal_of(configs).got)


def test_a_layer_that_only_the_worker_has_is_refused_by_the_worker(started: list[Any]) -> None:
    configs = configure()
    group = configs.worker.kv_cache_groups[1]
    layers = dict.fromkeys(group.layer_names, group.kv_cache_spec)
    last = group.layer_names[-1]
    layers[last] = replace(layers[last], non_causal=True)
    group.kv_cache_spec = UniformTypeKVCacheSpecs(block_size=group.kv_cache_spec.block_size, kv_cache_specs=layers)
    started.append(start(configs, KVConnectorRole.SCHEDULER))
    with pytest.raises(ConfigurationError, match="non_causal True"):
        start(configs, KVConnectorRole.WORKER)


@pytest.mark.parametrize("extra", [OFFLOAD, EXCEPTED])
@pytest.mark.parametrize("backend", ["FLASHINFER", "TRITON_MLA", "FLASH_ATTN"])
def test_batch_invariance_is_refused_for_an_unfit_backend_in_the_worker(
    extra: Mapping[str, Any], backend: str, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    configs = configure(extra)
    started.append(start(configs, KVConnectorRole.SCHEDULER))
    of_worker = copy.copy(configs.vllm)
    of_worker.compilation_config = copy.copy(of_worker.compilation_config)
    layer = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend))
    of_worker.compilation_config.static_forward_context = {"layer": layer, "experts": SimpleNamespace()}
    configs = replace(configs, vllm=of_worker)
    if backend == "FLASH_ATTN":
        started.append(start(configs, KVConnectorRole.WORKER))
        return
    with pytest.raises(ConfigurationError, match=f"VLLM_BATCH_INVARIANT with {backend}"):
        start(configs, KVConnectorRole.WORKER)


def test_a_setting_turned_off_in_the_worker_stops_it_at_registration(
    started: list[Any],
) -> None:
    configs = configure()
    copies = replace(configs, vllm=copy.copy(configs.vllm))
    copies.vllm.cache_config = copy.copy(configs.vllm.cache_config)
    started += [start(configs, KVConnectorRole.SCHEDULER), start(copies, KVConnectorRole.WORKER)]
    copies.vllm.cache_config.enable_prefix_caching = False
    with pytest.raises(ConfigurationError) as caught:
        started[1].register_kv_caches({})
    assert caught.value.path == "enable_prefix_caching"


def test_own_children_refuse_and_foreign_children_are_named_in_a_warning(
    started: list[Any], log: pytest.LogCaptureFixture
) -> None:
    own = {"kv_connector": CONNECTOR, "kv_connector_extra_config": OFFLOAD}
    error = refusal_of(configure({"connectors": [own, FOREIGN]}, MULTI_CONNECTOR, prefix_caching=False))
    assert error.path == "enable_prefix_caching"
    configs = configure({"connectors": [FOREIGN]}, MULTI_CONNECTOR, prefix_caching=False)
    started += [start(configs, role) for role in KVConnectorRole]
    (warning,) = warnings(log)
    assert "RecordingConnector may still restore some" in warning


def test_an_excepted_own_child_is_not_named_with_the_foreign_children(
    started: list[Any], log: pytest.LogCaptureFixture
) -> None:
    extra = {"url": "tcp://127.0.0.1:1", "chunk_tokens": 256, "without_prefix_caching": True}
    own = {"kv_connector": LMCACHE_CONNECTOR, "kv_connector_extra_config": extra}
    configs = configure({"connectors": [own, FOREIGN]}, MULTI_CONNECTOR, prefix_caching=False)
    started.append(start(configs, KVConnectorRole.SCHEDULER))
    (warning,) = (each for each in warnings(log) if "may still restore some" in each)
    assert "RecordingConnector may still" in warning and "LMCache" not in warning


def test_foreign_children_are_not_named_if_prefixes_can_be_resumed(
    started: list[Any], log: pytest.LogCaptureFixture
) -> None:
    configs = configure({"connectors": [FOREIGN]}, MULTI_CONNECTOR)
    started += [start(configs, role) for role in KVConnectorRole]
    assert not warnings(log)


def test_the_facts_are_read_from_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = configure()
    plain = gather(configs.vllm, configs.worker, is_excepted=False)
    assert plain.machine.device == "cpu" and plain.machine.architecture == current_platform.get_cpu_architecture().name
    assert plain.model.architectures == ("HybridkvOracleForCausalLM",) and plain.model.model_type == "llama"
    assert [group.specs[0].name for group in plain.groups] == ["SlidingWindowSpec", "FullAttentionSpec"]
    assert all(group.is_cacheable for group in plain.groups)
    flags = (
        plain.model.is_encoder_decoder,
        plain.model.is_encoder_only,
        plain.model.is_diffusion,
        plain.model.is_unfit_pooling,
        plain.model.uses_mla,
    )
    assert not any(flags)
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        assert gather(configs.vllm, configs.worker, is_excepted=False).machine.has_amx is has_amx


@pytest.mark.parametrize(
    ("attribute", "fact"),
    [("is_encoder_decoder", "is_encoder_decoder"), ("is_diffusion", "is_diffusion"), ("use_mla", "uses_mla")],
)
def test_a_fact_of_the_model_is_read(attribute: str, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(model_facts(monkeypatch, **{attribute: True}), fact) is True


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        (CONNECTOR, OFFLOAD),
        (LMCACHE_CONNECTOR, {"url": "tcp://127.0.0.1:1", "chunk_tokens": 256}),
        (PEER_CONNECTOR, {}),
        (MULTI_CONNECTOR, {"connectors": [{"kv_connector": CONNECTOR, "kv_connector_extra_config": OFFLOAD}]}),
    ],
)
def test_an_engine_that_must_return_the_experts_of_loaded_tokens_is_refused(
    name: str, extra: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM before 0.33 raises in the worker after a load of tokens whose experts it has forgotten."""
    monkeypatch.setattr(compat, "limits_loads_to_known_routing", lambda: False)
    configs = configure(extra, name)
    monkeypatch.setattr(configs.vllm, "aux_output_config", SimpleNamespace(enabled=True), raising=False)
    for role in KVConnectorRole:
        with pytest.raises(ConfigurationError) as caught:
            start(configs, role)
        assert caught.value.path == "enable_return_routed_experts"


def test_experts_are_no_reason_for_a_refusal_if_no_tokens_without_them_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    configs = configure()
    monkeypatch.setattr(configs.vllm, "aux_output_config", SimpleNamespace(enabled=True), raising=False)

    def needs_routing() -> bool:
        return gather(configs.vllm, configs.worker, is_excepted=False).switches.needs_routing

    monkeypatch.setattr(compat, "limits_loads_to_known_routing", lambda: True)
    assert not needs_routing()
    monkeypatch.setattr(compat, "limits_loads_to_known_routing", lambda: False)
    assert needs_routing()
    monkeypatch.setattr(configs.vllm.kv_transfer_config, "kv_role", "kv_producer")
    assert not needs_routing()


@pytest.mark.parametrize("is_supported", [True, False])
def test_a_pooling_model_is_unfit_if_vllm_caches_no_prefixes_for_it(
    is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = model_facts(monkeypatch, runner_type="pooling", is_prefix_caching_supported=is_supported)
    assert facts.is_unfit_pooling is not is_supported


def model_facts(monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> ModelFacts:
    """The facts that are read from a model with these attributes."""
    configs = configure()
    configs.vllm.model_config = model = copy.copy(configs.vllm.model_config)
    for name, value in attributes.items():
        monkeypatch.setattr(type(model), name, value, raising=False)
        model.__dict__.pop(name, None)
    return gather(configs.vllm, configs.worker, is_excepted=False).model
