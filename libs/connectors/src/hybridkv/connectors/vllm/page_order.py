"""Whether the order of bytes in a block hangs on something that no fingerprint says.

An attention backend may split the manager's blocks into smaller ones for its kernels, and which does is settled in the
worker. Where heads lie outside of tokens, the same content then has another order of bytes. In host memory that does
no harm, for it ends with the engine; what lies on disk is read by engines with other backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.errors import ConfigurationError


def require_one_order(kv_caches: Mapping[str, KVCache], layers: Iterable[LayerLayout], num_blocks: int) -> None:
    """Refuses an engine whose blocks would be read wrongly by one with another attention backend.

    Args:
        kv_caches: as the engine registers them.
        layers: whose blocks are stored.
        num_blocks: of the block manager.

    Raises:
        ConfigurationError: kernel blocks are smaller than the manager's, and heads lie outside of tokens.
    """
    for layer in layers:
        cache = kv_caches[layer.name]
        if isinstance(cache, torch.Tensor) and _hangs_on_kernel_blocks(cache, layer.block_dim, num_blocks):
            raise ConfigurationError(
                "tiers[1]",
                "an engine whose blocks have one order of bytes",
                f"kernel blocks smaller than the manager's, heads before tokens ({layer.name}: {tuple(cache.shape)}, "
                f"stride {cache.stride()}, {num_blocks} blocks)",
                "another attention backend would read them wrongly from disk: start with VLLM_KV_CACHE_LAYOUT=NHD, "
                "with a block size that the backend does not split, or without the disk tier",
            )


def _hangs_on_kernel_blocks(cache: torch.Tensor, block_dim: int, num_blocks: int) -> bool:
    if cache.shape[block_dim] <= num_blocks:
        return False
    # Of (blocks, heads, tokens, content) it is known which dimension is which; of any other shape nothing is assumed.
    if cache.dim() != 4 or block_dim != 0:
        return True
    return cache.shape[1] > 1 and cache.stride(1) > cache.stride(2)
