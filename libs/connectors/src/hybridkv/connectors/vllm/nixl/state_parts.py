"""Which arrays a recurrent layer's page holds, so that peers need not lay out and split their states alike.

vLLM packs a layer's arrays into one page, one after the other: what its convolution remembers, and what its recurrence
does. The first is kept with time outermost or channels outermost (`VLLM_SSM_CONV_STATE_LAYOUT`), which the engine
chooses by connectors that it knows by name, and by instruction set. Here each says where its elements lie, so either is
read into the other. Ranks have channels and heads in order, so where that is so they are shared out as heads are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from hybridkv.peers.description import Axis, Piece
from hybridkv.peers.pieces import Locate

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheSpec

CHANNELS_OUTERMOST = "DS"
SAID_BY_ARRAYS = frozenset({"shapes", "num_heads"})
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
