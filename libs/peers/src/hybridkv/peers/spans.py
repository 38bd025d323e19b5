"""Which tokens of a group move: what a resume reads of it that the reader has not computed, in whole cells.

A cell is the smaller block of the two sides. Where both have the same block it is that block, and what moves is what
`planner.load_start` says, to the end of the last block.
"""

from __future__ import annotations

from hybridkv.planner import GroupKind, GroupSpec, TokenSpan, resume_start


def moved_span(
    group: GroupSpec, cell_tokens: int, num_tokens: int, computed_tokens: int, serves_blocks: bool = True
) -> TokenSpan:
    """The tokens that a group needs from elsewhere to resume at `num_tokens`; it begins with a cell.

    Args:
        group: of the side that reads.
        cell_tokens: divides its block.
        num_tokens: the boundary. A state is there at exactly this.
        computed_tokens: the prefix that the reader holds itself: whole blocks.
        serves_blocks: the reader's engine may find its first block again, for a request that resumes where that block
            ends and so reads more of it than this one does. That matters where cells are smaller than blocks.

    Returns:
        A span that ends with `num_tokens`, or an empty one.
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
