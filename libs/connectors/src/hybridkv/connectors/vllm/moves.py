"""From the planner's transfers to moves: which bytes of a chunk, and which tokens of its first and last block."""

from __future__ import annotations

from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.messages import Move
from hybridkv.planner import CacheSpec, TokenSpan, Transfer, chunk_blocks, chunk_span
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
    """Bytes that a move copies on one rank."""
    if move.group_index not in layout.spec.cut_groups:
        return len(move.block_ids) * layout.block_bytes(move.group_index)
    # What is moved reaches to the end of the chunk.
    size = layout.spec.groups[move.group_index].block_tokens
    start = move.first_block * size if move.first_block else move.lead_tokens
    return layout.span_bytes(move.group_index, TokenSpan(start, move.stored_blocks * size - move.trail_tokens))
