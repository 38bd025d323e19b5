"""Token span of a group to move: the tokens that a resume reads and the reader has not computed, in whole cells.

A cell is the smaller block of the two sides. With equal blocks a cell is one block, and the span begins at
`planner.load_start` and ends with the last block.
"""

from __future__ import annotations

from hybridkv.planner import GroupKind, GroupSpec, TokenSpan, resume_start


def moved_span(
    group: GroupSpec, cell_tokens: int, num_tokens: int, computed_tokens: int, serves_blocks: bool = True
) -> TokenSpan:
    """Tokens that a group must read from a peer to resume at `num_tokens`. The span begins at a cell.

    Args:
        group: of the reader.
        cell_tokens: divides the reader's block size.
        num_tokens: resume point. A state must be at exactly this boundary.
        computed_tokens: prefix that the reader has: whole blocks.
        serves_blocks: the reader's prefix cache may reuse the first block for a request that resumes at the end of that
            block and so reads more of it. This matters if cells are smaller than blocks.

    Returns:
        A span that ends at `num_tokens`, or an empty one.
    """
    nothing = TokenSpan(num_tokens, num_tokens)
    if num_tokens <= computed_tokens or group.kind is GroupKind.SCRATCH:
        return nothing
    start = resume_start(group, num_tokens)
    if group.kind is GroupKind.RECURRENT:
        return TokenSpan(start, num_tokens)
    if start >= num_tokens:
        return nothing
    if serves_blocks:
        block_start = start // group.block_tokens * group.block_tokens
        block_end = min(block_start + group.block_tokens, num_tokens)
        start = max(block_start, resume_start(group, block_end))
    return TokenSpan(max(computed_tokens, start // cell_tokens * cell_tokens), num_tokens)
