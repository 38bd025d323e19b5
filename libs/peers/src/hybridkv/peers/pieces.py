"""From an engine's tensors, as numbers, to the pieces of a description.

What a dimension means is said by the caller, never guessed from its size. Where tokens of a block cannot be told apart,
or an engine packs them its own way, a piece is a kernel block of one head at most, and nothing within is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hybridkv.canonical.pages import LayerLayout
from hybridkv.canonical.strides import LayoutError, Strides, page_regions
from hybridkv.peers.description import Axis, Piece

Locate = Callable[[int], tuple[int, int]]
"""From an address to the registered region that it lies in, and the offset there."""


class AttentionDims(NamedTuple):
    """Which dimension of a tensor is which.

    Args:
        block_dim: counts blocks, or kernel blocks.
        head_dim: counts heads; None where there are none (latents).
        token_dim: counts the tokens of a kernel block; None where they cannot be told apart.
        total_heads: of the model; 1 for latents, 0 where bytes are not to be split by heads.
    """

    block_dim: int
    head_dim: int | None
    token_dim: int | None
    total_heads: int


def attention_piece(name: str, tensor: Strides, dims: AttentionDims, num_blocks: int, locate: Locate) -> Piece:
    """The piece of an attention layer. What `dims` does not name is the item, but for one dimension at most that lies
    outside of it, as K and V in halves of their own do.

    Args:
        name: of the layer, for errors.
        tensor: its block dimension counts several kernel blocks for each block, maybe.
        dims: what its dimensions mean.
        num_blocks: of the engine's pool.
        locate: see `Locate`.

    Raises:
        LayoutError: the block dimension is not a multiple of `num_blocks`, or a head's bytes of a token do not lie
            together.
    """
    shape, strides = tensor.shape, tensor.strides
    width = tensor.item_bytes
    blocks = shape[dims.block_dim]
    if blocks % num_blocks or not blocks:
        raise LayoutError(f"{name}: expected a multiple of {num_blocks} blocks in dimension {dims.block_dim}: {tensor}")
    named = {dims.block_dim, dims.head_dim, dims.token_dim}
    inner = [(shape[i], strides[i]) for i in range(len(shape)) if i not in named and shape[i] != 1]
    run = 1
    outer = []
    for size, stride in sorted(inner, key=lambda dim: dim[1]):
        if stride == run:
            run *= size
        else:
            outer.append((size, stride))
    if len(outer) > 1:
        raise LayoutError(f"{name}: the bytes of a head do not lie together: {tensor}")
    rows = Axis(outer[0][0], outer[0][1] * width) if outer else Axis()
    kernels = blocks // num_blocks
    region, offset = locate(tensor.address)
    return Piece(
        region=region,
        offset_bytes=offset,
        block_stride_bytes=kernels * strides[dims.block_dim] * width,
        item_bytes=run * width,
        heads=_axis(tensor, dims.head_dim),
        kernels=Axis(kernels, strides[dims.block_dim] * width) if kernels > 1 else Axis(),
        units=_axis(tensor, dims.token_dim),
        rows=rows,
        total_heads=dims.total_heads,
    )


def opaque_pieces(layer: LayerLayout, tensor: Strides, num_blocks: int, locate: Locate) -> tuple[Piece, ...]:
    """The pieces of a layer of which nothing is known but where its blocks lie: a state, a packed or a quantised page.

    Each region of `canonical.page_regions` is one. They move whole, between ranks that are the same on both sides.

    Raises:
        LayoutError: see `page_regions`.
    """
    pieces = []
    for region in page_regions(layer, tensor, num_blocks):
        where, offset = locate(region.address)
        pieces.append(Piece(where, offset, region.stride_bytes, region.page_bytes))
    return tuple(pieces)


def _axis(tensor: Strides, dim: int | None) -> Axis:
    if dim is None or tensor.shape[dim] == 1:
        return Axis()
    return Axis(tensor.shape[dim], tensor.strides[dim] * tensor.item_bytes)
