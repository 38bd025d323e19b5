"""What all children share: the gate of loads, by the bytes that they fill and the blocks that their requests need, and
the boundaries at which prefills stop.

A child says how many tokens it loads, and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridkv.connectors.vllm import compat
from hybridkv.connectors.vllm.layout import group_specs, no_stored_group
from hybridkv.connectors.vllm.steering import Steering
from hybridkv.planner import CacheSpec, GroupKind, LoadAdmission, chunk_unit

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
    """Admits the loads of all children.

    Raises:
        ConfigurationError: the model has no group of which anything could be loaded, or one of unknown meaning: how
            many blocks a request needs of that nobody here can say, whoever loads it.
    """
    groups = group_specs(kv_cache_config)
    if all(group.kind is GroupKind.SCRATCH for group in groups):
        raise no_stored_group()
    return LoadAdmission(CacheSpec(groups, chunk_unit(groups)), compat.max_in_flight_tokens(vllm_config))


def shared_steering(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Steering | None:
    """Has all children's prefills stop where they wish; None for a model without states, of which nobody wishes any."""
    has_states = any(group.kind is GroupKind.RECURRENT for group in group_specs(kv_cache_config))
    return Steering(compat.most_chunk_tokens(vllm_config)) if has_states else None
