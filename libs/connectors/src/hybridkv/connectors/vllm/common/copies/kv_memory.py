"""One rank's KV memory, as its engine hands it over: where pages of each stored group lie, for whoever copies them."""

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
    # It needs vLLM; a GPU's copies are proven on machines without it, too.
    from hybridkv.connectors.vllm.common.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class KVMemory:
    """What was handed over.

    Args:
        pages: of each stored group.
        cut: groups whose blocks chunks cut.
        zeros: a tensor of zeros beside the KV caches.
        storages: each piece of memory that the pages lie in, as a tensor of bytes.
    """

    pages: dict[int, GroupPages]
    cut: dict[int, GroupBlocks]
    zeros: Any
    storages: tuple[torch.Tensor, ...]

    def register(self, engines: Iterable[CopyEngine]) -> None:
        """Let copies touch it."""
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
    """Takes the engine's KV tensors.

    Args:
        layout: the model's groups.
        kv_caches: for each layer what the engine registered.
        num_blocks: of the engine's pool.
        device: that the copy engines were made for.
        outlives_engine: whether an engine with another attention backend may read what is stored.

    Raises:
        ConfigurationError: their bytes are not where the engine's own description says, or not on this device, or
            in an order that an engine which reads them later might not have.
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
    """What of a tensor of zeros may be copied from."""
    # Its ends are not used: beside other memory a run might be joined to one there, and lie in two registrations.
    return Zeros(memory.data_ptr() + PAGE_ALIGN_BYTES, memory.nbytes - 2 * PAGE_ALIGN_BYTES)


def _part(
    kv_caches: Mapping[str, KVCache], layers: Sequence[LayerLayout], num_blocks: int
) -> Callable[[TokenRange], GroupPages]:
    return partial(token_pages, kv_caches, layers, num_blocks)


def _blocks(
    layout: CacheLayout, group_index: int, pages: GroupPages, part: Callable[[TokenRange], GroupPages]
) -> GroupBlocks:
    """Of a group that chunks cut, once it is certain that they can."""
    spec = layout.spec
    block_tokens = spec.groups[group_index].block_tokens
    blocks = GroupBlocks(pages, block_tokens, part)
    try:
        # Of any tokens it is as certain as of the first.
        blocks.of(0, math.gcd(block_tokens, spec.chunk_tokens))
    except LayoutError as error:
        raise cuts.not_divisible(layout, group_index, str(error)) from error
    return blocks


def _storages(caches: CanonicalKVCaches) -> tuple[torch.Tensor, ...]:
    """Each once."""
    storages = {}
    for cache in caches.tensors:
        storage = cache.tensor.untyped_storage()
        storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=cache.tensor.device).set_(storage)
    return tuple(storages.values())
