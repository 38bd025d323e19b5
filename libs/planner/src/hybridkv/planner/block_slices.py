"""Where tokens lie in block grids that are not ours: the slices that stores with one base block cut out of each group.

A grid's blocks follow each other without gaps from token 0. A block belongs to the slice in which it ends, so slices
that follow each other leave no block out and take none twice.
"""

from collections.abc import Mapping


def slice_group_blocks(start: int, end: int, base_block_tokens: int, group_block_tokens: int) -> slice:
    """The blocks of a group that [start, end) of the base grid's blocks complete.

    Args:
        start: first base block.
        end: the base block after the last one.
        base_block_tokens: tokens in a block of the base grid.
        group_block_tokens: tokens in a block of the group, larger or smaller.

    Returns:
        A slice of the group's block ids.

    Raises:
        ValueError: a size is not positive, or not 0 <= start <= end.
    """
    _require_positive("base_block_tokens", base_block_tokens)
    _require_positive("group_block_tokens", group_block_tokens)
    if not 0 <= start <= end:
        raise ValueError(f"start and end must be 0 <= start <= end, got start={start}, end={end}")
    return slice(start * base_block_tokens // group_block_tokens, end * base_block_tokens // group_block_tokens)


def common_block_count(lengths: Mapping[int, int], block_tokens: Mapping[int, int], base_block_tokens: int) -> int:
    """Base blocks that every group fills.

    Args:
        lengths: blocks that each group has. A group that is missing here has none, so it makes the count zero.
        block_tokens: tokens in a block of each group; only groups named here count, and all of them do.
        base_block_tokens: tokens in a block of the base grid.

    Raises:
        ValueError: a size is not positive, or a length is negative.
    """
    _require_positive("base_block_tokens", base_block_tokens)
    common: int | None = None
    for group, tokens in block_tokens.items():
        _require_positive(f"block_tokens[{group}]", tokens)
        length = lengths.get(group, 0)
        if length < 0:
            raise ValueError(f"lengths[{group}] must not be negative, got {length}")
        common = length * tokens if common is None else min(common, length * tokens)
    return (common or 0) // base_block_tokens


def _require_positive(field: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{field} must be a positive number of tokens, got {value}")
