"""Copies made one by one: the model for tests of copy tables."""

from __future__ import annotations

from hybridkv.connectors.vllm.common.copies.table import ChunkCopy, CopyTable, copy_bytes
from hybridkv.connectors.vllm.common.layout import CacheLayout
from hybridkv.planner import CacheSpec, Transfer, chunk_blocks, chunk_span
from hybridkv.tiers import Slot


def copy_of(spec: CacheSpec, transfer: Transfer, key: bytes, slot: Slot) -> ChunkCopy:
    """Copy of a transfer, for the slot of its chunk."""
    group_index, end_token = transfer.group_index, transfer.end_token
    stored = chunk_blocks(spec, group_index, end_token)
    lead = trail = 0
    if group_index in spec.cut_groups:
        span, block_tokens = chunk_span(spec, group_index, end_token), spec.groups[group_index].block_tokens
        lead, trail = span.start - stored.start * block_tokens, stored.stop * block_tokens - span.end
    return ChunkCopy(group_index, key, slot, transfer.first_block, len(stored), transfer.block_ids, lead, trail)


def bytes_of(layout: CacheLayout, copy: ChunkCopy) -> int:
    """`copy_bytes` of a copy."""
    [shape] = CopyTable.of([copy]).rows()
    return copy_bytes(layout, shape)
