"""Regions of a tensor's pages, computed from its shape and strides. No torch.

A page is its bytes in memory order. Each entry of a dimension that is not contiguous within a block (separate halves
for K and V, heads outside of blocks) is a region. If blocks are split into kernel blocks and `token_dim` is known, the
order of bytes is that of an unsplit block; parts that are not contiguous in that order are regions too.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hybridkv.canonical.pages import LayerLayout, PageRegion

MAX_REGIONS = 4096
"""Limit of the regions of one tensor in a kernel block. A tensor with more regions is not suitable for storage.
The number of kernel blocks per block has no limit."""


class LayoutError(ValueError):
    """KV tensors do not have the described layout, or their bytes cannot be addressed by block or token."""


class Strides(NamedTuple):
    """Address, shape and strides of a tensor.

    Args:
        address: address of the first element.
        item_bytes: bytes per element.
        shape: size of each dimension.
        strides: stride of each dimension, in elements.
    """

    address: int
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def page_regions(layer: LayerLayout, tensor: Strides, num_blocks: int) -> list[PageRegion]:
    """Regions of a tensor's pages, outermost dimension first.

    Args:
        layer: layout facts: the dimension of tokens, and whether pages can have gaps.
        tensor: tensor of the layer. Dimension 0 counts blocks, or several kernel blocks per block.
        num_blocks: blocks in the engine's pool.

    Raises:
        LayoutError: the size of dimension 0 is not a multiple of `num_blocks`, a page has gaps without
            `interleaved` or more than `MAX_REGIONS` regions, or blocks or regions share bytes.
    """
    inner, block_stride = _dims_of_block(layer, tensor, num_blocks)
    run, rest = _dense_end(inner)
    inside = [dim for dim in rest if num_blocks == 1 or dim[1] < block_stride]
    if inside and not layer.interleaved:
        raise LayoutError(
            f"{layer.name}: the bytes of a block are not contiguous: shape {tensor.shape}, stride {tensor.strides}; "
            "if bytes of other layers lie between them (BHLNC), set interleaved"
        )
    run, rest = _dense_end(_in_unsplit_order(layer, tensor, num_blocks, inner))
    split = (tensor.shape[0] // num_blocks, tensor.strides[0])
    if _count([dim for dim in rest if dim != split]) > MAX_REGIONS:
        raise LayoutError(f"{layer.name}: a page consists of more than {MAX_REGIONS} regions: {tensor}")
    regions = [
        PageRegion(
            tensor.address + offset * tensor.item_bytes, block_stride * tensor.item_bytes, run * tensor.item_bytes
        )
        for offset in _offsets(rest)
    ]
    _check_apart(layer, regions, num_blocks)
    return regions


class TokenRange(NamedTuple):
    """Tokens [start, end) of every block of `block_tokens`."""

    start: int
    end: int
    block_tokens: int

    def share_of(self, page_bytes: int) -> int:
        """Bytes of these tokens in a page of `page_bytes`.

        Raises:
            ValueError: `page_bytes` is not a multiple of the tokens per block.
        """
        if page_bytes % self.block_tokens:
            raise ValueError(f"{page_bytes} bytes are not a multiple of {self.block_tokens} tokens")
        return page_bytes // self.block_tokens * (self.end - self.start)


def token_regions(layer: LayerLayout, tensor: Strides, num_blocks: int, tokens: TokenRange) -> list[PageRegion]:
    """Regions of some tokens of every block, in the byte order of `page_regions`.

    Args:
        layer: layout facts, with `token_dim`.
        tensor: a tensor that `page_regions` accepts.
        num_blocks: blocks in the engine's pool.
        tokens: the tokens of each block.

    Raises:
        LayoutError: `token_dim` is None, the number of tokens per block differs, or there are too many regions. This
            does not depend on which tokens are selected.
    """
    inner, block_stride = _dims_of_block(layer, tensor, num_blocks)
    kernel_blocks = tensor.shape[0] // num_blocks
    dim = layer.token_dim
    if dim is None or (kernel_tokens := tensor.shape[dim]) * kernel_blocks != tokens.block_tokens:
        raise LayoutError(
            f"{layer.name}: expected a dimension that counts the {tokens.block_tokens} tokens of a block, "
            f"got {tensor.shape} with token_dim {dim}"
        )
    of_kernel, of_token = tensor.strides[0], tensor.strides[dim]
    if kernel_blocks > 1:
        inner = [each for each in inner if each != (kernel_blocks, of_kernel)]
    outer = [each for each in inner if each[1] > of_token]
    inside = [each for each in inner if each[1] < of_token]
    if _count(outer) * _count(_dense_end([(kernel_tokens, of_token), *inside])[1]) > MAX_REGIONS:
        raise LayoutError(f"{layer.name}: tokens consist of more than {MAX_REGIONS} regions: {tensor}")
    if of_kernel == kernel_tokens * of_token:
        kernel_tokens = tokens.block_tokens  # contiguous over all kernel blocks, as in an unsplit block
    regions = []
    for outer_offset in _offsets(outer):
        for offset, count in _token_runs(tokens, kernel_tokens, of_kernel, of_token):
            run, rest = _dense_end([(count, of_token), *inside])
            regions += [
                PageRegion(
                    tensor.address + (outer_offset + offset + inner_offset) * tensor.item_bytes,
                    block_stride * tensor.item_bytes,
                    run * tensor.item_bytes,
                )
                for inner_offset in _offsets(rest)
            ]
    return regions


def _token_runs(tokens: TokenRange, kernel_tokens: int, of_kernel: int, of_token: int) -> Iterator[tuple[int, int]]:
    """(offset within the block in elements, number of tokens) for each kernel block with some of the tokens."""
    start = tokens.start
    while start < tokens.end:
        kernel_block, first = divmod(start, kernel_tokens)
        count = min(tokens.end - start, kernel_tokens - first)
        yield kernel_block * of_kernel + first * of_token, count
        start += count


def _count(dims: Sequence[tuple[int, int]]) -> int:
    """Product of the sizes of some dimensions."""
    return math.prod(size for size, _ in dims)


def _offsets(dims: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets in elements of all entries of some dimensions, outermost first."""
    steps = [range(0, size * stride, stride) if stride else [0] * size for size, stride in dims]
    return [sum(offsets) for offsets in itertools.product(*steps)]


def _dense_end(inner: Sequence[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Length in elements of the contiguous innermost dimensions, and the remaining outer dimensions."""
    run, rest = 1, list(inner)
    while rest and rest[-1][1] == run:
        run *= rest.pop()[0]
    return run, rest


def _in_unsplit_order(
    layer: LayerLayout, tensor: Strides, num_blocks: int, inner: Sequence[tuple[int, int]]
) -> Sequence[tuple[int, int]]:
    """Dimensions in the order of an unsplit block: the dimension of kernel blocks directly before the tokens.

    Unchanged if there is one kernel block per block, or if `token_dim` is None.
    """
    kernel_blocks, kernel_stride = tensor.shape[0] // num_blocks, tensor.strides[0]
    if kernel_blocks == 1 or layer.token_dim is None:
        return inner
    split = (kernel_blocks, kernel_stride)
    others = list(inner)
    others.remove(split)
    place = sum(stride > tensor.strides[layer.token_dim] for _, stride in others)
    return [*others[:place], split, *others[place:]]


def _dims_of_block(layer: LayerLayout, tensor: Strides, num_blocks: int) -> tuple[list[tuple[int, int]], int]:
    """(size, stride) of the dimensions within a block, outermost first, and the stride of blocks; in elements."""
    dims = list(zip(tensor.shape, tensor.strides, strict=True))
    if len(dims) < 2 or dims[0][0] == 0 or dims[0][0] % num_blocks:
        raise LayoutError(
            f"{layer.name}: expected {num_blocks} blocks or a multiple of them in dimension 0, got {tensor.shape}"
        )
    kernel_blocks, kernel_stride = dims[0][0] // num_blocks, dims[0][1]
    dims[0] = (kernel_blocks, kernel_stride)
    inner = sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: -dim[1])
    block_stride = kernel_blocks * kernel_stride
    if num_blocks == 1:
        # The stride of a single block has no meaning; engines set any value.
        block_stride = max(block_stride, 1 + sum((size - 1) * stride for size, stride in inner))
    return inner, block_stride


def _check_apart(layer: LayerLayout, regions: Sequence[PageRegion], num_blocks: int) -> None:
    for region in regions:
        if not 0 < region.page_bytes <= region.stride_bytes:
            raise LayoutError(
                f"{layer.name}: blocks share bytes: pages of {region.page_bytes}, {region.stride_bytes} bytes apart"
            )
    if pair := first_overlap(regions, num_blocks):
        raise LayoutError(f"{layer.name}: a block holds the same bytes twice: {regions[pair[0]]}, {regions[pair[1]]}")


def region_end(region: PageRegion, num_blocks: int) -> int:
    """Address after the last page of a region."""
    return region.address + (num_blocks - 1) * region.stride_bytes + region.page_bytes


def first_overlap(regions: Sequence[PageRegion], num_blocks: int) -> tuple[int, int] | None:
    """Indexes of two regions that share a byte, or None. Pages of the same region are not compared."""
    order = sorted(range(len(regions)), key=lambda i: regions[i].address)
    addresses, strides, sizes = np.array([regions[i] for i in order], dtype=np.int64).reshape(-1, 3).T
    for at, i in enumerate(order):
        region = regions[i]
        behind = slice(at + 1, int(np.searchsorted(addresses, region_end(region, num_blocks))))
        # All regions of the same stride at once: there can be thousands. Two regions overlap if they share a byte after
        # a shift by k blocks. Only the smallest k that moves this page's end past the other's start is checked.
        ahead = addresses[behind] - region.address
        shifts = (ahead - region.page_bytes) // region.stride_bytes + 1
        shared = (np.abs(shifts) < num_blocks) & (shifts * region.stride_bytes < ahead + sizes[behind])
        for other in np.flatnonzero(shared | (strides[behind] != region.stride_bytes)) + at + 1:
            j = order[other]
            if region.stride_bytes == regions[j].stride_bytes or _share_a_byte(region, regions[j], num_blocks):
                return (i, j) if i < j else (j, i)
    return None


def _share_a_byte(a: PageRegion, b: PageRegion, num_blocks: int) -> bool:
    """True if two regions of different strides share a byte."""
    blocks = np.arange(num_blocks, dtype=np.int64)
    starts = a.address + blocks * a.stride_bytes
    others = b.address + blocks * b.stride_bytes
    # For each page of b: the last page of a that starts before its end.
    before = np.searchsorted(starts, others + b.page_bytes) - 1
    return bool(((before >= 0) & (starts[before] + a.page_bytes > others)).any())


def merge_adjacent(regions: Sequence[PageRegion]) -> list[PageRegion]:
    """Join each region that starts, in every block, at the end of the previous region, if both together fit the
    stride."""
    merged: list[PageRegion] = []
    for region in regions:
        last = merged[-1] if merged else None
        if last and last.stride_bytes == region.stride_bytes and last.address + last.page_bytes == region.address:
            page_bytes = last.page_bytes + region.page_bytes
            if page_bytes <= last.stride_bytes:
                merged[-1] = last._replace(page_bytes=page_bytes)
                continue
        merged.append(region)
    return merged
