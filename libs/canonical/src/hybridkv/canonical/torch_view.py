"""The engine's KV tensors as canonical views: `(num_blocks, page_bytes)` bytes, nothing copied.

Engines hand over KV caches in many shapes; all that a store needs to know is where the bytes of one block lie. This is
the only module of the library that imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hybridkv.canonical.pages import GroupPages, LayerLayout, PageRegion

KVCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


class LayoutError(ValueError):
    """A KV tensor whose bytes cannot be addressed by block; nothing may be stored from it."""


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """A region of KV memory.

    Args:
        tensor: int8 of shape (num_blocks, page_size_bytes), a view of the engine's own storage.
        page_size_bytes: of the widest page that a group keeps there.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A group's use of a region: which one, and how many of a page's bytes are content."""

    tensor_idx: int
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """Every region once, and for each group the regions that it uses.

    Groups overlay the same regions where the engine lets a block belong to one group at a time.
    """

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    def pages(self, group_index: int) -> GroupPages:
        """Where the pages of a group lie, as plain numbers."""
        regions = []
        for ref in self.group_data_refs[group_index]:
            tensor = self.tensors[ref.tensor_idx].tensor
            regions.append(PageRegion(tensor.data_ptr(), tensor.stride(0), ref.page_size_bytes))
        return GroupPages(regions, self.tensors[self.group_data_refs[group_index][0].tensor_idx].tensor.shape[0])


def canonical_kv_caches(
    kv_caches: Mapping[str, KVCache], groups: Sequence[Sequence[LayerLayout]], num_blocks: int
) -> CanonicalKVCaches:
    """Views of the KV caches of all groups.

    Args:
        kv_caches: for each layer its tensor, logically [blocks, heads, tokens, content] or flatter, where the first
            dimension may count several kernel blocks for each block; or several such tensors (recurrent states).
        groups: for each group, its layers; a group without layers gets no views.
        num_blocks: blocks in the engine's pool.

    Raises:
        LayoutError: a layer is missing, its tensor has no place for `num_blocks` pages of its bytes, a block's bytes
            are not contiguous, or a view would leave the tensor's storage.
    """
    pieces = [[_layer_pieces(kv_caches, layer, num_blocks) for layer in group] for group in groups]
    widest: dict[tuple[int, int, int], _Piece] = {}
    for piece in (piece for group in pieces for layer in group for piece in layer):
        if piece.place not in widest or piece.page_bytes > widest[piece.place].page_bytes:
            widest[piece.place] = piece
    index = {place: i for i, place in enumerate(widest)}
    return CanonicalKVCaches(
        tensors=tuple(CanonicalKVCacheTensor(piece.view(num_blocks), piece.page_bytes) for piece in widest.values()),
        group_data_refs=tuple(
            tuple(CanonicalKVCacheRef(index[piece.place], piece.page_bytes) for layer in group for piece in layer)
            for group in pieces
        ),
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of bytes that every block has in one storage: a page, or one head's part of it."""

    storage: torch.UntypedStorage
    offset: int
    stride_bytes: int
    page_bytes: int

    @property
    def place(self) -> tuple[int, int, int]:
        return self.storage.data_ptr(), self.offset, self.stride_bytes

    def view(self, num_blocks: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int8, device=self.storage.device).set_(
            self.storage, self.offset, (num_blocks, self.page_bytes), (self.stride_bytes, 1)
        )


def _layer_pieces(kv_caches: Mapping[str, KVCache], layer: LayerLayout, num_blocks: int) -> list[_Piece]:
    cache = kv_caches.get(layer.name)
    if cache is None:
        raise LayoutError(f"{layer.name}: the engine registered no KV cache for this layer")
    tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
    pieces = [piece for tensor in tensors for piece in _tensor_pieces(layer.name, tensor, num_blocks)]
    found = sum(piece.page_bytes for piece in pieces)
    if found != layer.page_bytes:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise LayoutError(f"{layer.name}: expected pages of {layer.page_bytes} bytes, got {found} from {shapes}")
    return pieces


def _tensor_pieces(name: str, tensor: torch.Tensor, num_blocks: int) -> list[_Piece]:
    if tensor.dim() < 2 or tensor.shape[0] == 0 or tensor.shape[0] % num_blocks:
        raise LayoutError(f"{name}: expected {num_blocks} blocks or a multiple of them, got {tuple(tensor.shape)}")
    kernel_blocks = tensor.shape[0] // num_blocks
    # (size, stride) in elements of what one block holds, outermost first.
    inner = [(kernel_blocks, tensor.stride(0))] if kernel_blocks > 1 else []
    inner += list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    inner = sorted((dim for dim in inner if dim[0] > 1), key=lambda dim: -dim[1])
    block_stride = tensor.stride(0) * kernel_blocks
    # Dimensions that lie outside of the blocks (heads, in head-outermost layouts) make a region each.
    outer = [dim for dim in inner if dim[1] >= block_stride and num_blocks > 1]
    dense = 1
    for size, stride in reversed([dim for dim in inner if dim not in outer]):
        if stride != dense:
            raise LayoutError(
                f"{name}: the bytes of a block are not contiguous: shape {tuple(tensor.shape)}, "
                f"stride {tuple(tensor.stride())}"
            )
        dense *= size
    storage, width = tensor.untyped_storage(), tensor.element_size()
    offsets = [0]
    for size, stride in outer:
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    pieces = [
        _Piece(storage, (tensor.storage_offset() + offset) * width, block_stride * width, dense * width)
        for offset in offsets
    ]
    for piece in pieces:
        end = piece.offset + (num_blocks - 1) * piece.stride_bytes + piece.page_bytes
        if piece.page_bytes > piece.stride_bytes or end > storage.nbytes():
            raise LayoutError(f"{name}: {num_blocks} pages from byte {piece.offset} leave its {storage.nbytes()} bytes")
    return pieces
