"""Byte order within a block that depends on the attention backend and on no fact of the fingerprint.

An attention backend may split the manager's blocks into smaller kernel blocks; the worker decides which. In a layout
with heads outside tokens, the same content then has another order in memory. It is always stored in the order of an
unsplit block, so that an engine with another backend can read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.errors import ConfigurationError

TOKEN_DIM = 2
"""Token dimension of vLLM's views of attention layers (blocks, heads, tokens, content), whatever the memory order."""


def with_token_dims(kv_caches: Mapping[str, KVCache], layers: Iterable[LayerLayout]) -> tuple[LayerLayout, ...]:
    """The same layers with `token_dim` set, if a tensor's shape tells which dimension counts tokens."""
    return tuple(
        layer._replace(token_dim=TOKEN_DIM) if has_token_dim(kv_caches.get(layer.name), layer) else layer
        for layer in layers
    )


def require_one_order(kv_caches: Mapping[str, KVCache], layers: Iterable[LayerLayout], num_blocks: int) -> None:
    """Refuses an engine with split blocks if the places of their tokens are unknown.

    Host memory does not need this check, as it ends with the engine; a disk does.

    Args:
        kv_caches: tensors that the engine registers.
        layers: layers with stored blocks.
        num_blocks: blocks of the block manager.

    Raises:
        ConfigurationError: kernel blocks are smaller than the manager's, in a tensor of an unknown shape.
    """
    for layer in layers:
        cache = kv_caches[layer.name]
        if not isinstance(cache, torch.Tensor) or cache.shape[layer.block_dim] <= num_blocks:
            continue
        # (blocks, tokens, content): tokens are outermost in a block, so a split does not change the order.
        if layer.token_dim is None and (cache.dim() != 3 or layer.block_dim != 0):
            raise ConfigurationError(
                "tiers[1]",
                "an engine with one order of bytes in its blocks",
                f"kernel blocks smaller than the manager's in a tensor of an unknown shape ({layer.name}: "
                f"{tuple(cache.shape)}, {num_blocks} blocks)",
                "another attention backend might read them wrongly from disk: use a block size that the backend does "
                "not split, or no disk tier",
            )


def has_token_dim(cache: KVCache | None, layer: LayerLayout) -> bool:
    """Whether a layer's tensor has the shape of vLLM's views of attention layers."""
    return isinstance(cache, torch.Tensor) and cache.dim() == 4 and layer.block_dim == 0
