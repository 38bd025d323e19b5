"""Tokens and blocks that each group needs to resume, the part of a chunk that is stored, and the order of chunks.

`resume_start` defines the tokens that each kind needs. The other functions, except `path_order`, follow from it.
"""

from collections.abc import Iterable, Sequence
from operator import itemgetter

import msgspec

from hybridkv.planner.groups import CacheSpec, GroupKind, GroupSpec, TokenSpan

Part = tuple[int, int]
"""A group's part of a chunk or of a tail: index of the group, and end token of the chunk or tail."""
_BY_END_AND_GROUP = itemgetter(1, 0)
"""Sort key, three times as fast as a Python function. A path is sorted several times while it grows."""
# Every lookup calls `resume_start` for every group. In CPython 3.11, access to an enum member takes longer than the
# rest of the function.
_FULL, _WINDOW, _CHUNKED, _RECURRENT = GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED, GroupKind.RECURRENT


def resume_start(group: GroupSpec, num_tokens: int) -> int:
    """First token that `group` reads when a request resumes at `num_tokens`; `num_tokens` if it reads none.

    Never decreases as `num_tokens` grows, so one stored part of a chunk serves every later boundary.
    """
    if num_tokens <= 0:
        return 0
    kind = group.kind
    if kind is _FULL:
        return 0
    if kind is _WINDOW:
        assert group.window_tokens is not None
        return max(0, num_tokens - (group.window_tokens - 1))
    if kind is _CHUNKED:
        assert group.align_tokens is not None
        return num_tokens // group.align_tokens * group.align_tokens
    return num_tokens - 1 if kind is _RECURRENT else num_tokens


def chunk_span(spec: CacheSpec, group_index: int, end_token: int) -> TokenSpan:
    """Tokens of a group that are stored for the chunk or tail that ends at `end_token`; may be empty.

    The span starts at the start of a block, unless the chunk starts inside a block. It ends at the end of a block,
    unless the chunk or tail ends inside a block. FULL: all tokens of the chunk or tail. WINDOW and CHUNKED: the blocks
    that a boundary at `end_token` or later reads. RECURRENT: the last block, which holds the state.
    """
    group = spec.groups[group_index]
    chunk_start = (end_token - 1) // spec.chunk_tokens * spec.chunk_tokens
    start = resume_start(group, end_token)
    if start >= end_token:
        return TokenSpan(end_token, end_token)
    return TokenSpan(max(chunk_start, start // group.block_tokens * group.block_tokens), end_token)


def chunk_blocks(spec: CacheSpec, group_index: int, end_token: int) -> range:
    """`chunk_span` as indices into the group's block table.

    The last block of a tail may be partly filled. A chunk that starts or ends inside a block shares this block with its
    neighbour.
    """
    block_tokens, chunk = spec.groups[group_index].block_tokens, spec.chunk_tokens
    alike = spec.uniform_chunk_blocks[group_index]
    if alike is not None and end_token > 0 and end_token % chunk == 0:
        before = (end_token - chunk) // block_tokens
        return range(before + alike.start, before + alike.stop)
    span = chunk_span(spec, group_index, end_token)
    if span.num_tokens == 0:
        return range(0)
    return range(span.start // block_tokens, -(-span.end // block_tokens))


def read_start(group: GroupSpec, num_tokens: int, computed_tokens: int) -> int:
    """First token that a group reads from a tier to resume at `num_tokens`; `num_tokens` if it reads none.

    The engine holds the attention KV of `computed_tokens`, so these tokens are not read. The state is always read.
    """
    start = resume_start(group, num_tokens)
    if group.kind is _RECURRENT or start >= computed_tokens:
        return start
    return min(num_tokens, computed_tokens)


def load_start(group: GroupSpec, num_tokens: int, computed_tokens: int) -> int:
    """First token that a group loads to resume at `num_tokens`: `read_start`, moved down to the start of its block
    unless the engine holds the tokens before it.

    Blocks are loaded whole, because the engine treats a kept block as complete. If no chunk ends inside a block,
    `read_start` and `load_start` lie in the same chunk.
    """
    start = resume_start(group, num_tokens)
    if group.kind is _RECURRENT or start >= computed_tokens:
        return start // group.block_tokens * group.block_tokens if start < num_tokens else num_tokens
    return min(num_tokens, computed_tokens)


def needed_ends(spec: CacheSpec, group_index: int, num_tokens: int, computed_tokens: int) -> Sequence[int]:
    """Ends of the chunks that a group needs from a tier to resume at `num_tokens`.

    Args:
        spec: the model's groups.
        group_index: index of the group.
        num_tokens: the boundary: a multiple of `spec.boundary_tokens`.
        computed_tokens: the prefix that the engine holds itself.

    Returns:
        Ascending ends, empty if the group needs none: multiples of `spec.chunk_tokens`. If the boundary lies inside a
        chunk, the last end is the boundary, as the end of a tail.
    """
    group, chunk = spec.groups[group_index], spec.chunk_tokens
    start = load_start(group, num_tokens, computed_tokens)
    if start >= num_tokens:
        return range(0)
    ends = range((start // chunk + 1) * chunk, num_tokens + 1, chunk)
    return ends if num_tokens % chunk == 0 else (*ends, num_tokens)


def path_order(spec: CacheSpec, parts: Iterable[Part]) -> list[Part]:
    """Sorts parts of one path so that each part comes after the parts that it needs. Eviction uses the reverse order.

    A path is the chunks of a request from its first token. If parts are copied in this order and evicted in the reverse
    order, a request can at any time resume up to the first missing chunk.

    The first sort key is the position, because the end of a path is useless without its beginning. At one position FULL
    groups come first, because a state or a window is useless without them.
    """
    order = sorted(range(len(spec.groups)), key=lambda index: spec.groups[index].kind is not GroupKind.FULL)
    if order == list(range(len(order))):
        return sorted(parts, key=_BY_END_AND_GROUP)
    place = {group_index: number for number, group_index in enumerate(order)}
    return sorted(parts, key=lambda part: (part[1], place[part[0]]))


def needed_parts(spec: CacheSpec, num_tokens: int, computed_tokens: int) -> list[Part]:
    """Parts that a load to a boundary reads, in order of value: FULL groups first, each from its beginning, because a
    state or a window is useless without them.

    Args:
        spec: the model's groups.
        num_tokens: the boundary: a multiple of `spec.boundary_tokens`.
        computed_tokens: the prefix that the engine holds itself.
    """
    groups = sorted(spec.stored_groups, key=lambda index: spec.groups[index].kind is not GroupKind.FULL)
    return [(index, end) for index in groups for end in needed_ends(spec, index, num_tokens, computed_tokens)]


class ClippedBlocks(msgspec.Struct, frozen=True):
    """Blocks that a transfer moves.

    Args:
        block_ids: for each group, the blocks to move, in token order.
        first_blocks: for each group, the index of the first of these blocks in the block table.
    """

    block_ids: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]


def read_blocks(group: GroupSpec, num_tokens: int) -> range:
    """Indices into a group's block table of the blocks that are read when a request resumes at `num_tokens`."""
    start = resume_start(group, num_tokens)
    if group.kind is GroupKind.SCRATCH or start >= num_tokens:
        return range(0)
    return range(start // group.block_tokens, -(-num_tokens // group.block_tokens))


def clip_blocks(
    groups: Sequence[GroupSpec], block_ids: Sequence[Sequence[int]], num_tokens: int | None = None
) -> ClippedBlocks:
    """Keeps the blocks of every group that are read when a request resumes at `num_tokens`.

    Args:
        groups: in the order of `block_ids`.
        block_ids: for every group, its blocks in token order, from token 0.
        num_tokens: tokens that the blocks hold. None: every group's blocks are full.

    Raises:
        ValueError: the number of lists is not the number of groups, `num_tokens` is negative, or a list is too short.
    """
    if len(block_ids) != len(groups):
        raise ValueError(f"block_ids must have one list for each of {len(groups)} groups, got {len(block_ids)}")
    if num_tokens is not None and num_tokens < 0:
        raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
    kept: list[tuple[int, ...]] = []
    first: list[int] = []
    for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        wanted = read_blocks(group, len(ids) * group.block_tokens if num_tokens is None else num_tokens)
        if wanted and wanted.stop > len(ids):
            raise ValueError(
                f"block_ids[{index}] must hold {num_tokens} tokens in {wanted.stop} blocks, got {len(ids)}"
            )
        kept.append(tuple(ids[wanted.start : wanted.stop]))
        first.append(wanted.start)
    return ClippedBlocks(tuple(kept), tuple(first))
