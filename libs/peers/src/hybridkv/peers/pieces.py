"""Conversion of an engine's tensors (shapes and strides) to the pieces of a description.

The caller gives the meaning of each dimension; this module does not guess from sizes. If tokens of a block are not
addressable, or the engine packs them in its own format, an item is at most one head of one kernel block and is opaque.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hybridkv.canonical.strides import LayoutError, Strides
from hybridkv.peers.description import Axis, Piece

Locate = Callable[[int], tuple[int, int]]
"""Maps an address to a registered region and the offset in this region."""


class AttentionDims(NamedTuple):
    """Meaning of the dimensions of a tensor.

    Args:
        block_dim: dimension of blocks or kernel blocks.
        head_dim: dimension of heads; None if there is none (latents).
        token_dim: dimension of tokens in a kernel block; None if tokens are not addressable.
        total_heads: heads of the model; 1 for latents, 0 if the bytes are not split by heads.
    """

    block_dim: int
    head_dim: int | None
    token_dim: int | None
    total_heads: int


def attention_piece(name: str, tensor: Strides, dims: AttentionDims, num_blocks: int, locate: Locate) -> Piece:
    """Piece of an attention layer.

    Dimensions that `dims` does not name form the item, except at most one outer dimension, such as separate K and V
    halves.

    Args:
        name: name of the layer, for errors.
        tensor: address, shape and strides. The block dimension may count several kernel blocks per block.
        dims: meaning of the tensor's dimensions.
        num_blocks: number of blocks in the engine's pool.
        locate: see `Locate`.

    Raises:
        LayoutError: the block dimension is not a multiple of `num_blocks`, or the bytes of a head and token are not
            contiguous.
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
        raise LayoutError(f"{name}: the bytes of a head are not contiguous: {tensor}")
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


def _axis(tensor: Strides, dim: int | None) -> Axis:
    if dim is None or tensor.shape[dim] == 1:
        return Axis()
    return Axis(tensor.shape[dim], tensor.strides[dim] * tensor.item_bytes)
