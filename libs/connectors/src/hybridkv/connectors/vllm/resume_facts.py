"""Gathers from vLLM's configuration what `resumable.py` asks, and refuses to start where the answer is no.

Called where the engine has made up its mind, and by both halves: the scheduler's is built after the engine core has
read the layers' specs and switched off what they rule out; a worker's after its layers were built, some of which
switch prefix caching off in the worker's own copy of the configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.resumable import Group, Machine, Model, Refusal, ResumeFacts, Switches, refusal
from hybridkv.connectors.vllm.spec_check import changed_fields, describe

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

logger = logging.getLogger("vllm.hybridkv")


def require_resumable(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_excepted: bool) -> None:
    """Refuses an engine in which no prefix may be resumed.

    Raises:
        ConfigurationError: names the reason.
    """
    found = refusal(gather(vllm_config, kv_cache_config, is_excepted=is_excepted))
    if found is not None:
        raise ConfigurationError(found.path, found.expected, found.got, found.hint)


def warn_of_others(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, others: Sequence[str]) -> Refusal | None:
    """Says which connectors beside hybridkv's own could restore a prefix where none may be resumed.

    They are not refused: some fetch a whole prompt from the engine that has just computed it, which is another matter.
    """
    found = refusal(gather(vllm_config, kv_cache_config, is_excepted=False)) if others else None
    if found is not None:
        logger.warning(
            "HybridMultiConnector: no prefix can be relied on here (%s: %s), and %s may restore some all the same: "
            "hybridkv does not answer for what they load",
            found.path,
            found.got,
            ", ".join(others),
        )
    return found


def gather(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, is_excepted: bool) -> ResumeFacts:
    """The facts as they stand in this process now."""
    cacheable = compat.cacheable_group_ids(kv_cache_config)
    return ResumeFacts(
        Switches(
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            chunked_prefill=bool(vllm_config.scheduler_config.enable_chunked_prefill),
            batch_invariant=_is_batch_invariant(),
            is_excepted=is_excepted,
        ),
        _machine(vllm_config),
        _model(vllm_config),
        tuple(_group(group, i in cacheable) for i, group in enumerate(kv_cache_config.kv_cache_groups)),
    )


def _is_batch_invariant() -> bool:
    from vllm import envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def _machine(vllm_config: VllmConfig) -> Machine:
    from vllm.platforms import current_platform

    has_tiles = getattr(torch.cpu, "_is_amx_tile_supported", None)
    asked = getattr(vllm_config.attention_config, "backend", None)
    layers = vllm_config.compilation_config.static_forward_context.values()
    named = (getattr(getattr(layer, "attn_backend", None), "get_name", None) for layer in layers)
    return Machine(
        device=vllm_config.device_config.device_type,
        architecture=current_platform.get_cpu_architecture().name,
        has_amx=bool(has_tiles is not None and has_tiles()),
        asked_backend=str(getattr(asked, "name", asked or "")),
        backends=frozenset(str(name()) for name in named if name is not None),
    )


def _model(vllm_config: VllmConfig) -> Model:
    model = vllm_config.model_config
    pools = model.runner_type == "pooling"
    return Model(
        architectures=tuple(model.architectures),
        model_type=str(getattr(model.hf_config, "model_type", "")),
        is_encoder_decoder=bool(model.is_encoder_decoder),
        is_encoder_only=bool(getattr(vllm_config, "is_mm_encoder_only", False)),
        is_diffusion=bool(getattr(model, "is_diffusion", False)),
        is_unfit_pooling=pools and not model.is_prefix_caching_supported,
        uses_mla=bool(model.use_mla),
    )


def _group(group: KVCacheGroupSpec, is_cacheable: bool) -> Group:
    per_layer: dict[str, Any] | None = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    names = tuple(group.layer_names)
    specs = [describe(group.kv_cache_spec, names)]
    specs += (describe(spec, (name,)) for name, spec in (per_layer or {}).items())
    return Group(is_cacheable, bool(group.is_eagle_group), changed_fields(group), tuple(specs))
