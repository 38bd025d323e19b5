"""A disk tier takes no blocks whose bytes another attention backend would order otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridkv.canonical import LayerLayout
from hybridkv.connectors.errors import ConfigurationError
from hybridkv.connectors.vllm.page_order import require_one_order

torch = pytest.importorskip("torch", reason="it makes the tensors of these tests")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="vLLM makes the layouts of these tests")
kv_cache_utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
KVCacheLayout = pytest.importorskip("vllm.v1.kv_cache_layout").KVCacheLayout

BLOCKS, TOKENS = 4, 16


def engine_view(order: str, kernel_tokens: int | None, num_heads: int = 2) -> torch.Tensor:
    """A layer's KV cache as vLLM's model runner makes it."""
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
    """What a block holds, in memory order, when each token of each head has a number of its own."""
    kernel_blocks = view.shape[0] // BLOCKS
    for part in range(view.shape[0]):
        for head in range(view.shape[1]):
            for token in range(view.shape[2]):
                number = (part % kernel_blocks) * view.shape[2] + token
                view[part, head, token] = part // kernel_blocks * 1000 + head * 100 + number
    mine = interface.group_kernel_blocks(view, BLOCKS)[block]
    dims = sorted(range(mine.dim()), key=lambda dim: -mine.stride(dim))
    return mine.permute(dims).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("kernel_tokens", [None, 4])
def test_refused_is_what_the_kernels_block_size_orders_otherwise_and_nothing_else(
    order: str, num_heads: int, kernel_tokens: int | None
) -> None:
    view = engine_view(order, kernel_tokens, num_heads)
    is_same = block_bytes(view, 2) == block_bytes(engine_view(order, None, num_heads), 2)
    layers = [LayerLayout("layer", 1)]
    if is_same:
        require_one_order({"layer": view}, layers, BLOCKS)
    else:
        with pytest.raises(ConfigurationError, match="VLLM_KV_CACHE_LAYOUT=NHD"):
            require_one_order({"layer": view}, layers, BLOCKS)
    assert is_same == (kernel_tokens is None or num_heads == 1 or order in ("LBNHC", "BLNHC"))


def test_of_a_split_tensor_in_another_shape_nothing_is_assumed() -> None:
    split = torch.zeros(2, BLOCKS * 2, TOKENS // 2, 2, 8)
    with pytest.raises(ConfigurationError, match="kernel blocks smaller"):
        require_one_order({"layer": split}, [LayerLayout("layer", 1, block_dim=1)], BLOCKS)
    require_one_order({"layer": split}, [LayerLayout("layer", 1, block_dim=1)], BLOCKS * 2)


def test_a_recurrent_state_has_no_kernel_blocks() -> None:
    require_one_order({"layer": [torch.zeros(BLOCKS, 3)]}, [LayerLayout("layer", 1)], BLOCKS)
