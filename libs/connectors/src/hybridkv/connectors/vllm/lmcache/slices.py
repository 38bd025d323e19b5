"""From block tables to pages: which blocks of which groups a run of chunks has, object by object.

A server keeps an object of a chunk whole or not at all. Where one of its blocks is missing, a window that was given up
or a state that never was, the object is left out, and the server finds no resume that would need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridkv.connectors.vllm.lmcache.messages import PageCopy
from hybridkv.connectors.vllm.requests import NULL_BLOCK
from hybridkv.lmcache.block_ids import cut_tables
from hybridkv.lmcache.geometry import Geometry
from hybridkv.planner import CacheSpec, GroupKind, State, TokenSpan, Transfer, chunk_blocks


def attention_tables(spec: CacheSpec, table: Sequence[Sequence[int]], num_tokens: int) -> dict[int, list[int]]:
    """Block ids of each stored group, by its place among the stored ones, as far as `num_tokens` fill them.

    Running states move in their table, so that of a group of states says nothing: it is all null.
    """
    tables = {}
    for place, index in enumerate(spec.stored_groups):
        group = spec.groups[index]
        num_blocks = num_tokens // group.block_tokens
        is_recurrent = group.kind is GroupKind.RECURRENT
        tables[place] = [NULL_BLOCK] * num_blocks if is_recurrent else list(table[index][:num_blocks])
    return tables


def store_copies(
    geometry: Geometry,
    group_indexes: Sequence[int],
    tables: Mapping[int, Sequence[int]],
    span: TokenSpan,
    *,
    separate: bool,
) -> list[PageCopy]:
    """The pages of whole objects in a run of chunks.

    Args:
        geometry: of the stored groups.
        group_indexes: the engine's, of each of them.
        tables: block ids of each, from token 0.
        span: whole chunks, of which every group has a table.
        separate: whether the server keeps windows and states apart from whole attention.
    """
    if not span.num_tokens:
        return []
    cut = dict(zip(geometry.order, cut_tables(geometry, tables, span.start, span.end), strict=True))
    first, num_chunks = span.start // geometry.chunk_tokens, span.num_tokens // geometry.chunk_tokens
    copies = []
    for chunk in range(num_chunks):
        for together in geometry.objects(separate=separate):
            parts = {place: _kept(geometry, place, cut[place], chunk) for place in together}
            if any(NULL_BLOCK in ids for ids in parts.values()):
                continue
            for place, ids in parts.items():
                before = geometry.blocks_per_chunk[place] - len(ids)
                copies.append(PageCopy(group_indexes[place], first + chunk, before, ids))
    return copies


def _kept(geometry: Geometry, place: int, blocks: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Of a group's blocks in one of the chunks, those that a server keeps."""
    per_chunk, kept = geometry.blocks_per_chunk[place], geometry.kept_per_chunk[place]
    end = (chunk + 1) * per_chunk
    return tuple(blocks[end - kept : end])


def state_copies(spec: CacheSpec, states: Sequence[State], num_tokens: int) -> list[PageCopy]:
    """The pages of states that lie at the end of a chunk whose tokens are final, where all groups of states have one
    there: a server keeps them together."""
    chunk = spec.chunk_tokens
    recurrent = {index for index in spec.stored_groups if spec.groups[index].kind is GroupKind.RECURRENT}
    by_end: dict[int, dict[int, int]] = {}
    for state in states:
        end = state.num_tokens
        if end % chunk == 0 and 0 < end <= num_tokens and state.block_id != NULL_BLOCK:
            by_end.setdefault(end, {})[state.group_index] = state.block_id
    return [
        PageCopy(index, end // chunk - 1, chunk // spec.groups[index].block_tokens - 1, (blocks[index],))
        for end, blocks in by_end.items()
        if blocks.keys() >= recurrent
        for index in sorted(recurrent)
    ]


def load_copies(spec: CacheSpec, transfers: Sequence[Transfer]) -> tuple[PageCopy, ...]:
    """What a resume needs, page by page."""
    copies = []
    for transfer in transfers:
        chunk = transfer.end_token // spec.chunk_tokens - 1
        begins = chunk * spec.chunk_tokens // spec.groups[transfer.group_index].block_tokens
        first = chunk_blocks(spec, transfer.group_index, transfer.end_token).start + transfer.first_block - begins
        copies.append(PageCopy(transfer.group_index, chunk, first, transfer.block_ids))
    return tuple(copies)
