"""KV memory of one rank, as the engine registers it: the pages of each stored group, for copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hybridkv.canonical import PAGE_ALIGN_BYTES, GroupPages, LayerLayout, TokenRange
from hybridkv.canonical.torch_view import (
    CanonicalKVCaches,
    KVCache,
    LayoutError,
    canonical_kv_caches,
    token_pages,
)
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.copies import page_order
from hybridkv.connectors.vllm.common.copies.devices import Device, zero_memory
from hybridkv.connectors.vllm.common.copies.lowering import GroupBlocks, Zeros
from hybridkv.connectors.vllm.common.specs import cuts
from hybridkv.transfer import CopyEngine

if TYPE_CHECKING:
    # The layout imports vLLM. Tests of a GPU's copies use this module without vLLM.
    from hybridkv.connectors.vllm.common.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Registered KV memory.

    Args:
        pages: pages of each stored group.
        cut: `GroupBlocks` of each group with blocks that chunks cut.
        zeros: tensor of zeros on the device of the KV caches.
        storages: memory that holds the pages: one tensor of bytes for each storage of torch.
    """

    pages: dict[int, GroupPages]
    cut: dict[int, GroupBlocks]
    zeros: Any
    storages: tuple[torch.Tensor, ...]

    def register(self, engines: Iterable[CopyEngine]) -> None:
        """Registers the memory with copy engines."""
        for engine in engines:
            engine.register(self.zeros.data_ptr(), self.zeros.nbytes, "zeros")
            for storage in self.storages:
                engine.register(storage.data_ptr(), storage.nbytes, "kv cache")


def take_kv_memory(
    layout: CacheLayout,
    kv_caches: Mapping[str, KVCache],
    num_blocks: int,
    device: Device,
    *,
    outlives_engine: bool,
) -> KVMemory:
    """Finds the pages of each stored group in the engine's KV tensors.

    Args:
        layout: the model's groups.
        kv_caches: the engine's tensors for each layer.
        num_blocks: blocks in the engine's pool.
        device: device of the copy engines.
        outlives_engine: whether another engine, maybe with another attention backend, may read the stored chunks.

    Raises:
        ConfigurationError: the tensors do not have the layout that the engine describes, are on another device, have an
            order of bytes that another engine might not have, or have blocks that chunks cut but that cannot be cut.
    """
    device.prepare(kv_caches)
    try:
        layers = [page_order.with_token_dims(kv_caches, group) for group in layout.layers]
        caches = canonical_kv_caches(kv_caches, layers, num_blocks)
        pages = {}
        for group_index in layout.spec.stored_groups:
            pages[group_index] = caches.pages(group_index)
            if outlives_engine:
                page_order.require_one_order(kv_caches, layers[group_index], num_blocks)
    except LayoutError as error:
        raise ConfigurationError(
            "kv_caches", "tensors as the engine describes them", str(error), "report the model and vLLM's version"
        ) from error
    cut = {
        group_index: _blocks(layout, group_index, pages[group_index], _part(kv_caches, layers[group_index], num_blocks))
        for group_index in layout.spec.cut_groups
    }
    return KVMemory(pages, cut, zero_memory(caches.tensors[0].tensor.device), _storages(caches))


def zeros_in(memory: Any) -> Zeros:
    """The usable part of a tensor of zeros."""
    # The ends are not used: a run at an end could be joined with a run in adjacent memory, and then span two
    # registrations.
    return Zeros(memory.data_ptr() + PAGE_ALIGN_BYTES, memory.nbytes - 2 * PAGE_ALIGN_BYTES)


def _part(
    kv_caches: Mapping[str, KVCache], layers: Sequence[LayerLayout], num_blocks: int
) -> Callable[[TokenRange], GroupPages]:
    return partial(token_pages, kv_caches, layers, num_blocks)


def _blocks(
    layout: CacheLayout, group_index: int, pages: GroupPages, part: Callable[[TokenRange], GroupPages]
) -> GroupBlocks:
    """Blocks of a group that chunks cut, after a check that they can be cut."""
    spec = layout.spec
    block_tokens = spec.groups[group_index].block_tokens
    blocks = GroupBlocks(pages, block_tokens, part)
    try:
        # One range is checked; the check holds for all.
        blocks.of(0, math.gcd(block_tokens, spec.chunk_tokens))
    except LayoutError as error:
        raise cuts.not_divisible(layout, group_index, str(error)) from error
    return blocks


def _storages(caches: CanonicalKVCaches) -> tuple[torch.Tensor, ...]:
    """Storages of the tensors, each once, as tensors of bytes."""
    storages = {}
    for cache in caches.tensors:
        storage = cache.tensor.untyped_storage()
        storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=cache.tensor.device).set_(storage)
    return tuple(storages.values())
