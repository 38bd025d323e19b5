"""From the planner's transfers to copies: which bytes of a chunk, and which tokens of its first and last block."""

from __future__ import annotations

from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.connectors.vllm.messages import ChunkCopy
from hybridkv.planner import CacheSpec, Transfer, chunk_blocks, chunk_span
from hybridkv.tiers import Slot


def copy_of(spec: CacheSpec, transfer: Transfer, key: bytes, slot: Slot) -> ChunkCopy:
    """The copy of a transfer, given where its chunk lies."""
    group_index, end_token = transfer.group_index, transfer.end_token
    stored = chunk_blocks(spec, group_index, end_token)
    lead = trail = 0
    if group_index in spec.cut_groups:
        span, block_tokens = chunk_span(spec, group_index, end_token), spec.groups[group_index].block_tokens
        lead, trail = span.start - stored.start * block_tokens, stored.stop * block_tokens - span.end
    return ChunkCopy(group_index, key, slot, transfer.first_block, len(stored), transfer.block_ids, lead, trail)


def copy_bytes(layout: CacheLayout, copy: ChunkCopy) -> int:
    """Bytes of the engine's pages that a copy copies on one rank, the same whether it stores or loads them: the zeros
    that align pages in a chunk are not among them."""
    size = layout.spec.groups[copy.group_index].block_tokens
    num_tokens = len(copy.block_ids) * size
    if copy.first_block == 0:
        num_tokens -= copy.lead_tokens
    if copy.first_block + len(copy.block_ids) == copy.stored_blocks:
        num_tokens -= copy.trail_tokens
    return layout.content_bytes(copy.group_index) * num_tokens // size
