"""Parts of a page that a peer can address: tokens and heads if their order is known, else only the whole page.

A tensor's shape does not show the order. An attention backend may pack the tokens of a block in its own order, as the
CPU backend does within a head. So only backends of `cuts.DIVISIBLE_BACKENDS` have addressable tokens, and only backends
of this set and of `HEADS_APART_BACKENDS` have addressable heads. States are arrays (`state_arrays`). Pages with
padding, quantised pages, and all untested kinds move whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridkv.canonical import LayerLayout, LayoutError, Strides
from hybridkv.canonical.torch_view import KVCache
from hybridkv.connectors.vllm.common import compat
from hybridkv.connectors.vllm.common.copies import page_order
from hybridkv.connectors.vllm.common.identity.worker_facts import element_order
from hybridkv.connectors.vllm.common.layout import CacheLayout, layer_spec
from hybridkv.connectors.vllm.common.specs import cuts
from hybridkv.peers.description import Axis, Piece
from hybridkv.peers.pieces import AttentionDims, Locate, attention_piece
from hybridkv.peers.ranks import head_share

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

CHANNELS_OUTERMOST = "DS"
FACTS_IN_ARRAYS = frozenset({"shapes", "num_heads"})
"""Facts of a recurrent layer that its format text omits. The facts depend on the number of ranks; pieces show them."""


class StateArray(NamedTuple):
    """Array of a recurrent state, or a part of such an array.

    Args:
        offset_bytes: offset in the page.
        item_bytes: size of an item; both sides have the bytes of an item in the same order.
        heads: axis that is split over ranks: heads or channels.
        rows: second axis of each head: steps of a convolution's state.
        total_heads: heads of all ranks; 0 if ranks do not split them in order.
    """

    offset_bytes: int
    item_bytes: int
    heads: Axis
    rows: Axis = Axis()
    total_heads: int = 0


def state_arrays(spec: KVCacheSpec, conv_layout: str, tp_size: int) -> tuple[StateArray, ...]:
    """Arrays in a page of a recurrent layer, in order. Empty if the arrays are unknown; then the page moves whole.

    Args:
        spec: KV cache spec of the layer.
        conv_layout: layout of convolution states in the worker, "SD" or "DS".
        tp_size: number of ranks of this engine.
    """
    if type(spec).__name__ != "MambaSpec":
        return ()
    kind, shapes = str(getattr(spec.mamba_type, "name", "")), [tuple(shape) for shape in spec.shapes]
    if [len(shape) for shape in shapes] not in _DIMENSIONS.get(kind, ()):
        return ()
    shares = 0 if kind == "MAMBA2" or spec.tp_replicated else tp_size
    widths = [_width(dtype) for dtype in spec.dtypes]
    if kind == "LINEAR":
        return (_heads(0, shapes[0], widths[0], shares),)
    channels = _channels(kind, shapes, conv_layout)
    if not channels or min(channels) <= 0:
        return ()
    arrays = _convolution(channels, shapes[0], widths[0], conv_layout, shares)
    if len(shapes) > 1:
        arrays.append(_heads(math.prod(shapes[0]) * widths[0], shapes[1], widths[1], shares))
    return tuple(arrays)


_DIMENSIONS = {
    "GDN_ATTN": ([2, 3],),
    "MAMBA1": ([2, 2],),
    # Groups of channels may span ranks, which the shapes do not show. So `total_heads` is 0: only engines with the
    # same number of ranks exchange these states.
    "MAMBA2": ([2, 3],),
    "SHORT_CONV": ([2],),
    "LINEAR": ([3],),
}
"""Number of dimensions of each array, by kind. The order of other arrays is unknown."""


def _channels(kind: str, shapes: list[tuple[int, ...]], conv_layout: str) -> tuple[int, ...]:
    """Channels of the convolution, in runs that ranks split separately. GDN_ATTN: queries, keys, values."""
    total = shapes[0][0] if conv_layout == CHANNELS_OUTERMOST else shapes[0][1]
    if kind != "GDN_ATTN":
        return (total,)
    of_values = shapes[1][0] * shapes[1][1]
    of_keys, rest = divmod(total - of_values, 2)
    return () if rest else (of_keys, of_keys, of_values)


def _convolution(
    channels: tuple[int, ...], shape: tuple[int, ...], width: int, conv_layout: str, shares: int
) -> list[StateArray]:
    is_channels_outermost = conv_layout == CHANNELS_OUTERMOST
    steps = shape[1] if is_channels_outermost else shape[0]
    across, along = (steps * width, width) if is_channels_outermost else (width, sum(channels) * width)
    arrays, first = [], 0
    for count in channels:
        arrays.append(StateArray(first * across, width, Axis(count, across), Axis(steps, along), count * shares))
        first += count
    return arrays


def _heads(offset_bytes: int, shape: tuple[int, ...], width: int, shares: int) -> StateArray:
    item_bytes = math.prod(shape[1:]) * width
    return StateArray(offset_bytes, item_bytes, Axis(shape[0], item_bytes), total_heads=shape[0] * shares)


def _width(dtype: torch.dtype) -> int:
    return int(dtype.itemsize)


def state_pieces(
    arrays: tuple[StateArray, ...], address: int, block_stride_bytes: int, locate: Locate
) -> tuple[Piece, ...]:
    """Pieces of a layer. `address` is the start of the page of block 0."""
    region, offset_bytes = locate(address)
    return tuple(
        Piece(
            region=region,
            offset_bytes=offset_bytes + array.offset_bytes,
            block_stride_bytes=block_stride_bytes,
            item_bytes=array.item_bytes,
            heads=array.heads,
            rows=array.rows,
            total_heads=array.total_heads,
        )
        for array in arrays
    )


HEADS_APART_BACKENDS = frozenset({"CPU_ATTN"})
"""Attention backends that store a head's K and V of a kernel block contiguously, in the backend's own order."""
SHARED_SPECS = frozenset({"MLAAttentionSpec"})
"""Exact spec classes with equal pages on every rank: latents, which are not split over ranks."""
BLOCK_DIM, HEAD_DIM, TOKEN_DIM = 0, 1, page_order.TOKEN_DIM
FACTS_IN_HEADS = frozenset({"num_kv_heads"})
"""Facts of an attention layer that its format text omits. The facts depend on the number of ranks; pieces show them."""


class PageOrder(NamedTuple):
    """Order of bytes in a layer's pages, as far as the tensor does not show it.

    Args:
        backend: attention backend; its name stands for the order of packed tokens.
        tokens_apart: True if tokens follow each other and have equal sizes.
        heads_addressable: True if a peer can address a head: in each token if `tokens_apart`, else in each kernel
            block, where the head's bytes are contiguous.
        is_shared: True if all ranks have the same bytes.
        num_heads: heads on this rank.
        total_heads: heads of the model; 0 if unknown.
        block_tokens: block size in tokens.
        state: arrays in a page of a recurrent layer; empty if unknown.
    """

    backend: str
    tokens_apart: bool
    heads_addressable: bool
    is_shared: bool
    num_heads: int
    total_heads: int
    block_tokens: int
    state: tuple[StateArray, ...] = ()


class LayerParts(NamedTuple):
    """Parts of a layer's description; see `LayerDescription`.

    Args:
        item_format: beginning of the format text; the layer's facts follow.
        pieces: pieces of the layer.
        covered_facts: names of facts that the format text omits, because the pieces show them.
    """

    item_format: str
    pieces: tuple[Piece, ...]
    covered_facts: frozenset[str] = frozenset()


def page_orders(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: CacheLayout) -> dict[str, PageOrder]:
    """Page order of each layer that peers may read. Only a worker has the attention backends."""
    built = compat.layers(vllm_config)
    found = {}
    for group, layers in zip(kv_cache_config.kv_cache_groups, layout.layers, strict=True):
        for layer in layers:
            spec = layer_spec(group, layer.name)
            found[layer.name] = _page_order(vllm_config, spec, cuts.backend_name(built.get(layer.name)), layer)
    return found


def _page_order(vllm_config: VllmConfig, spec: KVCacheSpec, backend: str, layer: LayerLayout) -> PageOrder:
    is_plain = cuts.is_divisible(spec, layer.page_bytes) and getattr(spec, "num_head_slots", None) is None
    tokens_apart = is_plain and backend in cuts.DIVISIBLE_BACKENDS
    heads_addressable = is_plain and (tokens_apart or backend in HEADS_APART_BACKENDS)
    arrays = state_arrays(spec, compat.conv_state_layout(), vllm_config.parallel_config.tensor_parallel_size)
    num_heads = int(getattr(spec, "num_kv_heads", 0))
    total_heads = _total_heads(vllm_config, num_heads) if heads_addressable else 0
    is_shared = type(spec).__name__ in SHARED_SPECS
    return PageOrder(
        backend, tokens_apart, heads_addressable, is_shared, num_heads, total_heads, spec.block_size, arrays
    )


def _total_heads(vllm_config: VllmConfig, num_heads: int) -> int:
    """Heads of the model if this layer has its share of them, else 0: some layers have other head counts."""
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    share = head_share(total, vllm_config.parallel_config.tensor_parallel_size, 0) if total > 0 else None
    return total if share is not None and share.num_heads == num_heads else 0


def layer_parts(
    layer: LayerLayout, cache: KVCache, order: PageOrder | None, num_blocks: int, locate: Locate
) -> LayerParts | None:
    """Describes a layer by parts of its pages; None if its pages must move whole.

    Args:
        layer: canonical layout of the layer.
        cache: tensors that the engine registers.
        order: order of bytes in the layer's pages.
        num_blocks: blocks in the engine's pool.
        locate: see `Locate`.
    """
    if order is None or num_blocks < 2 or not isinstance(cache, torch.Tensor):
        return None
    if order.state:
        return _state_parts(layer, cache, order.state, num_blocks, locate)
    if not order.heads_addressable:
        return None
    if not page_order.has_token_dim(cache) or cache.shape[HEAD_DIM] != order.num_heads:
        return None
    if cache.shape[BLOCK_DIM] * cache.shape[TOKEN_DIM] != num_blocks * order.block_tokens:
        return None
    dims = AttentionDims(BLOCK_DIM, HEAD_DIM, TOKEN_DIM if order.tokens_apart else None, order.total_heads)
    try:
        piece = attention_piece(layer.name, strides_of(cache), dims, num_blocks, locate)
    except (LayoutError, ValueError):
        # A piece cannot describe this layout of heads and tokens, so pages move whole.
        return None
    if piece.page_bytes != layer.page_bytes or (not order.tokens_apart and piece.rows.count != 1):
        return None
    packing = "one token after another" if order.tokens_apart else f"a head's tokens as {order.backend} packs them"
    return LayerParts(f"{str(cache.dtype).removeprefix('torch.')}; {packing}", (piece,), FACTS_IN_HEADS)


def _state_parts(
    layer: LayerLayout, cache: torch.Tensor, arrays: tuple[StateArray, ...], num_blocks: int, locate: Locate
) -> LayerParts | None:
    """Describes the arrays of a recurrent layer. None if the layer's tensor is not pages of bytes."""
    view = strides_of(cache)
    is_pages = cache.shape[BLOCK_DIM] == num_blocks and all(size == 1 for size in cache.shape[1:-1])
    if not is_pages or view.item_bytes != 1 or cache.shape[-1] < layer.page_bytes or view.strides[-1] != 1:
        return None
    pieces = state_pieces(arrays, view.address, view.strides[BLOCK_DIM], locate)
    if sum(piece.page_bytes for piece in pieces) != layer.page_bytes:
        return None
    return LayerParts("a state's arrays by element", pieces, FACTS_IN_ARRAYS)


def whole_format(cache: KVCache, is_state: bool) -> str:
    """Format text of pages that move whole: the known order of their bytes."""
    convolutions = f"; convolutions {compat.conv_state_layout()}" if is_state else ""
    return f"whole; {element_order(cache)}{convolutions}"


def strides_of(tensor: Any) -> Strides:
    """Address, shape and strides of a tensor."""
    width = tensor.element_size()
    address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * width
    return Strides(address, width, tuple(tensor.shape), tuple(tensor.stride()))


def locator(regions: Sequence[tuple[int, int]]) -> Locate:
    """Returns a function that maps an address to a region's number and an offset. A region is an address and a size."""

    def locate(address: int) -> tuple[int, int]:
        for number, (start, num_bytes) in enumerate(regions):
            if start <= address < start + num_bytes:
                return number, address - start
        raise LayoutError(f"address {address} is not in any allocation")

    return locate
