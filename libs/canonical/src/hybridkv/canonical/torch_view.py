"""Canonical views of the engine's KV tensors: int8 of shape `(num_blocks, page_bytes)`, without copies.

The KV caches of engines have many shapes; a store needs only the bytes of each block. This is the only module of the
library that imports torch; `strides` does the arithmetic.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from hybridkv.canonical.pages import GroupPages, LayerLayout, PageRegion
from hybridkv.canonical.strides import (
    LayoutError,
    Strides,
    TokenRange,
    first_overlap,
    merge_adjacent,
    page_regions,
    region_end,
    token_regions,
)

__all__ = [
    "CanonicalKVCacheRef",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "KVCache",
    "LayoutError",
    "canonical_kv_caches",
    "token_pages",
]

KVCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheTensor:
    """View of one region of KV memory.

    Args:
        tensor: int8 of shape (num_blocks, page_size_bytes), a view of the engine's storage.
        page_size_bytes: bytes of the widest page of any group in this region.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """Reference of a group to a region.

    Args:
        tensor_idx: index of the region in `CanonicalKVCaches.tensors`.
        page_size_bytes: bytes of content in a page.
        layer_idx: index within the group of the layer that owns the page; the first one if layers share it. References
            of one layer are adjacent.
    """

    tensor_idx: int
    page_size_bytes: int
    layer_idx: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """All regions, each once, and the references of each group to them.

    Groups share regions if the engine assigns each block to one group at a time.
    """

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    def pages(self, group_index: int) -> GroupPages:
        """Pages of a group as numbers.

        Raises:
            LayoutError: the group has no layers, so no pages.
        """
        refs = self.group_data_refs[group_index]
        if not refs:
            raise LayoutError(f"group {group_index} has no layers, and so no pages")
        pages = [
            [self._region(ref) for ref in of_layer]
            for _, of_layer in itertools.groupby(refs, key=lambda ref: ref.layer_idx)
        ]
        return GroupPages(pages, self.tensors[refs[0].tensor_idx].tensor.shape[0])

    def _region(self, ref: CanonicalKVCacheRef) -> PageRegion:
        tensor = self.tensors[ref.tensor_idx].tensor
        return PageRegion(tensor.data_ptr(), tensor.stride(0), ref.page_size_bytes)


def canonical_kv_caches(
    kv_caches: Mapping[str, KVCache], groups: Sequence[Sequence[LayerLayout]], num_blocks: int
) -> CanonicalKVCaches:
    """Make views of the KV caches of all groups.

    Args:
        kv_caches: one or several tensors per layer (recurrent states, separate K and V), of rank 2 or more and any
            element type. The block dimension of the layer's `LayerLayout` counts blocks, or several kernel blocks per
            block. Other dimensions can have any meaning: a page is its bytes in memory order.
        groups: the layers of each group. A group without layers gets no views. Layers that share a tensor count once.
        num_blocks: blocks in the engine's pool.

    Raises:
        LayoutError: `num_blocks` is not positive, a layer is missing or is not a strided tensor, its size does not
            match `num_blocks` pages, `page_regions` refuses its layout, a group would contain a byte twice, or a view
            would exceed the storage.
    """
    if num_blocks <= 0:
        raise LayoutError(f"num_blocks must be positive, got {num_blocks}")
    used = [_group_regions(kv_caches, group, num_blocks) for group in groups]
    widest: dict[_PageBase, _LayerRegion] = {}
    for region in (use.region for group in used for use in group.values()):
        if region.base not in widest or region.pages.page_bytes > widest[region.base].pages.page_bytes:
            widest[region.base] = region
    index = {base: i for i, base in enumerate(widest)}
    return CanonicalKVCaches(
        tensors=tuple(
            CanonicalKVCacheTensor(region.view(num_blocks), region.pages.page_bytes) for region in widest.values()
        ),
        group_data_refs=tuple(
            tuple(
                CanonicalKVCacheRef(index[base], use.region.pages.page_bytes, use.layer_idx)
                for base, use in group.items()
            )
            for group in used
        ),
    )


def token_pages(
    kv_caches: Mapping[str, KVCache], layers: Sequence[LayerLayout], num_blocks: int, tokens: TokenRange
) -> GroupPages:
    """Pages of some tokens of every block of a group, as if blocks contained only these tokens.

    Args:
        kv_caches: KV caches that `canonical_kv_caches` accepts.
        layers: layers of the group, each with `token_dim`.
        num_blocks: blocks in the engine's pool.
        tokens: the tokens of each block.

    Raises:
        LayoutError: the tokens of a block cannot be addressed, or have unequal sizes.
        ValueError: there are no layers.
    """
    pages: list[list[PageRegion]] = []
    found: set[_PageBase] = set()
    for layer in layers:
        tensors = _tensors(layer, kv_caches[layer.name])
        regions = [(t.device, each) for t in tensors for each in token_regions(layer, _strides(t), num_blocks, tokens)]
        size = sum(region.page_bytes for _, region in regions)
        if layer.page_bytes % tokens.block_tokens or size != tokens.share_of(layer.page_bytes):
            raise LayoutError(
                f"{layer.name}: tokens {tokens.start} to {tokens.end} of {tokens.block_tokens} take {size} bytes of a "
                f"page of {layer.page_bytes}"
            )
        bases = [(device, region.address, region.stride_bytes) for device, region in regions]
        page = [region for base, (_, region) in zip(bases, regions, strict=True) if base not in found]
        found.update(bases)
        if page:
            pages.append(page)
    return GroupPages(pages, num_blocks)


_PageBase = tuple[torch.device, int, int]
"""Device, address and stride. Equal for two layers that share their pages."""


@dataclass(frozen=True, slots=True)
class _LayerRegion:
    layer_name: str
    storage: torch.UntypedStorage
    pages: PageRegion

    @property
    def base(self) -> _PageBase:
        return self.storage.device, self.pages.address, self.pages.stride_bytes

    def view(self, num_blocks: int) -> torch.Tensor:
        offset = self.pages.address - self.storage.data_ptr()
        return torch.empty(0, dtype=torch.int8, device=self.storage.device).set_(
            self.storage, offset, (num_blocks, self.pages.page_bytes), (self.pages.stride_bytes, 1)
        )


@dataclass(frozen=True, slots=True)
class _RegionUse:
    region: _LayerRegion
    layer_idx: int


def _group_regions(
    kv_caches: Mapping[str, KVCache], layers: Sequence[LayerLayout], num_blocks: int
) -> dict[_PageBase, _RegionUse]:
    found: dict[_PageBase, _RegionUse] = {}
    for layer_idx, layer in enumerate(layers):
        for region in _layer_regions(kv_caches, layer, num_blocks):
            same = found.get(region.base)
            if same is None:
                found[region.base] = _RegionUse(region, layer_idx)
            elif region.pages.page_bytes > same.region.pages.page_bytes:
                found[region.base] = _RegionUse(region, same.layer_idx)
    regions = [use.region for use in found.values()]
    if pair := first_overlap([region.pages for region in regions], num_blocks):
        names = sorted({regions[i].layer_name for i in pair})
        raise LayoutError(f"{' and '.join(names)}: a block of one group would contain the same bytes twice")
    return found


def _layer_regions(kv_caches: Mapping[str, KVCache], layer: LayerLayout, num_blocks: int) -> list[_LayerRegion]:
    cache = kv_caches.get(layer.name)
    if cache is None:
        raise LayoutError(f"{layer.name}: the engine registered no KV cache for this layer")
    tensors = _tensors(layer, cache)
    regions: list[_LayerRegion] = []
    for storage, parts in _by_storage(tensors):
        pages = [page for part in parts for page in _tensor_pages(layer, part, num_blocks)]
        regions += [_LayerRegion(layer.name, storage, page) for page in merge_adjacent(pages)]
    if pair := first_overlap([region.pages for region in regions], num_blocks):
        raise LayoutError(f"{layer.name}: a block holds the same bytes twice: {[regions[i].pages for i in pair]}")
    size = sum(region.pages.page_bytes for region in regions)
    if size != layer.page_bytes:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise LayoutError(f"{layer.name}: expected pages of {layer.page_bytes} bytes, got {size} from {shapes}")
    return regions


def _tensors(layer: LayerLayout, cache: KVCache) -> list[torch.Tensor]:
    """Tensors of a layer, after a check of their type. Each has a storage and strides."""
    if isinstance(cache, torch.Tensor):
        cache = [cache]
    if not isinstance(cache, Sequence) or isinstance(cache, str) or not cache:
        found = (
            f"an empty {type(cache).__name__}" if isinstance(cache, Sequence) and not cache else type(cache).__name__
        )
        raise LayoutError(f"{layer.name}: expected a tensor or a list of them, got {found}")
    for tensor in cache:
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"{layer.name}: expected tensors, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else tensor.layout
            raise LayoutError(f"{layer.name}: expected a strided tensor, got a {kind} one")
    return list(cache)


def _by_storage(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
    """Adjacent tensors of the same storage, grouped, in order."""
    found: list[tuple[torch.UntypedStorage, list[torch.Tensor]]] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if found and found[-1][0].data_ptr() == storage.data_ptr():
            found[-1][1].append(tensor)
        else:
            found.append((storage, [tensor]))
    return found


def _tensor_pages(layer: LayerLayout, tensor: torch.Tensor, num_blocks: int) -> list[PageRegion]:
    storage = tensor.untyped_storage()
    pages = page_regions(layer, _strides(tensor), num_blocks)
    for page in pages:
        if region_end(page, num_blocks) > storage.data_ptr() + storage.nbytes():
            raise LayoutError(
                f"{layer.name}: {num_blocks} pages from byte {page.address - storage.data_ptr()} "
                f"exceed the storage of {storage.nbytes()} bytes"
            )
    return pages


def _strides(tensor: torch.Tensor) -> Strides:
    width = tensor.element_size()
    address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * width
    return Strides(address, width, tuple(tensor.shape), tuple(tensor.stride()))
