"""From the planner's transfers to moves: which bytes of a chunk, and which tokens of its first and last block."""

from __future__ import annotations

from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.messages import Move
from hybridkv.planner import CacheSpec, Transfer, chunk_blocks, chunk_span
from hybridkv.tiers import Slot


def move_of(spec: CacheSpec, transfer: Transfer, key: bytes, slot: Slot) -> Move:
    """The move of a transfer, given where its chunk lies."""
    group_index, end_token = transfer.group_index, transfer.end_token
    stored = chunk_blocks(spec, group_index, end_token)
    lead = trail = 0
    if group_index in spec.cut_groups:
        span, block_tokens = chunk_span(spec, group_index, end_token), spec.groups[group_index].block_tokens
        lead, trail = span.start - stored.start * block_tokens, stored.stop * block_tokens - span.end
    return Move(group_index, key, slot, transfer.first_block, len(stored), transfer.block_ids, lead, trail)


def move_bytes(layout: CacheLayout, move: Move) -> int:
    """Bytes of the engine's pages that a move copies on one rank, the same whether it stores or loads them: the zeros
    that align pages in a chunk are not among them."""
    size = layout.spec.groups[move.group_index].block_tokens
    num_tokens = len(move.block_ids) * size
    if move.first_block == 0:
        num_tokens -= move.lead_tokens
    if move.first_block + len(move.block_ids) == move.stored_blocks:
        num_tokens -= move.trail_tokens
    return layout.content_bytes(move.group_index) * num_tokens // size
