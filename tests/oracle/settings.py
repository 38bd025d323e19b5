"""Engine settings, and the VllmConfig made from them: no weights, no tokenizer, no network."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.config import CacheConfig, KVEventsConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)

from oracle.content import VOCABULARY_TOKENS
from oracle.mixes import group_specs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_cache_interface import KVCacheConfig

    from oracle.mixes import Mix

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before vLLM 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

try:
    from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens
except ImportError:  # before vLLM 0.32
    resolve_cache_hit_alignment_tokens = None

HAS_TAILS = resolve_cache_hit_alignment_tokens is not None
"""Whether this version of vLLM tells where inside a block it offers states."""
MAX_MODEL_TOKENS = 4096


def _with_exception(name: str, extra: Mapping[str, Any]) -> Mapping[str, Any]:
    if name in ("HybridOffloadConnector", "HybridLMCacheConnector"):
        return {**extra, "without_prefix_caching": True}
    key = "kv_connector_extra_config"
    children = [
        {**child, key: _with_exception(child["kv_connector"], child.get(key, {}))}
        for child in extra.get("connectors", ())
    ]
    return {**extra, "connectors": children} if children else extra


@dataclass(frozen=True, slots=True)
class Connector:
    """The connector under test: a registered name, or a class name in `module_path`."""

    name: str
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    module_path: str | None = None
    role: str = "kv_both"

    def without_prefix_caching(self) -> Connector:
        """The same for an engine without prefix caching, as its operator must configure it."""
        return replace(self, extra_config=_with_exception(self.name, self.extra_config))


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Choices of a scenario about its engine.

    `runner` sets the order of the worker's calls: "v1" (CPU, and models that runner 2 does not support) reports
    preemptions to the connector before it zeroes and copies blocks; "v2" (the default on GPUs) after. With `saves_last`
    the connector saves after the results of a step were taken, as with a drafter. Another `model` is another
    configuration of the same weights: it rotates its keys differently, so that no byte in its cache is the same. Below
    0 the bytes differ as well, but the configuration does not show it. With `async_scheduling` a step is planned before
    the tokens of the one before it are known. `device` is where the engine claims to hold its KV cache; here it is host
    memory in any case. With a `tp_size` above 1 the mix describes one of the ranks. With `kv_events` it publishes its
    cached blocks; a test replaces its publisher.
    """

    num_blocks: int
    max_step_tokens: int = 64
    max_running: int = 4
    prefix_caching: bool = True
    retention_tokens: int | None = 0
    hash_tokens: int | None = None
    runner: Literal["v1", "v2"] = "v1"
    connector: Connector | None = None
    seed: int = 0
    model: int = 0
    device: str = "cpu"
    tp_size: int = 1
    async_scheduling: bool = False
    kv_events: bool = False
    saves_last: bool = False


class _NoModel(torch.nn.Module):
    """Registered so that vLLM inspects this class in process and loads no model code."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@functools.cache
def _base_config() -> VllmConfig:
    ModelRegistry.register_model("HybridkvOracleForCausalLM", _NoModel)
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "architectures": ["HybridkvOracleForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY_TOKENS,
            "max_position_embeddings": MAX_MODEL_TOKENS,
            "torch_dtype": "float16",
        }
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, max_model_len=MAX_MODEL_TOKENS, dtype="float16", seed=0
        )
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_model_len=MAX_MODEL_TOKENS,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )


def _rotated(model: ModelConfig, number: int) -> ModelConfig:
    """The same model with another rotary base, as `hf_overrides` would set it."""
    turned = copy.copy(model)
    turned.hf_config = copy.deepcopy(model.hf_config)
    turned.hf_config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0 + max(0, number)}
    turned.hf_text_config = turned.hf_config
    return turned


@dataclass(frozen=True, slots=True)
class Configs:
    """Configs as EngineCore passes them: the worker's and the scheduler's KVCacheConfig are different objects, and
    where layers of a group differ in shape the scheduler's has the spec of one layer only."""

    vllm: VllmConfig
    worker: KVCacheConfig
    scheduler: KVCacheConfig
    block_tokens: int
    hash_tokens: int


def make_configs(mix: Mix, settings: EngineSettings) -> Configs:
    """Configs as EngineCore resolves them. All are private copies: a change by one engine is invisible to others."""
    config = copy.copy(_base_config())
    config.model_config = _rotated(config.model_config, settings.model)
    config.cache_config = cache = copy.copy(config.cache_config)
    config.scheduler_config = scheduler = copy.copy(config.scheduler_config)
    config.device_config = copy.copy(config.device_config)
    config.device_config.device_type = settings.device
    scheduler.max_num_seqs = settings.max_running
    scheduler.max_num_batched_tokens = settings.max_step_tokens
    scheduler.async_scheduling = settings.async_scheduling
    cache.enable_prefix_caching = settings.prefix_caching
    cache.prefix_cache_retention_interval = settings.retention_tokens
    cache.prefix_match_unit = settings.hash_tokens
    cache.kv_cache_layout = mix.layout
    cache.mamba_cache_mode = "align" if mix.has_recurrent else "none"
    cache.num_gpu_blocks_override = settings.num_blocks
    config.parallel_config = parallel = copy.copy(config.parallel_config)
    parallel.tensor_parallel_size = parallel.world_size = settings.tp_size
    if settings.kv_events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if settings.connector is not None:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=settings.connector.name,
            kv_connector_module_path=settings.connector.module_path,
            kv_role=settings.connector.role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=dict(settings.connector.extra_config),
        )
    groups = group_specs(mix)
    # As EngineCore (v1/engine/core.py): uncached groups are ignored.
    cached = [group.kv_cache_spec for group in groups if group.kv_cache_spec.prefix_cacheable]
    cache.block_size = min(spec.block_size for spec in cached or [group.kv_cache_spec for group in groups])
    kv_cache = get_kv_cache_config_from_groups(config, groups, available_memory=0)
    cache.num_gpu_blocks = kv_cache.num_blocks
    kv_cache.kv_cache_layout = mix.layout
    of_scheduler = generate_scheduler_kv_cache_config([kv_cache])
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(of_scheduler, config)
    if resolve_cache_hit_alignment_tokens is not None:
        alignment_tokens = resolve_cache_hit_alignment_tokens(of_scheduler, config, block_tokens, hash_tokens)
        for each in (kv_cache, of_scheduler):
            each.hash_block_size = hash_tokens
            each.cache_hit_alignment_tokens = alignment_tokens
    return Configs(config, kv_cache, of_scheduler, block_tokens, hash_tokens)


def of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """The config of one of its ranks."""
    seen = copy.copy(config)
    seen.parallel_config = copy.copy(config.parallel_config)
    seen.parallel_config.rank = rank
    return seen
