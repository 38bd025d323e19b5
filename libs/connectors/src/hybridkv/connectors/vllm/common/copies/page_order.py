"""In which order a block keeps its bytes, where that hangs on something that no fingerprint says.

An attention backend may split the manager's blocks into smaller ones for its kernels, and which does is settled in the
worker. Where heads lie outside of tokens, the same content then lies in another order in memory. Stored it has one
order, that of a block which is not split, so that an engine with another backend may read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.errors import ConfigurationError

TOKEN_DIM = 2
"""Of vLLM's views of attention layers, (blocks, heads, tokens, content), whatever their order in memory."""


def with_token_dims(kv_caches: Mapping[str, KVCache], layers: Iterable[LayerLayout]) -> tuple[LayerLayout, ...]:
    """The same layers, with the dimension that counts tokens where a tensor's shape says which one does."""
    return tuple(
        layer._replace(token_dim=TOKEN_DIM) if has_token_dim(kv_caches.get(layer.name), layer) else layer
        for layer in layers
    )


def require_one_order(kv_caches: Mapping[str, KVCache], layers: Iterable[LayerLayout], num_blocks: int) -> None:
    """Refuses an engine of whose split blocks it is not known where their tokens lie.

    In host memory any order does no harm, for it ends with the engine; not so on disk.

    Args:
        kv_caches: as the engine registers them.
        layers: whose blocks are stored.
        num_blocks: of the block manager.

    Raises:
        ConfigurationError: kernel blocks are smaller than the manager's, in a tensor of an unknown shape.
    """
    for layer in layers:
        cache = kv_caches[layer.name]
        if not isinstance(cache, torch.Tensor) or cache.shape[layer.block_dim] <= num_blocks:
            continue
        # (blocks, tokens, content): tokens lie outside of all else.
        if layer.token_dim is None and (cache.dim() != 3 or layer.block_dim != 0):
            raise ConfigurationError(
                "tiers[1]",
                "an engine whose blocks have one order of bytes",
                f"kernel blocks smaller than the manager's in a tensor of an unknown shape ({layer.name}: "
                f"{tuple(cache.shape)}, {num_blocks} blocks)",
                "another attention backend might read them wrongly from disk: use a block size that the backend does "
                "not split, or no disk tier",
            )


def has_token_dim(cache: KVCache | None, layer: LayerLayout) -> bool:
    """Whether a layer's tensor has the shape of vLLM's views of attention layers."""
    return isinstance(cache, torch.Tensor) and cache.dim() == 4 and layer.block_dim == 0
