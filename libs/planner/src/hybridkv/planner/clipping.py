"""Block ids that a transfer needs to move, clipped for each group to what is read; the rest is kept for accounting."""

from collections.abc import Sequence

import msgspec

from hybridkv.planner.coverage import resume_start
from hybridkv.planner.groups import GroupKind, GroupSpec


class ClippedBlocks(msgspec.Struct, frozen=True):
    """What a transfer moves of each group, and what there was.

    Args:
        block_ids: for every group the blocks to move, in token order.
        first_blocks: for every group where its `block_ids` begin within `unclipped`.
        unclipped: every group's block ids as they were given: what an engine frees, and what it is charged for.
    """

    block_ids: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    unclipped: tuple[tuple[int, ...], ...]


def read_blocks(group: GroupSpec, num_tokens: int) -> range:
    """The blocks of a group, by their place in its table, that are read when a request goes on after `num_tokens`."""
    start = resume_start(group, num_tokens)
    if group.kind is GroupKind.SCRATCH or start >= num_tokens:
        return range(0)
    return range(start // group.block_tokens, -(-num_tokens // group.block_tokens))


def clip_blocks(
    groups: Sequence[GroupSpec], block_ids: Sequence[Sequence[int]], num_tokens: int | None = None
) -> ClippedBlocks:
    """Keeps of every group the blocks that are read when a request goes on after `num_tokens`.

    Args:
        groups: in the order of `block_ids`.
        block_ids: for every group its blocks in token order, from token 0.
        num_tokens: tokens that the blocks hold. None: every group's blocks are full.

    Raises:
        ValueError: not one list for every group, `num_tokens` is negative, or a list is too short for it.
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
    return ClippedBlocks(tuple(kept), tuple(first), tuple(map(tuple, block_ids)))
