"""What loads take of the engine's memory: the bytes that they fill, and the blocks that their requests need.

A child says how many tokens it loads, and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.admission import LoadAdmission
from hybridkv.connectors.vllm.layout import no_stored_group
from hybridkv.planner import CacheSpec, GroupKind, GroupSpec, chunk_unit

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig


class LoadSizes:
    """Block sizes of a model's groups.

    Args:
        kv_cache_config: of the engine.
        num_ranks: each of which fills its own memory.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, num_ranks: int) -> None:
        cacheable = compat.cacheable_group_ids(kv_cache_config)
        self._groups = [
            (index, group.kv_cache_spec.block_size, _block_bytes(group) * num_ranks)
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if index in cacheable
        ]

    def load_bytes(self, blocks: KVCacheBlocks, first_token: int, num_tokens: int) -> int:
        """Bytes, over all ranks, of the blocks that hold something of these tokens."""
        total = 0
        for index, block_tokens, block_bytes in self._groups:
            table = blocks.blocks[index][first_token // block_tokens : -(-(first_token + num_tokens) // block_tokens)]
            total += block_bytes * sum(not block.is_null for block in table)
        return total


def _block_bytes(group: Any) -> int:
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer:
        return sum(compat.unpadded_page_bytes(spec) for spec in per_layer.values())
    return compat.unpadded_page_bytes(group.kv_cache_spec) * len(group.layer_names)


def load_admission(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> LoadAdmission:
    """Admits the loads of all children. A group of unknown meaning counts as one that keeps all its blocks.

    Raises:
        ConfigurationError: the model has no group of which anything could be loaded.
    """
    cacheable = compat.cacheable_group_ids(kv_cache_config)
    groups = tuple(
        _group(group.kv_cache_spec, index in cacheable) for index, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    if all(group.kind is GroupKind.SCRATCH for group in groups):
        raise no_stored_group()
    return LoadAdmission(CacheSpec(groups, chunk_unit(groups)), compat.max_in_flight_tokens(vllm_config))


def _group(spec: Any, is_cacheable: bool) -> GroupSpec:
    if not is_cacheable:
        return GroupSpec(GroupKind.SCRATCH, spec.block_size)
    spec = next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)
    # By class: a full-attention group may name a window and keep all its blocks.
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return GroupSpec(GroupKind.RECURRENT, spec.block_size)
    if kind in ("SlidingWindowSpec", "SlidingWindowMLASpec"):
        kept = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
        return GroupSpec(GroupKind.WINDOW, spec.block_size, window_tokens=kept)
    if kind == "ChunkedLocalAttentionSpec":
        return GroupSpec(GroupKind.CHUNKED, spec.block_size, align_tokens=spec.attention_chunk_size)
    return GroupSpec(GroupKind.FULL, spec.block_size)
