"""Which parts of a page a peer may address: tokens and heads where their order is known, else nothing but the whole.

What a tensor's shape says is not enough. An attention backend may pack the tokens of its block its own way, as that of
CPUs does with a head's; so tokens are told apart for backends of `cuts.DIVISIBLE_BACKENDS` alone, and heads for those
and `HEADS_APART_BACKENDS`. States are arrays (`state_parts`). Packed and quantised pages, and whatever nobody here has
tried, move whole.
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
"""Facts of a layer that its arrays say, for all ranks together."""


class StateArray(NamedTuple):
    """An array of a state, or a part of one.

    Args:
        offset_bytes: within the page.
        item_bytes: that both sides keep in one order.
        heads: what ranks share out: heads, or channels.
        rows: what each of these has several of: steps that a convolution looks back.
        total_heads: over all ranks; 0 where ranks do not share them out in order.
    """

    offset_bytes: int
    item_bytes: int
    heads: Axis
    rows: Axis = Axis()
    total_heads: int = 0


def state_arrays(spec: KVCacheSpec, conv_layout: str, tp_size: int) -> tuple[StateArray, ...]:
    """What a page of this layer holds, in order; nothing where that is not known, so that it is moved whole.

    Args:
        spec: of the layer.
        conv_layout: "SD" or "DS", as the worker has it.
        tp_size: ranks of this engine.
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
    # Groups of channels may lie on several ranks, of which the shapes say nothing: so it is not split.
    "MAMBA2": ([2, 3],),
    "SHORT_CONV": ([2],),
    "LINEAR": ([3],),
}
"""Of each array. Others of the same kind keep more, in an order of their own."""


def _channels(kind: str, shapes: list[tuple[int, ...]], conv_layout: str) -> tuple[int, ...]:
    """Of the convolution, in runs that are shared out each by itself: queries, keys and values have one each."""
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
    """The pieces of a layer whose page of block 0 begins at an address."""
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
"""Attention backends that keep a head's K and V of a kernel block in a row, in an order of their own."""
SHARED_SPECS = frozenset({"MLAAttentionSpec"})
"""Exact classes whose pages are the same on every rank: latents, which no rank has a part of."""
BLOCK_DIM, HEAD_DIM, TOKEN_DIM = 0, 1, page_order.TOKEN_DIM
FACTS_IN_HEADS = frozenset({"num_kv_heads"})
"""Facts of a layer that a piece of heads says, for all ranks together."""


class PageOrder(NamedTuple):
    """What is known of a layer's pages besides its tensor.

    Args:
        backend: of its attention; it names the order where tokens are packed.
        tokens_apart: one token after another, each of as many bytes.
        heads_apart: one head's bytes of a kernel block never lie between another's of the same token.
        is_shared: every rank has the same bytes.
        num_heads: on this rank.
        total_heads: of the model; 0 where that is not known.
        block_tokens: of a block.
        state: of a recurrent layer, the arrays of its page; nothing where they are not known.
    """

    backend: str
    tokens_apart: bool
    heads_apart: bool
    is_shared: bool
    num_heads: int
    total_heads: int
    block_tokens: int
    state: tuple[StateArray, ...] = ()


class LayerParts(NamedTuple):
    """How a layer is described: see `LayerDescription`.

    Args:
        item_format: what the tensor says of it; the layer's facts follow.
        pieces: of the layer.
        said: names of its facts that the pieces say already, for all ranks together.
    """

    item_format: str
    pieces: tuple[Piece, ...]
    covered_facts: frozenset[str] = frozenset()


def page_orders(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: CacheLayout) -> dict[str, PageOrder]:
    """What is known of the pages of every layer that peers may read, in the worker: there its backend is known."""
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
    heads_apart = is_plain and (tokens_apart or backend in HEADS_APART_BACKENDS)
    arrays = state_arrays(spec, compat.conv_state_layout(), vllm_config.parallel_config.tensor_parallel_size)
    num_heads = int(getattr(spec, "num_kv_heads", 0))
    total_heads = _total_heads(vllm_config, num_heads) if heads_apart else 0
    is_shared = type(spec).__name__ in SHARED_SPECS
    return PageOrder(backend, tokens_apart, heads_apart, is_shared, num_heads, total_heads, spec.block_size, arrays)


def _total_heads(vllm_config: VllmConfig, num_heads: int) -> int:
    """Of the model, if this layer has its share of them. Layers of some models have other numbers of heads."""
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    share = head_share(total, vllm_config.parallel_config.tensor_parallel_size, 0) if total > 0 else None
    return total if share is not None and share.num_heads == num_heads else 0


def layer_parts(
    layer: LayerLayout, cache: KVCache, order: PageOrder | None, num_blocks: int, locate: Locate
) -> LayerParts | None:
    """The layer as one piece of heads and tokens; None where it must be taken whole.

    Args:
        layer: whose tensor lies as `canonical` says.
        cache: as the engine registers it.
        order: what is known of its pages.
        num_blocks: of the engine's pool.
        locate: see `Locate`.
    """
    if order is None or num_blocks < 2 or not isinstance(cache, torch.Tensor):
        return None
    if order.state:
        return _state_parts(layer, cache, order.state, num_blocks, locate)
    if not order.heads_apart:
        return None
    if not page_order.has_token_dim(cache, layer) or cache.shape[HEAD_DIM] != order.num_heads:
        return None
    if cache.shape[BLOCK_DIM] * cache.shape[TOKEN_DIM] != num_blocks * order.block_tokens:
        return None
    dims = AttentionDims(BLOCK_DIM, HEAD_DIM, TOKEN_DIM if order.tokens_apart else None, order.total_heads)
    try:
        piece = attention_piece(layer.name, strides_of(cache), dims, num_blocks, locate)
    except (LayoutError, ValueError):
        # Its heads or tokens lie otherwise than such a piece can say: then nothing of it is cut.
        return None
    if piece.page_bytes != layer.page_bytes or (not order.tokens_apart and piece.rows.count != 1):
        return None
    packing = "one token after another" if order.tokens_apart else f"a head's tokens as {order.backend} packs them"
    return LayerParts(f"{str(cache.dtype).removeprefix('torch.')}; {packing}", (piece,), FACTS_IN_HEADS)


def _state_parts(
    layer: LayerLayout, cache: torch.Tensor, arrays: tuple[StateArray, ...], num_blocks: int, locate: Locate
) -> LayerParts | None:
    """The arrays of a recurrent layer, whose tensor is pages of bytes."""
    view = strides_of(cache)
    is_pages = cache.shape[BLOCK_DIM] == num_blocks and all(size == 1 for size in cache.shape[1:-1])
    if not is_pages or view.item_bytes != 1 or cache.shape[-1] < layer.page_bytes or view.strides[-1] != 1:
        return None
    pieces = state_pieces(arrays, view.address, view.strides[BLOCK_DIM], locate)
    if sum(piece.page_bytes for piece in pieces) != layer.page_bytes:
        return None
    return LayerParts("a state's arrays by element", pieces, FACTS_IN_ARRAYS)


def whole_format(cache: KVCache, is_state: bool) -> str:
    """The order of bytes in pages that are not cut: all that is known of it."""
    convolutions = f"; convolutions {compat.conv_state_layout()}" if is_state else ""
    return f"whole; {element_order(cache)}{convolutions}"


def strides_of(tensor: Any) -> Strides:
    """A tensor as numbers."""
    width = tensor.element_size()
    address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * width
    return Strides(address, width, tuple(tensor.shape), tuple(tensor.stride()))


def locator(regions: Sequence[tuple[int, int]]) -> Locate:
    """From addresses to regions, each of which is an address and a size."""

    def locate(address: int) -> tuple[int, int]:
        for number, (start, num_bytes) in enumerate(regions):
            if start <= address < start + num_bytes:
                return number, address - start
        raise LayoutError(f"address {address} lies in no allocation")

    return locate
