"""Startup of the peer connector in vLLM: accepted configurations, refusals by name, and registered memory.

Configurations and groups are vLLM's own; both roles are built through its factory.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from starting import refusal_of, start
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)

from hybridkv.connectors.vllm import PEER_CONNECTOR
from hybridkv.connectors.vllm.common.identity.worker_facts import CONV_STATE_FACTS
from hybridkv.connectors.vllm.common.layout import CacheLayout, resolve_layout
from hybridkv.connectors.vllm.common.specs.spec_table import KNOWN
from hybridkv.connectors.vllm.nixl.config import NixlConfig
from hybridkv.connectors.vllm.nixl.memory.description import RankPlace, describe, identity_facts
from hybridkv.connectors.vllm.nixl.memory.page_parts import page_orders
from hybridkv.peers.comparison import Agreement, compare
from hybridkv.peers.errors import Incompatibility
from oracle.memory import KVMemory
from oracle.mixes import DEEPSEEK_V4, GPT_OSS, LLAMA4, NAMED, QWEN3_NEXT, Kind, Mix
from oracle.settings import Configs, Connector, EngineSettings, make_configs

BLOCKS = 64
EXTRA: Mapping[str, Any] = {"weights_digest": "none"}


def configure(mix: Mix, role: str = "kv_both", extra: Mapping[str, Any] = EXTRA, **settings: Any) -> Configs:
    connector = Connector(PEER_CONNECTOR, extra, role=role)
    return make_configs(mix, EngineSettings(num_blocks=BLOCKS, connector=connector, **settings))


def with_spec(configs: Configs, index: int, change: Any) -> Configs:
    """Replaces the spec of a group in the configurations of both roles."""
    for kv_cache in (configs.scheduler, configs.worker):
        group = kv_cache.kv_cache_groups[index]
        group.kv_cache_spec = change(group.kv_cache_spec)
    return configs


@pytest.mark.parametrize(
    ("role", "words"), [("kv_producer", "hands over"), ("kv_consumer", "reads"), ("kv_both", "hands over and reads")]
)
@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_the_connector_starts_in_every_role_and_logs_its_settings(
    mix: Mix, role: str, words: str, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.hybridkv")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm.hybridkv")
    started += [start(configure(mix, role), each) for each in KVConnectorRole]
    logger.removeHandler(caplog.handler)
    (line,) = {record.getMessage() for record in caplog.records if "groups" in record.getMessage()}
    for index, group in enumerate(mix.groups):
        assert f"{index} {group.kind.name} blocks of {group.block_tokens}" in line
    assert f"kv_role {role}: it {words};" in line and "the engine's memory" in line
    assert ("listens at nothing" in line) is (role == "kv_consumer")


def test_an_address_that_consumers_cannot_reach_is_refused() -> None:
    """Consumers would refuse every prompt, without an error on this host."""
    extra = {**EXTRA, "listen": {"host": "0.0.0.0"}}
    assert refusal_of(configure(GPT_OSS, "kv_producer", extra)).path.endswith("extra_config.listen.advertise")


def test_a_port_range_that_is_too_small_for_the_ranks_is_refused(started: list[Any]) -> None:
    extra = {**EXTRA, "listen": {"port": 65535}}
    error = refusal_of(configure(GPT_OSS, "kv_producer", extra, tp_size=2))
    assert error.path.endswith("extra_config.listen.port") and "65536" in str(error.got)
    # A decode-only engine listens on no port.
    started.append(start(configure(GPT_OSS, "kv_consumer", extra, tp_size=2)))


@pytest.mark.parametrize("unknown", [SinkFullAttentionSpec, RSWASpec])
def test_a_group_with_an_unlisted_spec_is_refused_by_name(unknown: type[FullAttentionSpec]) -> None:
    extra = {"rswa_window": 64} if unknown is RSWASpec else {"sink_len": 4}

    def changed(spec: Any) -> Any:
        return unknown(
            block_size=spec.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            **extra,
        )

    error = refusal_of(with_spec(configure(GPT_OSS), 1, changed))
    assert error.path == "kv_cache_groups[1].kv_cache_spec"
    assert unknown.__name__ in str(error.got) and "FullAttentionSpec" in error.expected


def test_every_spec_of_vllm_is_on_one_of_the_two_lists() -> None:
    """A class that a later version adds is on neither list, so it is refused."""
    named = {
        name
        for name, value in vars(kv_cache_interface).items()
        if isinstance(value, type) and issubclass(value, KVCacheSpec)
    }
    assert named <= set(KNOWN)


@pytest.mark.skipif(
    "bounded_replay" not in {field.name for field in fields(SlidingWindowMLASpec)},
    reason="vLLM 0.30 computes no window again",
)
def test_a_window_that_is_recomputed_is_refused() -> None:
    index = next(i for i, group in enumerate(DEEPSEEK_V4.groups) if group.kind is Kind.WINDOW)

    def changed(spec: Any) -> Any:
        layers = getattr(spec, "kv_cache_specs", None)
        if layers is None:
            return replace(spec, bounded_replay=True)
        return replace(spec, kv_cache_specs={name: replace(each, bounded_replay=True) for name, each in layers.items()})

    error = refusal_of(with_spec(configure(DEEPSEEK_V4), index, changed))
    assert error.path.startswith(f"kv_cache_groups[{index}]") and "--no-swa-bounded-replay" in error.hint


@pytest.mark.parametrize("excepted", [True, False])
def test_states_that_the_engine_keeps_at_no_boundary_are_refused(excepted: bool) -> None:
    configs = configure(QWEN3_NEXT, extra={**EXTRA, "without_prefix_caching": excepted})
    configs.vllm.cache_config.enable_prefix_caching = False
    for index in range(3):
        with_spec(configs, index, lambda spec: replace(spec, mamba_cache_mode="none"))
    error = refusal_of(configs)
    assert error.path == "kv_cache_groups[0].kv_cache_spec" and "--enable-prefix-caching" in error.hint


@pytest.mark.parametrize(
    "field", ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"]
)
def test_an_unsupported_parallel_layout_is_refused_by_name(field: str) -> None:
    configs = configure(GPT_OSS)
    configs.vllm.parallel_config = copy.copy(configs.vllm.parallel_config)
    setattr(configs.vllm.parallel_config, field, 2)
    assert refusal_of(configs).path == field


def test_device_memory_is_read_through_host_memory_or_not_at_all(
    started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    configs = configure(GPT_OSS, device="cuda")
    configs.vllm.kv_transfer_config.kv_buffer_device = "cuda"
    error = refusal_of(configs)
    assert error.path == "kv_transfer_config.kv_buffer_device" and '"cpu"' in error.expected and error.got == "cuda"
    configs.vllm.kv_transfer_config.kv_buffer_device = "cpu"
    logger = logging.getLogger("vllm.hybridkv")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "vllm.hybridkv")
    started += [start(configs, each) for each in KVConnectorRole]
    logger.removeHandler(caplog.handler)
    assert any("a copy in host memory" in record.getMessage() for record in caplog.records)


class Worker:
    """One rank's memory as vLLM lays it out, and the connector's description of it."""

    def __init__(self, configs: Configs, mix: Mix) -> None:
        self.memory = KVMemory(configs.vllm, configs.worker, mix, 0)
        layout: CacheLayout = resolve_layout(configs.vllm, configs.worker, "auto")
        orders = page_orders(configs.vllm, configs.worker, layout)
        config = NixlConfig(weights_digest="none")
        facts = identity_facts(configs.vllm, config, layout, self.memory.tensors, {})
        place = RankPlace("engine", 0, 1)
        self.description, self.regions = describe(place, facts, layout, self.memory.tensors, BLOCKS, orders)


@pytest.mark.parametrize("mix", NAMED, ids=lambda mix: mix.name)
def test_memory_shared_by_groups_is_registered_once(mix: Mix) -> None:
    worker = Worker(configure(mix), mix)
    storages = {tensor.untyped_storage().data_ptr() for tensor in worker.memory.tensors.values()}
    assert {region.address for region in worker.regions} == storages
    assert len(worker.regions) < len(worker.memory.tensors)
    spans = sorted((region.address, region.address + region.num_bytes) for region in worker.regions)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), "no byte is registered twice"


def agreed(ours: Configs, theirs: Configs, mix: Mix = GPT_OSS) -> Agreement | Incompatibility:
    return compare(Worker(ours, mix).description, Worker(theirs, mix).description)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "int8_per_token_head", "nvfp4"])
def test_caches_with_different_quantization_are_refused_by_name(dtype: str) -> None:
    configs = configure(GPT_OSS)
    configs.vllm.cache_config.cache_dtype = dtype
    refusal = agreed(configure(GPT_OSS), configs)
    assert isinstance(refusal, Incompatibility) and "cache_dtype" in refusal.field and dtype in refusal.theirs
    assert isinstance(agreed(configs, configs), Agreement), "equal quantization on both sides is accepted"


class Layer:
    """A layer of a built model: the scales that quantize its K and V."""

    def __init__(self, k_scale: float) -> None:
        self._k_scale_float, self._v_scale_float = k_scale, 1.0


def test_different_scales_are_refused_by_name() -> None:
    """Scales are part of an engine's weights, so the bytes of its cache do not show them."""
    engines = []
    for scale in (0.5, 0.5, 0.25):
        configs = configure(GPT_OSS)
        layers = {name: Layer(scale) for group in configs.worker.kv_cache_groups for name in group.layer_names}
        configs.vllm.compilation_config = copy.copy(configs.vllm.compilation_config)
        configs.vllm.compilation_config.static_forward_context = layers
        engines.append(configs)
    assert isinstance(agreed(engines[0], engines[1]), Agreement)
    refusal = agreed(engines[0], engines[2])
    assert isinstance(refusal, Incompatibility) and refusal.field == "facts[worker.kv_scales]"
    assert (0.5).hex() in refusal.ours and (0.25).hex() in refusal.theirs


def quantised(mode: Any, block_tokens: int | None = None) -> Configs:
    configs = configure(LLAMA4)
    index = next(i for i, g in enumerate(configs.worker.kv_cache_groups) if type(g.kv_cache_spec) is FullAttentionSpec)
    changes = {"kv_quant_mode": mode} | ({"block_size": block_tokens} if block_tokens else {})
    return with_spec(configs, index, lambda spec: replace(spec, **changes))


def test_pages_with_different_quantization_are_refused_by_name() -> None:
    plain, fp8 = quantised(KVQuantMode.NONE), quantised(KVQuantMode.FP8_PER_TENSOR)
    refusal = agreed(plain, fp8, LLAMA4)
    assert isinstance(refusal, Incompatibility) and "item_format" in refusal.field
    assert "kv_quant_mode" in refusal.theirs and "FP8_PER_TENSOR" in refusal.theirs
    assert isinstance(agreed(fp8, fp8, LLAMA4), Agreement)


def test_an_unknown_quantization_is_refused_at_startup() -> None:
    error = refusal_of(quantised("A_NEW_ONE"))
    assert error.path.endswith("kv_cache_spec") and "A_NEW_ONE" in str(error.got)
    assert "kv_quant_mode" in error.expected and "--kv-cache-dtype" in error.hint


def test_worker_facts_that_layers_also_state_appear_once() -> None:
    facts = Worker(configure(QWEN3_NEXT), QWEN3_NEXT).description.facts
    assert "worker.byte_order" in facts
    assert not set(CONV_STATE_FACTS) & set(facts)
