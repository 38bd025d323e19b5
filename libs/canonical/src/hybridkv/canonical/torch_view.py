"""The engine's KV tensors as canonical views: `(num_blocks, page_bytes)` bytes, nothing copied.

Engines hand over KV caches in many shapes; all that a store needs to know is where the bytes of one block lie. This is
the only module of the library that imports torch; `strides` does its arithmetic.
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
    """A region of KV memory.

    Args:
        tensor: int8 of shape (num_blocks, page_size_bytes), a view of the engine's own storage.
        page_size_bytes: of the widest page that a group keeps there.
    """

    tensor: torch.Tensor
    page_size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCacheRef:
    """A group's use of a region.

    Args:
        tensor_idx: which one.
        page_size_bytes: how many of a page's bytes are content.
        layer_idx: the layer of the group whose page it belongs to, the first of those that share it. Uses by one layer
            follow each other.
    """

    tensor_idx: int
    page_size_bytes: int
    layer_idx: int


@dataclass(frozen=True, slots=True)
class CanonicalKVCaches:
    """Every region once, and for each group the regions that it uses.

    Groups overlay the same regions where the engine lets a block belong to one group at a time.
    """

    tensors: tuple[CanonicalKVCacheTensor, ...]
    group_data_refs: tuple[tuple[CanonicalKVCacheRef, ...], ...]

    def pages(self, group_index: int) -> GroupPages:
        """Where the pages of a group lie, as plain numbers.

        Raises:
            LayoutError: the group has no layers, and so no pages.
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
    """Views of the KV caches of all groups.

    Args:
        kv_caches: for each layer its tensor, or several (recurrent states, K and V apart). Of any rank from 2 on and
            any element type; the dimension that its `LayerLayout` names counts blocks, or several kernel blocks for
            each block. What else a dimension means does not matter: a page is its bytes in memory order.
        groups: for each group, its layers; a group without layers gets no views. Layers that share a tensor count once.
        num_blocks: blocks in the engine's pool.

    Raises:
        LayoutError: a layer is missing or has no plain tensor, its tensor has no place for `num_blocks` pages of its
            bytes, a block's bytes are not contiguous, a group would hold a byte twice, or a view would leave the
            tensor's storage.
    """
    if num_blocks <= 0:
        raise LayoutError(f"num_blocks must be positive, got {num_blocks}")
    used = [_group_regions(kv_caches, group, num_blocks) for group in groups]
    widest: dict[_PageBase, _Region] = {}
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
    """Where some tokens of every block of a group lie: its pages, as if blocks held nothing else.

    Args:
        kv_caches: as for `canonical_kv_caches`, which has found nothing wrong with them.
        layers: of the group, each with the dimension that counts tokens.
        num_blocks: blocks in the engine's pool.
        tokens: which of them.

    Raises:
        LayoutError: the tokens of a block cannot be told apart, or do not take equal parts of its page.
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
"""Device, address and stride: what two layers have in common when they keep their pages in the same place."""


@dataclass(frozen=True, slots=True)
class _Region:
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
class _Use:
    region: _Region
    layer_idx: int


def _group_regions(
    kv_caches: Mapping[str, KVCache], layers: Sequence[LayerLayout], num_blocks: int
) -> dict[_PageBase, _Use]:
    found: dict[_PageBase, _Use] = {}
    for layer_idx, layer in enumerate(layers):
        for region in _layer_regions(kv_caches, layer, num_blocks):
            same = found.get(region.base)
            if same is None:
                found[region.base] = _Use(region, layer_idx)
            elif region.pages.page_bytes > same.region.pages.page_bytes:
                found[region.base] = _Use(region, same.layer_idx)
    regions = [use.region for use in found.values()]
    if pair := first_overlap([region.pages for region in regions], num_blocks):
        names = sorted({regions[i].layer_name for i in pair})
        raise LayoutError(f"{' and '.join(names)}: a block of one group would hold the same bytes twice")
    return found


def _layer_regions(kv_caches: Mapping[str, KVCache], layer: LayerLayout, num_blocks: int) -> list[_Region]:
    cache = kv_caches.get(layer.name)
    if cache is None:
        raise LayoutError(f"{layer.name}: the engine registered no KV cache for this layer")
    tensors = _tensors(layer, cache)
    regions: list[_Region] = []
    for storage, parts in _by_storage(tensors):
        pages = [page for part in parts for page in _tensor_pages(layer, part, num_blocks)]
        regions += [_Region(layer.name, storage, page) for page in merge_adjacent(pages)]
    if pair := first_overlap([region.pages for region in regions], num_blocks):
        raise LayoutError(f"{layer.name}: a block holds the same bytes twice: {[regions[i].pages for i in pair]}")
    size = sum(region.pages.page_bytes for region in regions)
    if size != layer.page_bytes:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise LayoutError(f"{layer.name}: expected pages of {layer.page_bytes} bytes, got {size} from {shapes}")
    return regions


def _tensors(layer: LayerLayout, cache: KVCache) -> list[torch.Tensor]:
    """Of a layer, each of which has a storage and strides. What an engine hands over is not ours to trust."""
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
            raise LayoutError(f"{layer.name}: expected a tensor whose elements lie at strides, got a {kind} one")
    return list(cache)


def _by_storage(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
    """Neighbours that lie in one storage together, in order."""
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
                f"leave its {storage.nbytes()} bytes"
            )
    return pages


def _strides(tensor: torch.Tensor) -> Strides:
    width = tensor.element_size()
    address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * width
    return Strides(address, width, tuple(tensor.shape), tuple(tensor.stride()))
