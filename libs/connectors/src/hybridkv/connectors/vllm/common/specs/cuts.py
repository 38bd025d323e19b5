"""Groups with blocks that a chunk may cut: a range of a block's tokens can be copied alone.

A block must hold one token after another, each with equal bytes. This is checked twice; a block in doubt counts as not
divisible. The first check is by the engine's spec of each layer, in both halves of the connector, before there are
tensors. The second check, for groups that chunks do cut, is by the tensors and attention backends of a worker's layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybridkv.connectors.config import ROOT
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common import compat
from hybridkv.planner import whole_chunk_unit

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

    from hybridkv.connectors.vllm.common.layout import CacheLayout

DIVISIBLE_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})
"""Exact spec classes. MLA specs are missing: their entries may be packed, compressed or indexed by other layers, and
cuts of such blocks are untested."""
DIVISIBLE_BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"})
"""Attention backends that keep the bytes of a token together. The CPU backend stores K in columns, and some ROCm
backends split K."""


def part_tokens(
    vllm_config: VllmConfig, group: KVCacheGroupSpec, page_bytes: Mapping[str, int], hash_tokens: int
) -> int | None:
    """Tokens in the smallest part of a block that can be copied alone; None if only whole blocks can be copied.

    Args:
        vllm_config: final configuration.
        group: a stored group of a known kind.
        page_bytes: page size of each layer on the worker.
        hash_tokens: tokens in each of the engine's block hashes. No chunk ends inside these tokens, because keys are
            made from the hashes.
    """
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
    specs = {name: per_layer.get(name, group.kv_cache_spec) for name in group.layer_names}
    if vllm_config.device_config.device_type == "cpu":
        return None
    if not all(is_divisible(spec, page_bytes[name]) for name, spec in specs.items()):
        return None
    block_tokens = group.kv_cache_spec.block_size
    return hash_tokens if hash_tokens < block_tokens and block_tokens % hash_tokens == 0 else None


def is_divisible(spec: KVCacheSpec, page_bytes: int) -> bool:
    """Whether, by its spec, a layer's page has equal bytes for each token and no other content."""
    quantized = getattr(spec, "kv_quant_mode", None)
    return (
        type(spec).__name__ in DIVISIBLE_SPECS
        and getattr(quantized, "name", quantized) in (None, "NONE")
        and getattr(spec, "tokens_per_state", 1) == 1
        # If pages of several sizes are packed into one block, `page_bytes` includes padding.
        and page_bytes == compat.unpadded_page_bytes(spec)
        and page_bytes % spec.block_size == 0
    )


def require_divisible(vllm_config: VllmConfig, layout: CacheLayout) -> None:
    """Refuses a worker if chunks cut blocks with an unknown order of tokens.

    Raises:
        ConfigurationError: the attention backend of such a layer is not in `DIVISIBLE_BACKENDS`.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for index in layout.spec.cut_groups:
        names = [layer.name for layer in layout.layers[index]]
        backends = {name: backend_name(layers.get(name)) for name in names}
        others = {name: backend for name, backend in backends.items() if backend not in DIVISIBLE_BACKENDS}
        if others:
            raise not_divisible(layout, index, ", ".join(f"{backend} ({name})" for name, backend in others.items()))


def not_divisible(layout: CacheLayout, group_index: int, got: str) -> ConfigurationError:
    """Error for a group if chunks cut its blocks, but the blocks are not divisible."""
    group, chunk = layout.spec.groups[group_index], layout.spec.chunk_tokens
    return ConfigurationError(
        f"{ROOT}.chunk_tokens",
        f"blocks that keep one token after another, so that a chunk of {chunk} may cut those of {group.block_tokens}",
        got,
        f"use a multiple of {whole_chunk_unit(layout.spec.groups)}, which cuts no block",
    )


def backend_name(layer: Any) -> str:
    """vLLM's name of the attention backend of a layer in a worker."""
    name = getattr(getattr(layer, "attn_backend", None), "get_name", None)
    return str(name()) if name is not None else "an unknown backend"
