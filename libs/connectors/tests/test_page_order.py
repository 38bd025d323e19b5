"""Stored bytes of a block do not depend on the kernel blocks of an attention backend."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import canonical_kv_caches
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.common.copies.page_order import require_one_order, with_token_dims

torch = pytest.importorskip("torch", reason="it makes the tensors of these tests")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="vLLM makes the layouts of these tests")
kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
KVCacheLayout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout

BLOCKS, TOKENS = 4, 16


def engine_view(order: str, kernel_tokens: int | None, num_heads: int = 2) -> torch.Tensor:
    """KV cache of a layer as vLLM's model runner makes it."""
    layout = KVCacheLayout[order]
    spec = interface.FullAttentionSpec(block_size=TOKENS, num_kv_heads=num_heads, head_size=8, dtype=torch.bfloat16)
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=BLOCKS,
    )
    config = SimpleNamespace(cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None))
    group = interface.KVCacheGroupSpec(["layer"], spec)
    placed = kv_cache_utils.get_kv_cache_config_from_groups(config, [group], 1 << 30)
    (tensor,) = placed.kv_cache_tensors
    memory = torch.zeros(tensor.size, dtype=torch.int8)
    (view,) = interface.create_kv_cache_views(memory, spec, BLOCKS, layout, tensor, kernel_tokens)
    return view


def block_bytes(view: torch.Tensor, block: int) -> bytes:
    """Bytes of a block in memory order, with a unique number per token and head."""
    kernel_blocks = view.shape[0] // BLOCKS
    for part in range(view.shape[0]):
        for head in range(view.shape[1]):
            for token in range(view.shape[2]):
                number = (part % kernel_blocks) * view.shape[2] + token
                view[part, head, token] = part // kernel_blocks * 1000 + head * 100 + number
    mine = interface.group_kernel_blocks(view, BLOCKS)[block]
    dims = sorted(range(mine.dim()), key=lambda dim: -mine.stride(dim))
    return mine.permute(dims).contiguous().view(torch.uint8).numpy().tobytes()


def stored_bytes(view: torch.Tensor, block: int, layers: Sequence[LayerLayout]) -> bytes:
    """Stored bytes of a block."""
    caches = canonical_kv_caches({"layer": view}, [layers], BLOCKS)
    pages = [caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes] for ref in caches.group_data_refs[0]]
    return torch.cat(pages).numpy().tobytes()


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("kernel_tokens", [2, 4, 16])
def test_a_block_is_stored_in_one_order_for_any_kernel_blocks(order: str, num_heads: int, kernel_tokens: int) -> None:
    split, whole = (engine_view(order, size, num_heads) for size in (kernel_tokens, None))
    memory_orders = {block_bytes(view, 2) for view in (split, whole)}
    layers = [LayerLayout("layer", len(next(iter(memory_orders))))]
    known = with_token_dims({"layer": split}, layers)
    require_one_order({"layer": split}, known, BLOCKS)
    assert stored_bytes(split, 2, known) == stored_bytes(whole, 2, known) == block_bytes(whole, 2)
    # Without token dimensions the memory order is stored, which differs if heads are outside of tokens.
    assert (stored_bytes(split, 2, layers) == stored_bytes(whole, 2, layers)) == (len(memory_orders) == 1)


def test_a_split_tensor_of_unknown_shape_is_refused() -> None:
    split = torch.zeros(BLOCKS * 2, 2, TOKENS // 2, 2, 8)
    layers = with_token_dims({"layer": split}, [LayerLayout("layer", 1)])
    with pytest.raises(ConfigurationError, match="kernel blocks smaller") as caught:
        require_one_order({"layer": split}, layers, BLOCKS)
    assert caught.value.path == "block_size" and "host memory only" in caught.value.hint
    require_one_order({"layer": split}, layers, BLOCKS * 2)


def test_tokens_are_the_outermost_dimension_of_latent_attention() -> None:
    split = torch.zeros(BLOCKS * 2, TOKENS // 2, 72)
    require_one_order({"layer": split}, with_token_dims({"layer": split}, [LayerLayout("layer", 1)]), BLOCKS)


def test_a_recurrent_state_has_no_kernel_blocks() -> None:
    state = [torch.zeros(BLOCKS, 3)]
    require_one_order({"layer": state}, with_token_dims({"layer": state}, [LayerLayout("layer", 1)]), BLOCKS)
