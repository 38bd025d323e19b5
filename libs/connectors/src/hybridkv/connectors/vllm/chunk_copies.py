"""From the planner's transfers to copies: which bytes of a chunk, and which tokens of its first and last block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybridkv.connectors.vllm.copy_table import ChunkPart, CopyColumns, CopyRun, CopyShape, CopyTable
from hybridkv.connectors.vllm.layout import CacheLayout
from hybridkv.planner import CacheSpec, LocalCopies, Transfer, TransferRun, chunk_blocks, chunk_span
from hybridkv.tiers import Slot


def copy_bytes(layout: CacheLayout, copy: CopyShape) -> int:
    """Bytes of the engine's pages that such a copy copies on one rank, the same whether it stores or loads them: the
    zeros that align pages in a chunk are not among them."""
    size = layout.spec.groups[copy.group_index].block_tokens
    num_tokens = copy.num_blocks * size
    if copy.first_block == 0:
        num_tokens -= copy.lead_tokens
    if copy.first_block + copy.num_blocks == copy.stored_blocks:
        num_tokens -= copy.trail_tokens
    return layout.content_bytes(copy.group_index) * num_tokens // size


class Copies(NamedTuple):
    """The copies of one load or store, and their bytes on one rank by what they are beside: a tier, or blocks."""

    copies: CopyTable
    tier_bytes: int
    local_bytes: int


def copies_of(
    layout: CacheLayout,
    transfers: Sequence[Transfer],
    keys: Sequence[bytes],
    slots: Sequence[Slot],
    local: LocalCopies | None = None,
) -> Copies:
    """The copies of a load's transfers, given where each chunk lies and which of them the engine holds itself."""
    spec = layout.spec
    whole = _whole_parts(spec)
    parts = [
        (None if transfer.first_block or transfer.end_token % spec.chunk_tokens else whole[transfer.group_index])
        or _part(spec, transfer.group_index, transfer.end_token, transfer.first_block)
        for transfer in transfers
    ]
    block_ids = [transfer.block_ids for transfer in transfers]
    local_blocks = None if local is None else local.block_ids
    return _measured(layout, CopyTable.of_columns(CopyColumns(parts, keys, slots, block_ids, local_blocks)))


def copies_of_runs(
    layout: CacheLayout, runs: Sequence[TransferRun], keys: Sequence[bytes], slots: Sequence[Slot]
) -> Copies:
    """The copies of a store, or of a load of which the engine holds nothing itself, without an object for a chunk."""
    spec = layout.spec
    whole = _whole_parts(spec)
    copied: list[CopyRun] = []
    for run in runs:
        if run.num_transfers > 1 and (part := whole[run.group_index]) is not None:
            copied.append(CopyRun(part, run.num_transfers, run.block_ids))
        else:
            copied += [
                CopyRun(_part(spec, each.group_index, each.end_token, each.first_block), 1, each.block_ids)
                for each in run.transfers(spec.chunk_tokens)
            ]
    return _measured(layout, CopyTable.of_runs(copied, keys, slots))


def _measured(layout: CacheLayout, table: CopyTable) -> Copies:
    num_bytes = {False: 0, True: 0}
    for shape in table.rows():
        num_bytes[shape.num_local > 0] += shape.num_copies * copy_bytes(layout, shape)
    return Copies(table, num_bytes[False], num_bytes[True])


def _whole_parts(spec: CacheSpec) -> list[ChunkPart | None]:
    """Of each group, what a whole chunk is; None where chunks differ."""
    return [
        None if blocks is None else ChunkPart(group_index, 0, len(blocks), 0, 0)
        for group_index, blocks in enumerate(spec.alike_parts)
    ]


def _part(spec: CacheSpec, group_index: int, end_token: int, first_block: int) -> ChunkPart:
    stored = chunk_blocks(spec, group_index, end_token)
    if group_index not in spec.cut_groups:
        return ChunkPart(group_index, first_block, len(stored), 0, 0)
    span, size = chunk_span(spec, group_index, end_token), spec.groups[group_index].block_tokens
    return ChunkPart(
        group_index, first_block, len(stored), span.start - stored.start * size, stored.stop * size - span.end
    )
