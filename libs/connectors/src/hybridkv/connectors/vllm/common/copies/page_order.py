"""Order of bytes within a block, as far as the attention backend determines it.

An attention backend may split the blocks of the block manager into smaller kernel blocks. If the memory layout has
heads before tokens, a split block has another order of bytes than an unsplit block with the same content. Chunks that
outlive the engine have the order of an unsplit block. So an engine with another backend can read these chunks, if
`identity_ignores` excludes the facts in which the two engines differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.errors import ConfigurationError

TOKEN_DIM = 2
"""Token dimension of vLLM's views of attention layers: (blocks, heads, tokens, content) with any order in memory."""


def with_token_dims(kv_caches: Mapping[str, KVCache], layers: Iterable[LayerLayout]) -> tuple[LayerLayout, ...]:
    """The same layers, with `token_dim` set for tensors in the shape of vLLM's views of attention layers."""
    return tuple(
        layer._replace(token_dim=TOKEN_DIM) if has_token_dim(kv_caches.get(layer.name)) else layer for layer in layers
    )


def require_one_order(kv_caches: Mapping[str, KVCache], layers: Iterable[LayerLayout], num_blocks: int) -> None:
    """Refuses an engine with split blocks if the order of tokens in these blocks is unknown.

    Tiers that end with the engine, such as host memory, do not need this check.

    Args:
        kv_caches: tensors that the engine registers.
        layers: layers with stored blocks.
        num_blocks: blocks of the block manager.

    Raises:
        ConfigurationError: kernel blocks are smaller than the block manager's, in a tensor of an unknown shape.
    """
    for layer in layers:
        cache = kv_caches[layer.name]
        if not isinstance(cache, torch.Tensor) or cache.shape[0] <= num_blocks:
            continue
        # In (blocks, tokens, content), tokens are outermost in a block, so a split does not change the order.
        if layer.token_dim is None and cache.dim() != 3:
            raise ConfigurationError(
                "block_size",
                "an engine with one order of bytes in its blocks",
                f"kernel blocks smaller than the manager's in a tensor of an unknown shape ({layer.name}: "
                f"{tuple(cache.shape)}, {num_blocks} blocks)",
                "another attention backend might read the stored bytes wrongly: use a block size that the backend does "
                "not split, or store in host memory only",
            )


def has_token_dim(cache: KVCache | None) -> bool:
    """Whether a layer's tensor has the shape of vLLM's views of attention layers."""
    return isinstance(cache, torch.Tensor) and cache.dim() == 4
