"""Layouts that an engine may pass, as tensors with the caller's description.

The bytes of a block are found with torch's own indexing: the slice of the engine tensor in the order of its strides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridkv.canonical import LayerLayout
from hybridkv.canonical.torch_view import CanonicalKVCaches, canonical_kv_caches

BLOCKS = 6
BF16, F32, I8 = torch.bfloat16, torch.float32, torch.int8
FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """Engine tensors by layer, and the caller's description of them."""

    caches: dict[str, list[torch.Tensor]]
    groups: list[list[LayerLayout]]
    num_blocks: int = BLOCKS

    def build(self) -> CanonicalKVCaches:
        return canonical_kv_caches(
            {name: parts[0] if len(parts) == 1 else parts for name, parts in self.caches.items()},
            self.groups,
            self.num_blocks,
        )

    def slices(self, layer: LayerLayout, block: int) -> list[torch.Tensor]:
        """The engine's content of a layer for one block, as views of bytes in memory order."""
        found = []
        for tensor in self.caches[layer.name]:
            ratio = tensor.shape[0] // self.num_blocks
            part = tensor.narrow(0, block * ratio, ratio)
            order = sorted(range(part.dim()), key=lambda dim: -part.stride(dim))
            found.append(part.permute(order).view(torch.uint8))
        return found

    def engine_bytes(self, layer: LayerLayout, block: int) -> torch.Tensor:
        return torch.cat([part.flatten() for part in self.slices(layer, block)])

    def layers(self, group: int) -> list[LayerLayout]:
        """The group's layers, one per set of tensors."""
        return list({self.caches[layer.name][0].data_ptr(): layer for layer in reversed(self.groups[group])}.values())[
            ::-1
        ]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = BF16, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Zeros with this logical shape; dimensions in memory in `order`, outermost first."""
    order = order or tuple(range(len(shape)))
    memory = torch.zeros([shape[dim] for dim in order], dtype=torch.float32).to(dtype)
    return memory.permute([order.index(dim) for dim in range(len(shape))])


def one_layer(cache: torch.Tensor, num_blocks: int = BLOCKS) -> Case:
    page_bytes = cache.numel() * cache.element_size() // num_blocks
    return Case({"a": [cache]}, [[LayerLayout("a", page_bytes)]], num_blocks)


def padded(page: tuple[int, ...], stride_bytes: int, dtype: torch.dtype, at: int = 0) -> torch.Tensor:
    """Tensor (BLOCKS, *page) with pages `stride_bytes` apart."""
    width = torch.empty(0, dtype=dtype).element_size()
    storage = torch.zeros(BLOCKS * stride_bytes, dtype=torch.uint8).view(dtype)
    inner = torch.empty(page).stride()
    return storage.as_strided((BLOCKS, *page), (stride_bytes // width, *inner), at // width)


def packed(page_bytes: list[int], align: int = 64) -> Case:
    """Layers with pages of different sizes, block by block in one storage, as DeepSeek-V4 packs them."""
    starts = [sum(-(-size // align) * align for size in page_bytes[:i]) for i in range(len(page_bytes) + 1)]
    storage = torch.zeros(BLOCKS * starts[-1], dtype=I8)
    views = [
        storage.as_strided((BLOCKS, 1, size // 16, 16), (starts[-1], size, 16, 1), start)
        for size, start in zip(page_bytes, starts, strict=False)
    ]
    layers = [LayerLayout(f"l{i}", size) for i, size in enumerate(page_bytes)]
    return Case({layer.name: [view] for layer, view in zip(layers, views, strict=True)}, [layers[::2], layers[1::2]])


def heads_before_layers() -> Case:
    """Blocks that hold heads, and each head all layers."""
    memory = torch.zeros(BLOCKS, 3, 2, 16, 8, dtype=BF16)
    layers = [LayerLayout(f"l{i}", 3 * 16 * 8 * 2, interleaved=True) for i in range(2)]
    return Case({layer.name: [memory[:, :, i]] for i, layer in enumerate(layers)}, [layers])


def state_tensors(gap: int = 0) -> Case:
    """Convolution and SSM state in one padded storage."""
    storage = torch.zeros(BLOCKS * 1024, dtype=torch.uint8)
    conv = storage.view(BF16).as_strided((BLOCKS, 3, 32), (512, 32, 1))
    ssm = storage.view(F32).as_strided((BLOCKS, 2, 8, 8), (256, 64, 8, 1), (192 + gap) // 4)
    return Case({"s": [conv, ssm]}, [[LayerLayout("s", 192 + 512)]])


def overlaid_groups() -> Case:
    """Attention and a recurrent state of two groups in the same bytes."""
    storage = torch.zeros(BLOCKS * 1024, dtype=I8)
    attention = storage.view(BF16).view(BLOCKS, 2, 16, 16)
    state = storage.as_strided((BLOCKS, 1, 1, 700), (1024, 700, 700, 1))
    return Case({"a": [attention], "s": [state]}, [[LayerLayout("a", 1024)], [LayerLayout("s", 700)]])


def shared_tensor() -> Case:
    cache = tensor((BLOCKS, 2, 16, 8))
    return Case({"a": [cache], "b": [cache]}, [[LayerLayout("a", 512), LayerLayout("b", 512)]])


def split_in_two_tensors() -> Case:
    key, value = tensor((BLOCKS, 16, 2, 8)), tensor((BLOCKS, 16, 2, 8))
    return Case({"a": [key, value]}, [[LayerLayout("a", 1024)]])


CASES: dict[str, Callable[[], Case]] = {
    "split K/V in two tensors": split_in_two_tensors,
    "interleaved K/V, tokens before heads": lambda: one_layer(tensor((BLOCKS, 2, 16, 4, 8))),
    "interleaved K/V, heads before tokens": lambda: one_layer(tensor((BLOCKS, 2, 16, 4, 8), order=(0, 1, 3, 2, 4))),
    "[B,H,N,C], heads before tokens": lambda: one_layer(tensor((BLOCKS, 4, 16, 16))),
    "[B,H,N,C], tokens before heads": lambda: one_layer(tensor((BLOCKS, 4, 16, 16), order=(0, 2, 1, 3))),
    "[B,H,N,C], heads outside of blocks": lambda: one_layer(tensor((BLOCKS, 4, 16, 16), order=(1, 0, 2, 3))),
    "[B,H,N,C], kernel blocks": lambda: one_layer(tensor((BLOCKS * 4, 4, 4, 16), order=(0, 2, 1, 3))),
    "one block": lambda: one_layer(tensor((1, 4, 16, 16)), num_blocks=1),
    "latent (MLA), three dimensions": lambda: one_layer(tensor((BLOCKS, 16, 72))),
    "latent (MLA), kernel blocks": lambda: one_layer(tensor((BLOCKS * 2, 8, 72))),
    "latent (MLA), fp8 with scales": lambda: one_layer(tensor((BLOCKS, 16, 656), torch.uint8)),
    "fp8 e4m3": lambda: one_layer(tensor((BLOCKS, 4, 16, 16), FP8, order=(0, 2, 1, 3))),
    "fp8 e5m2": lambda: one_layer(tensor((BLOCKS, 4, 16, 16), torch.float8_e5m2)),
    "padded attention pages": lambda: Case(
        {"a": [padded((4, 16, 16), 4096, BF16)]}, [[LayerLayout("a", 4 * 16 * 16 * 2)]]
    ),
    "recurrent state, one packed tensor": lambda: Case(
        {"s": [padded((1, 1, 700), 1024, I8)]}, [[LayerLayout("s", 700)]]
    ),
    "recurrent state, tensors that follow each other": state_tensors,
    "recurrent state, tensors with a gap": lambda: state_tensors(gap=64),
    "packed layers of different pages": lambda: packed([1024, 144, 512, 16]),
    "heads before layers in a block": heads_before_layers,
    "groups that overlay the same bytes": overlaid_groups,
    "layers that share a tensor": shared_tensor,
}
