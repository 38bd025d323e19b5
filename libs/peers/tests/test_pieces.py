"""Pieces cover the bytes that `canonical` finds in a tensor, whatever the order of its dimensions in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from hybridkv.canonical import LayerLayout, LayoutError, Strides, page_regions
from hybridkv.peers.description import Axis, Piece
from hybridkv.peers.pieces import AttentionDims, attention_piece

BASE = 4096
BLOCKS, HEADS, TOKENS, CONTENT = 6, 3, 4, 5


def locate(address: int) -> tuple[int, int]:
    return 0, address - BASE


def strided(shape: Sequence[int], order: Sequence[int], item_bytes: int = 2) -> Strides:
    """A dense tensor with its dimensions in memory in that order, outermost first."""
    strides, span = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = span
        span *= shape[dim]
    return Strides(BASE, item_bytes, tuple(shape), tuple(strides))


def covered(piece: Piece, block: int) -> set[int]:
    """Byte offsets of a block."""
    start = piece.offset_bytes + block * piece.block_stride_bytes
    steps = [range(0, axis.count * axis.stride_bytes or 1, axis.stride_bytes or 1) for _, axis in piece.axes]
    return {start + sum(offsets) + byte for offsets in itertools.product(*steps) for byte in range(piece.item_bytes)}


def canonical_bytes(layer: LayerLayout, tensor: Strides, num_blocks: int, block: int) -> set[int]:
    found: set[int] = set()
    for region in page_regions(layer, tensor, num_blocks):
        start = region.address - BASE + block * region.stride_bytes
        found.update(range(start, start + region.page_bytes))
    return found


@pytest.mark.parametrize("num_blocks", [6, 3, 2])
@pytest.mark.parametrize("order", [(*order, 3) for order in itertools.permutations((0, 1, 2))])
def test_pieces_cover_the_pages_of_every_layout_and_every_block_split(order: tuple[int, ...], num_blocks: int) -> None:
    tensor = strided((BLOCKS, HEADS, TOKENS, CONTENT), order)
    layer = LayerLayout("layer", BLOCKS // num_blocks * HEADS * TOKENS * CONTENT * 2, interleaved=True)
    piece = attention_piece("layer", tensor, AttentionDims(0, 1, 2, HEADS), num_blocks, locate)
    assert piece.page_bytes == layer.page_bytes
    assert piece.item_bytes == CONTENT * 2
    for block in range(num_blocks):
        assert covered(piece, block) == canonical_bytes(layer, tensor, num_blocks, block)


def test_separate_halves_for_k_and_v_are_rows() -> None:
    tensor = strided((2, BLOCKS, TOKENS, HEADS, CONTENT), (0, 1, 2, 3, 4))
    piece = attention_piece("layer", tensor, AttentionDims(1, 3, 2, HEADS), BLOCKS, locate)
    assert piece.rows == Axis(2, BLOCKS * TOKENS * HEADS * CONTENT * 2)
    half = BLOCKS * TOKENS * HEADS * CONTENT * 2
    page = half // BLOCKS
    assert covered(piece, 2) == {start + byte for start in (2 * page, half + 2 * page) for byte in range(page)}


def test_latents_are_one_head_that_every_rank_has() -> None:
    tensor = strided((BLOCKS, TOKENS, 576), (0, 1, 2))
    piece = attention_piece("layer", tensor, AttentionDims(0, None, 1, 1), BLOCKS, locate)
    assert (piece.heads.count, piece.total_heads, piece.units.count, piece.item_bytes) == (1, 1, TOKENS, 1152)


def test_inseparable_tokens_are_one_unit_of_a_head() -> None:
    tensor = strided((BLOCKS, HEADS, TOKENS, CONTENT), (0, 1, 2, 3))
    piece = attention_piece("layer", tensor, AttentionDims(0, 1, None, HEADS), BLOCKS // 2, locate)
    assert (piece.kernels.count, piece.units.count, piece.item_bytes) == (2, 1, TOKENS * CONTENT * 2)


def test_a_non_contiguous_or_badly_split_tensor_is_refused() -> None:
    gaps = Strides(BASE, 2, (BLOCKS, HEADS, TOKENS, CONTENT), (HEADS * TOKENS * 16, TOKENS * 16, 16, 2))
    piece = attention_piece("layer", gaps, AttentionDims(0, 1, 2, HEADS), BLOCKS, locate)
    assert (piece.rows, piece.item_bytes) == (Axis(CONTENT, 4), 2)
    twice = Strides(BASE, 2, (BLOCKS, 1, 2, 2, 3), (96, 96, 32, 8, 2))
    with pytest.raises(LayoutError, match="not contiguous"):
        attention_piece("layer", twice, AttentionDims(0, 1, None, 1), BLOCKS, locate)
    with pytest.raises(LayoutError, match="multiple of 4"):
        attention_piece("layer", gaps, AttentionDims(0, 1, 2, HEADS), 4, locate)


def test_a_tensor_is_read_at_the_offsets_of_its_piece() -> None:
    memory = np.arange(BLOCKS * HEADS * TOKENS * CONTENT, dtype=np.int16)
    view = memory.reshape(BLOCKS, TOKENS, HEADS, CONTENT).transpose(0, 2, 1, 3)
    strides = tuple(stride // 2 for stride in view.strides)
    tensor = Strides(BASE, 2, view.shape, strides)
    piece = attention_piece("layer", tensor, AttentionDims(0, 1, 2, HEADS), BLOCKS, locate)
    at = 4 * piece.block_stride_bytes + 2 * piece.heads.stride_bytes + 3 * piece.units.stride_bytes
    found = memory.view(np.uint8)[at : at + piece.item_bytes].view(np.int16)
    assert (found == view[4, 2, 3]).all()
